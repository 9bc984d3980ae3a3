"""A real tokenizer and half characters: a stream joined is the text, byte for byte."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from hvd_ray.serving.front import Front
from hvd_ray.serving.lineup import set_stage
from hvd_ray.serving.replica import Replica
from hvd_ray.serving.settings import ServeConfig
from hvd_ray.text import HFTextCodec
from tests.unit.serving.conftest import NO_SOURCES, _nothing

PROMPT = "naïve façade 你好 🙂 and the naïve façade 你好 🙂 and"


@pytest.fixture(scope="module")
def client(tiny_llama_path: Path) -> Iterator[TestClient]:
    """A random Llama of bytes: most of what it says is no character."""
    from hvd_ray.engines.torch_engine import TorchEngine

    engine = TorchEngine.load(tiny_llama_path, dtype="float32", num_threads=1)
    codec = HFTextCodec(tiny_llama_path)
    stage = set_stage(
        ServeConfig(), engine=engine, codec=codec, sources=NO_SOURCES, resolve=_nothing
    )
    replica = Replica(stage, name="tiny", root=str(tiny_llama_path))
    front = Front(replica, replica.facts)
    with TestClient(front.app(), base_url="http://127.0.0.1", client=("127.0.0.1", 1)) as made:
        yield made
    replica.end()


def ask(client: TestClient, **extra: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 80, "temperature": 0, "ignore_eos": True, **extra}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer


def streamed(client: TestClient, **extra: Any) -> tuple[str, list[Any]]:
    lines = ask(client, stream=True, return_steps=True, **extra).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] for choice in choices), choices


@pytest.mark.parametrize("seed", range(6))
def test_half_characters_wait_for_their_other_half(client: TestClient, seed: int) -> None:
    extra = {"temperature": 1.2, "seed": seed}
    whole = ask(client, hvd="off", return_token_ids=True, **extra).json()["choices"][0]
    text, choices = streamed(client, **extra)
    assert text == whole["text"]
    again, _ = streamed(client, **extra)  # now from the cache, several tokens a chunk
    assert again == whole["text"]
    tokens = client.post("/detokenize", json={"tokens": whole["token_ids"]}).json()
    assert tokens["prompt"] == whole["text"]
    spans = "".join(span["text"] for choice in choices for span in choice["hvd"]["spans"])
    assert spans == whole["text"]


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_stop_string_across_drafts_ends_every_way_alike(
    client: TestClient, length: int, keeps: bool
) -> None:
    text = ask(client, hvd="off").json()["choices"][0]["text"]
    for start in range(5, 60, 11):
        extra = {"stop": [text[start : start + length], "never said"]}
        extra = {**extra, "include_stop_str_in_output": keeps}
        whole = ask(client, hvd="off", **extra).json()
        end = text.index(extra["stop"][0])
        expected = text[: end + length] if keeps else text[:end]
        assert whole["choices"][0]["text"] == expected
        assert streamed(client, **extra)[0] == expected
        drafted = ask(client, **extra).json()
        assert drafted["choices"][0]["text"] == expected
        assert drafted["usage"] == whole["usage"]
