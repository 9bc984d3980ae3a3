"""The one way into transformers for files that others made: data only, one line for what fails.

Whatever is wrong with such a file, the libraries find it somewhere in their depths and raise what
they happen to raise; callers get a `UserError` that names the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hvd_ray.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_MAX_CAUSE_CHARS = 300


def read_model_config(path: str | Path) -> PretrainedConfig:
    """A model's configuration.

    Raises:
        UserError: it cannot be read, does not describe a model, or asks for code or files that are
            none of the folder's safetensors.
    """
    from transformers import AutoConfig

    with _one_line(path, "its config.json cannot be used"):
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    _refuse_detours(path, config)
    return config


def load_model(path: str | Path, *, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model from safetensors, whole.

    Raises:
        UserError: it cannot be loaded, or weights are missing or of another shape.
    """
    from transformers import AutoModelForCausalLM

    read_model_config(path)
    with _one_line(path, "cannot be loaded"):
        model, found = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    _refuse_incomplete(path, found)
    return model


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """A model's tokenizer.

    Raises:
        UserError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    with _one_line(path, "its tokenizer cannot be loaded"):
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)


@contextmanager
def _one_line(path: str | Path, what: str) -> Iterator[None]:
    """Turn whatever a library raises over a file into one line about the model."""
    try:
        yield
    except Exception as error:
        # Broad, since made-up configurations reach any line of foreign code, and the tokenizers'
        # Rust raises bare exceptions.
        if "trust_remote_code" in str(error):
            raise UserError(
                f"model {path}: it brings code of its own, which is never run; choose a model that "
                "transformers knows by itself"
            ) from error
        raise UserError(f"model {path}: {what} ({_cause(error)})") from error


def _cause(error: Exception) -> str:
    text = next(iter(str(error).strip().splitlines()), "")[:_MAX_CAUSE_CHARS]
    if isinstance(error, OSError | ValueError | RuntimeError) and text:
        return text
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def _refuse_detours(path: str | Path, config: PretrainedConfig) -> None:
    """A configuration may name a weights file of its own, a pickle too, and an attention that is
    downloaded as code."""
    weights = getattr(config, "transformers_weights", None)
    if weights is not None:
        raise UserError(
            f"model {path}: its config.json names weights of its own ({str(weights)[:80]!r}); "
            "expected model.safetensors"
        )
    attention = str(config._attn_implementation or "")
    if "/" in attention:
        raise UserError(
            f"model {path}: its config.json asks for attention code from elsewhere "
            f"({attention[:80]!r}), which is never run"
        )


def _refuse_incomplete(path: str | Path, found: dict[str, Any]) -> None:
    """transformers fills weights that a checkpoint lacks with random numbers and goes on."""
    lacking = sorted(str(key) for key in [*found["missing_keys"], *found["mismatched_keys"]])
    if lacking:
        raise UserError(
            f"model {path}: {len(lacking)} weights are missing or of another shape, the first "
            f"{lacking[0]}; its files do not belong together, fetch or copy it again"
        )
