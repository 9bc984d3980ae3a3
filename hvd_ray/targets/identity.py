"""Is this folder a model we can load, and which one is it: cheap to ask, no weights loaded."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TypeGuard

from hvd_ray.errors import UserError

# The first set that is complete decides which ids a text becomes.
_VOCABULARY_FILES = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("tekken.json",),
)
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_MAX_HEADER_BYTES = 100_000_000
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


def check_model_folder(folder: Path) -> None:
    """See that `folder` holds configuration, tokenizer and safetensors weights.

    Raises:
        UserError: naming the first that is missing or unreadable.
    """
    _read_config(folder)
    _vocabulary(folder)
    _model_weights(folder)


def model_fingerprint(folder: str | Path) -> str:
    """sha256 (hex) over configuration, vocabulary and weights of a model folder.

    Of each weight file it takes size, safetensors header and 64 blocks spread over the data, not
    all bytes: two fine-tunes of one architecture differ in it, and it takes milliseconds.

    Raises:
        UserError: the folder is no loadable model.
    """
    folder = Path(folder)
    digest = hashlib.sha256()
    config = json.dumps(_read_config(folder), sort_keys=True)
    _add(digest, b"config", config.encode())
    _add(digest, b"tokenizer", tokenizer_sha(folder).encode())
    for file in _model_weights(folder):
        _add(digest, file.name.encode(), *_weight_samples(file))
    return digest.hexdigest()


def head_fingerprint(folder: str | Path) -> str:
    """sha256 (hex) over a drafter head's configuration and, by sample, its weights.

    Raises:
        UserError: the folder holds no weights.
    """
    folder = Path(folder)
    digest = hashlib.sha256()
    _add(digest, b"config", (folder / "config.json").read_bytes())
    for file in _weights(folder):
        _add(digest, file.name.encode(), *_weight_samples(file))
    return digest.hexdigest()


def tokenizer_sha(folder: str | Path) -> str:
    """sha256 (hex) over the files that decide which ids a text becomes.

    Raises:
        UserError: the folder holds no tokenizer.
    """
    digest = hashlib.sha256()
    for file in _vocabulary(Path(folder)):
        _add(digest, file.name.encode(), file.read_bytes())
    return digest.hexdigest()


def vocab_size_of(folder: Path) -> int | None:
    """Rows of the model's output head, as its configuration says; None where it says nothing."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # a tokenizer alone
    sections = [config, config.get("text_config")] if isinstance(config, dict) else []
    sizes = [section.get("vocab_size") for section in sections if isinstance(section, dict)]
    return next((size for size in sizes if isinstance(size, int)), None)


def _read_config(folder: Path) -> dict[str, object]:
    file = folder / "config.json"
    config = _read_json(file)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(f"{file} is no transformers configuration: it has no model_type")
    return config


def _read_json(file: Path) -> object:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{file.parent} is no model folder: {file.name} is missing; "
            "give a folder saved by transformers, or a name such as smollm2-135m"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as JSON ({error}); fetch the model again") from None


def _vocabulary(folder: Path) -> list[Path]:
    for names in _VOCABULARY_FILES:
        files = [folder / name for name in names]
        if all(file.is_file() for file in files):
            return files
    raise UserError(
        f"{folder} holds no tokenizer (tokenizer.json, or another known form); "
        "save one there with tokenizer.save_pretrained"
    )


def _model_weights(folder: Path) -> list[Path]:
    """The files that transformers loads, and no others: one, or those that an index names."""
    if (folder / _ADAPTER).exists():
        raise UserError(
            f"{folder} holds an adapter ({_ADAPTER}) beside or in place of a model; merge it into "
            "its model with merge_and_unload, and save that"
        )
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    if (folder / _INDEX).is_file():
        return _indexed(folder)
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if not found:
        _weights(folder)
    raise UserError(
        f"{folder} must hold weights as {_WHOLE}, or several files and {_INDEX}, found "
        f"{found[0]}; save the model with model.save_pretrained"
    )


def _indexed(folder: Path) -> list[Path]:
    """The files of a model that is spread over several; a name never leads out of the folder.

    Links inside it may: the hub's cache is made of them.
    """
    index = _read_json(folder / _INDEX)
    names = index.get("weight_map") if isinstance(index, dict) else None
    files = set(names.values()) if _is_weight_map(names) else set()
    odd = next((name for name in files if name != Path(name).name), None)
    if not files or odd is not None or not all(name.endswith(".safetensors") for name in files):
        raise UserError(
            f"{folder / _INDEX} is no index of safetensors in its folder"
            + (f": it names {odd!r}" if odd is not None else "")
            + "; fetch the model again"
        )
    missing = next((name for name in sorted(files) if not (folder / name).is_file()), None)
    if missing is not None:
        raise UserError(f"{folder} lacks {missing}, which its index names; fetch the model again")
    return [folder / name for name in sorted(files)]


def _is_weight_map(names: object) -> TypeGuard[dict[str, str]]:
    return isinstance(names, dict) and all(isinstance(name, str) for name in names.values())


def _weights(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickled = next(folder.glob("*.bin"), None)
    found = f"only {pickled.name}, and pickles are not loaded" if pickled else "none"
    raise UserError(
        f"{folder} must hold weights as *.safetensors, found {found}; "
        "save the model with model.save_pretrained"
    )


def _weight_samples(file: Path) -> Iterable[bytes]:
    num_bytes = file.stat().st_size
    yield num_bytes.to_bytes(8, "little")
    with file.open("rb") as handle:
        num_header = min(int.from_bytes(handle.read(8), "little"), _MAX_HEADER_BYTES)
        yield handle.read(num_header)
        stride = max(_SAMPLE_BYTES, (num_bytes - handle.tell()) // _NUM_SAMPLES)
        for offset in range(handle.tell(), num_bytes, stride):
            handle.seek(offset)
            yield handle.read(_SAMPLE_BYTES)


def _add(digest: "hashlib._Hash", *parts: bytes) -> None:
    """Length before content: no two lists of parts look alike."""
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
