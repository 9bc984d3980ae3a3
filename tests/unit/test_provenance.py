"""Provenance: complete, JSON, without secrets, and honest about the commit."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_ray import provenance as module
from hvd_ray.config import Config
from hvd_ray.provenance import masked, provenance

ROOT = Path(__file__).parents[2]


def test_it_is_json_and_holds_what_a_result_needs() -> None:
    config = Config(seed=7)
    facts = json.loads(json.dumps(provenance(config=config, workload_hash="ab12")))
    assert facts["workload_hash"] == "ab12"
    assert facts["seed"] == 7
    assert facts["config"]["drafting"]["suffix"]["max_tree_depth"] == 64
    assert facts["packages"]["numpy"]
    assert facts["cpu"] != "unknown"
    for key in ("commit", "is_dirty", "python", "platform", "cores", "created_at", "device"):
        assert key in facts


def test_the_commit_is_the_checkout_s() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not run from a checkout")
    head = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    facts = provenance()
    assert facts["commit"] == head.stdout.strip()
    assert isinstance(facts["is_dirty"], bool)


def git(folder: Path, *args: str) -> None:
    who = ["-c", "user.name=n", "-c", "user.email=e@example.invalid"]
    subprocess.run(["git", "-C", str(folder), *who, *args], check=True, capture_output=True)


def commit_of_copy(package: Path) -> dict[str, object]:
    """What `_commit` says in a process that imports the copy of the package at `package`."""
    code = "import json; from hvd_ray.provenance import _commit; print(json.dumps(_commit()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=package.parent, capture_output=True, text=True, check=True
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


@pytest.fixture
def copied_package(tmp_path: Path) -> Path:
    package = tmp_path / "repo" / "hvd_ray"
    package.mkdir(parents=True)
    for file in (ROOT / "hvd_ray").glob("*.py"):
        shutil.copy(file, package / file.name)
    return package


def test_a_changed_file_makes_it_dirty(copied_package: Path) -> None:
    repo = copied_package.parent
    git(repo, "init", "-q")
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "all")
    assert commit_of_copy(copied_package)["is_dirty"] is False
    (copied_package / "errors.py").open("a").write("\n# changed\n")
    assert commit_of_copy(copied_package)["is_dirty"] is True


def test_outside_a_repository_the_commit_is_unknown(copied_package: Path) -> None:
    assert commit_of_copy(copied_package) == {"commit": "unknown", "is_dirty": None}


def test_an_installed_package_does_not_claim_the_commit_around_it(copied_package: Path) -> None:
    """`.venv/lib/.../hvd_ray` lies inside somebody's repository that is not ours."""
    outer = copied_package.parents[1]
    git(outer, "init", "-q")
    git(outer, "add", ".")
    git(outer, "commit", "-qm", "all")
    assert commit_of_copy(copied_package)["commit"] == "unknown"


def test_without_git_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert module._commit() == {"commit": "unknown", "is_dirty": None}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("postgresql://me:hunter2@db/x", "postgresql://me:***@db/x"),
        ("https://me:p:w@host:5000/a", "https://me:***@host:5000/a"),
        ("https://host/a?token=abc&b=1", "https://host/a?token=***&b=1"),
        ("http://localhost:5000", "http://localhost:5000"),
        ("sqlite:////home/me/mlflow.db", "sqlite:////home/me/mlflow.db"),
        ({"api_key": "s3cret", "n": 1}, {"api_key": "***", "n": 1}),
        ({"hub": {"token": "hf_x"}}, {"hub": {"token": "***"}}),
        ({"tokenizer_sha": "ab", "max_tokens": 3}, {"tokenizer_sha": "ab", "max_tokens": 3}),
        ({"token_ids": [1, 2], "x": None}, {"token_ids": [1, 2], "x": None}),
        (["redis://:pw@h", 1], ["redis://:***@h", 1]),
    ],
)
def test_secrets_are_masked_and_nothing_else(value: object, expected: object) -> None:
    assert masked(value) == expected


def test_the_configuration_is_masked() -> None:
    config = Config.model_validate({"tracking": {"uri": "https://me:hunter2@mlflow.example"}})
    assert "hunter2" not in json.dumps(provenance(config=config, uri="http://a:hunter2@b"))


def test_no_heavy_package_is_imported_for_it() -> None:
    code = (
        "import sys; from hvd_ray.provenance import provenance; provenance();"
        "print([m for m in ('torch', 'ray', 'mlflow', 'numba', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("torch", "device"), [("2.13.0", "NVIDIA H200"), ("2.13.0+cpu", "cpu")])
def test_what_other_processes_measured_was_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, device: str
) -> None:
    """vLLM's engines have processes of their own, and torch is not loaded in this one."""
    card = tmp_path / "gpus" / "0000:01:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 116\n")
    monkeypatch.setattr(module, "NVIDIA", tmp_path)
    monkeypatch.setattr(module, "_versions", lambda: {"torch": torch})
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert module._torch_facts() == {"device": device, "torch_threads": None}
