"""Fixtures that many tests share: models, an empty HVD_HOME, one Ray cluster for the session."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before any test imports a library that reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_MODE"] = "disabled"  # the cluster of the tests listens on loopback alone
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
from hypothesis import HealthCheck, settings

from hvd_ray.errors import UserError

IS_CI = bool(os.environ.get("CI"))

_ANY_SPEED = [HealthCheck.too_slow]
settings.register_profile("default", deadline=None, suppress_health_check=_ANY_SPEED)
settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True, suppress_health_check=_ANY_SPEED
)
settings.load_profile("ci" if IS_CI else "default")


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's folder in the user's own HVD_HOME, fetched on first use."""
    from hvd_ray.config import DEFAULT_MODEL
    from hvd_ray.fetch import resolve_model

    try:
        return Path(resolve_model(DEFAULT_MODEL).path_or_id)
    except UserError as error:
        if IS_CI:
            raise
        pytest.skip(f"the default model is absent and cannot be fetched: {error}")


@pytest.fixture
def hvd_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An HVD_HOME of this test's own, not made yet."""
    home = tmp_path / "hvd_home"
    monkeypatch.setenv("HVD_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def tiny_llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 2 layers with a byte-level tokenizer, the same in every session.

    Its weights are drawn wide, so that greedy decoding wanders instead of repeating a token and
    the best logit stands well clear of the second.
    """
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny_llama(folder)
    return folder


@pytest.fixture(scope="session")
def ray_session() -> Iterator[Any]:
    """The one local Ray cluster of the session: 4 logical CPUs, no dashboard."""
    import ray

    with tempfile.TemporaryDirectory(prefix="hvd", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=200_000_000,
            log_to_driver=False,
            _temp_dir=folder,  # Ray's sockets need a short path
        )
        yield ray
        ray.shutdown()


TINY_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny_llama(folder: Path, *, num_layers: int = 2) -> None:
    """Write a random Llama with its tokenizer; the same for the same number of layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        model = LlamaForCausalLM(config).to(torch.float32)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def _tiny_tokenizer() -> Any:
    """All bytes, a few merges and the control tokens of the default model: 300 ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = [pair for word in _TINY_WORDS for pair in _left_to_right(word)]
    merges = list(dict.fromkeys(merges))
    pieces = [*control, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    core = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token=control[0],
        bos_token=control[1],
        eos_token=control[2],
        pad_token=control[2],
        model_max_length=2048,
    )
    tokenizer.chat_template = TINY_TEMPLATE
    return tokenizer


_TINY_WORDS = ("Ġthe", "Ġand", "Ġto", "Ġof", "ing", "tion", "Ġin", "er", "re", "ed", "est", "ould",
               "Ġis", "Ġa", "Ġfor", "en", "at", "on", "Ġsay", "it", "name", "self")  # fmt: skip


def _left_to_right(word: str) -> list[tuple[str, str]]:
    return [(word[:end], word[end]) for end in range(1, len(word))]
