"""`hvd serve`: mistakes are one line, before Ray is started; the rest is tested end to end."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from hvd_ray.commands import serve as command
from hvd_ray.commands.serve import serve
from hvd_ray.errors import UserError
from hvd_ray.serving.run import Served

KEY = "k" * 32


@pytest.fixture(autouse=True)
def never_started(hvd_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.delenv("HVD_API_KEYS", raising=False)
    monkeypatch.setattr(command, "_run", _never)
    monkeypatch.setattr("hvd_ray.fetch.fetch_model", lambda _name: None)
    monkeypatch.setattr("hvd_ray.commands.ui._check_free", lambda _host, _port: None)


def _never(*_arguments: object, **_more: object) -> None:
    raise AssertionError("a server was started")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (["serving.limit=3"], "serving.limit: unknown"),
        (["policy.name=best"], "policy.name"),
        (["policy.tau=-1"], "policy.tau"),
        (["serving.limits.max_running=0"], "max_running"),
        (["serving.api_keys=/nowhere"], "API keys /nowhere: cannot be read"),
        (["nonsense"], "expected key=value"),
        (["policy.name=hvd_tau", "policy.predictor=/nowhere"], "predictor /nowhere"),
        (["policy.name=ngram", "serving.engine=vllm"], "not supported: policy.name=ngram"),
    ],
)
def test_settings_that_cannot_be(settings: list[str], word: str) -> None:
    with pytest.raises(UserError, match=word):
        serve(settings)


def test_an_open_host_needs_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="can be reached by others, so API keys are needed"):
        serve(host="0.0.0.0")
    started: list[Any] = []
    monkeypatch.setattr(command, "_run", lambda config, *_, **__: started.append(config))
    keys = tmp_path / "keys"
    keys.write_text(f"me {KEY}\n")
    serve(host="0.0.0.0", api_keys=keys, replicas=3, model="m")
    monkeypatch.setenv("HVD_API_KEYS", f"me {KEY}")
    serve(host="0.0.0.0")
    serving = started[0].serving
    assert (serving.api_keys, serving.replicas, serving.engine) == (keys, 3, "torch")
    assert started[0].model == "m"
    assert len(started) == 2


def test_a_file_of_settings_and_words_that_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(command, "_run", lambda config, *_, **__: started.append(config))
    file = tmp_path / "serve.yaml"
    file.write_text("policy: {name: suffix}\nserving: {limits: {max_running: 2}}\n")
    serve(["serving.limits.max_running=5"], config=file)
    assert started[0].hot == {"policy": {"name": "suffix"}, "limits": {"max_running": 5}}


@pytest.mark.parametrize(
    ("host", "base"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
        ("10.0.0.9", "http://10.0.0.9:80"),
    ],
)
def test_where_it_says_it_is(
    host: str,
    base: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hvd_ray.serving.settings import serve_config

    found = {"policy": "suffix", "notes": ["hvd_cost left out: no cost table"]}
    monkeypatch.setattr(Served, "state", lambda _self, _config: found)
    served = Served(host, 80, "/logs", None)
    command._show(served, serve_config({}), 12.0, as_json=True)
    places = json.loads(capsys.readouterr().out)
    assert places["api"] == f"{base}/v1"
    assert places["page"] == f"{base}/ui"
    assert places["policy"] == "suffix"
    assert places["policy_notes"] == found["notes"]
    command._show(served, serve_config({}), 12.0, as_json=False)
    said = capsys.readouterr().out
    assert f"{base}/metrics" in said
    assert "  policy:    suffix\n             hvd_cost left out: no cost table\n" in said
    assert "off (--dashboard starts it)" in said


def test_a_state_that_cannot_be_asked_is_no_fault() -> None:
    from hvd_ray.serving.settings import serve_config

    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        served = Served("127.0.0.1", nobody.getsockname()[1], None, None)
        assert served.state(serve_config({})) == {}


def test_a_reload_that_is_refused_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed: list[Any] = []

    class Fake:
        host = "127.0.0.1"

        def change(self, config: Any, *, is_given_up: Any) -> None:
            assert not is_given_up()
            changed.append(config)
            if config.policy.name == "ngram" or len(changed) == 2:
                raise UserError("Serve cannot")

    old, file = command._load(None, []), tmp_path / "serve.yaml"

    def reload(text: str) -> tuple[Any, str]:
        file.write_text(text)
        now = command._reload(Fake(), old, file, [], command._Told())  # type: ignore[arg-type]
        return now, capsys.readouterr().err

    for text, word in (
        ("policy: {tau: -3}\n", "setting policy.tau"),
        ("policy: {name: hvd_tau, predictor: /nowhere}\n", "predictor /nowhere"),
        (" \n", f"{file}: the file is empty"),
    ):
        now, said = reload(text)
        assert now is old
        assert f"refused, the old settings stay: {word}" in said
        assert not changed, "what serves was touched"
    now, said = reload("policy: {name: ngram}\n")
    assert now is old
    assert "going back to the old settings: Serve cannot" in said
    assert "the old settings cannot be deployed either: Serve cannot" in said
    assert changed[1:] == [old]
    now, said = reload("policy: {name: suffix}\n")
    assert (now.policy.name, said) == ("suffix", "settings read again\n")


def test_a_port_is_one_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    with command._claimed(8613):
        with pytest.raises(UserError, match="on port 8613"), command._claimed(8613):
            pass
        with command._claimed(8614):
            pass
    with command._claimed(8613):
        pass
    monkeypatch.setattr(command, "_run", lambda *_, **__: None)
    with pytest.raises(UserError, match=r"serving\.replicas"):
        serve(replicas=0)


def test_settings_that_cannot_be_read_again_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(_path: Path) -> bytes:
        raise PermissionError("no")

    file = tmp_path / "serve.yaml"
    file.write_text("policy: {name: suffix}\n")
    old = command._load(None, [])
    monkeypatch.setattr(Path, "read_bytes", denied)
    assert command._reload(None, old, file, [], command._Told()) is old  # type: ignore[arg-type]
    assert f"the old settings stay: {file} cannot be read (no)" in capsys.readouterr().err
