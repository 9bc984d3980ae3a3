"""Turn a GGUF file into a transformers folder: float32 weights, tokenizer and chat template."""

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from hvd_ray.errors import UserError

STEPS = ("reading the GGUF file", "building the model", "writing the tokenizer", "writing weights")


def convert_gguf(gguf: Path, *, to: Path, on_step: Callable[[str], None]) -> None:
    """Write the Llama model of `gguf` and its tokenizer into the existing folder `to`.

    transformers reads GGUF but refuses to save a model that it loaded so: the weights are copied
    into a fresh model of the same configuration. `on_step` hears each of `STEPS` as it starts.

    Raises:
        UserError: no room to write.
    """
    with _quiet_libraries():
        on_step(STEPS[0])
        loaded, tokenizer = _read(gguf)
        on_step(STEPS[1])
        model = _fresh_copy(loaded)
        on_step(STEPS[2])
        tokenizer.save_pretrained(str(to))
        on_step(STEPS[3])
        _save(model, to)


def _read(gguf: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    folder = str(gguf.parent)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, **where
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **where)
    tokenizer.model_max_length = model.config.max_position_embeddings
    for trace_of_loading in ("local_files_only", "is_local", "gguf_file"):
        tokenizer.init_kwargs.pop(trace_of_loading, None)
    return model, tokenizer


def _fresh_copy(loaded: Any) -> Any:
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    settings = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(name, None)
    config = LlamaConfig(**settings)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    return model.to(torch.float32)


def _save(model: Any, folder: Path) -> None:
    from safetensors import SafetensorError

    try:
        model.save_pretrained(str(folder))
    except SafetensorError as error:  # safetensors hides the operating system's error in its text
        if "os error 28" not in str(error):
            raise
        raise UserError(
            f"no room left while writing {folder.parent}; "
            "free some space or set HVD_HOME to a folder on a larger disk"
        ) from error


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Silence the bars and notes of transformers: the only progress shown is ours."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    gguf_logger = logging.getLogger("gguf")
    gguf_level = gguf_logger.level
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    gguf_logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):  # one bar of the reader has no switch
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        gguf_logger.setLevel(gguf_level)
        if had_bars:
            transformers_logging.enable_progress_bar()
