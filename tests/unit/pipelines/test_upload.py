"""What a job's working directory weighs, as Ray would pack it."""

from pathlib import Path

import pytest

from hvd_ray.errors import UserError
from hvd_ray.pipelines import upload
from hvd_ray.pipelines.upload import plan_upload, upload_lines

REPO = Path(__file__).parents[3]


def write(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in {
        **{"a.py": 10, "data/big.bin": 900, "data/deep/er/more.bin": 300, "models/m.bin": 700},
        **{".venv/lib.so": 5000, "__pycache__/x.pyc": 5000, "sub/keep.txt": 1, "sub/drop.log": 9},
    }.items():
        write(tmp_path / name, size)
    (tmp_path / ".gitignore").write_text("models/\n")
    (tmp_path / "sub" / ".rayignore").write_text("*.log\n")
    return tmp_path


def test_it_is_what_ray_packs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    from zipfile import ZipFile

    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import create_package

    archive = tmp_path_factory.mktemp("packed") / "it.zip"
    create_package(str(folder), archive, True, excludes=get_runtime_env_default_excludes())
    with ZipFile(archive) as packed:
        sizes = {info.filename: info.file_size for info in packed.infolist() if not info.is_dir()}
    planned = plan_upload(folder)
    assert {path.as_posix(): size for path, size in planned.sizes} == sizes
    assert {"a.py", "data/big.bin", "sub/keep.txt"} <= set(sizes)
    assert not {"models/m.bin", "sub/drop.log", ".venv/lib.so"} & set(sizes)


def test_what_is_too_large_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan_upload(folder, excludes=["a.py"])
    assert planned.largest(2) == [("data/big.bin", 900), ("data/deep/", 300)]
    assert not planned.is_too_large
    monkeypatch.setattr(upload, "LIMIT_BYTES", 1000)
    lines = upload_lines(planned)
    assert planned.is_too_large
    assert "Ray refuses more than" in lines[0]
    assert "data/big.bin" in lines[1]
    assert ".rayignore" in lines[-2]


def test_a_folder_that_is_not_there_is_a_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        plan_upload(tmp_path / "none")


def test_this_repository_fits() -> None:
    planned = plan_upload(REPO)
    names = {path.as_posix() for path, _ in planned.sizes}
    assert not planned.is_too_large
    assert {"hvd_ray/cli.py", "jobs/bench.py", "tune_configs/quick.yaml", "locks/cpu.txt"} <= names
    assert not any(name.startswith("tests/") for name in names)
