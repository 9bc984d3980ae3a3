"""Case L02: an accepted draft brings several tokens in one chunk; vLLM's parsers must read the same
tool calls from any chunking, also where a call ends and the next begins in one chunk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

CALLS = (
    {"name": "add", "arguments": {"a": 1, "b": [2, 3]}},
    {"name": "say", "arguments": {"text": "naïve } </tool> 🙂"}},
)
SAID = "Let me see. " + "".join(
    f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in CALLS
)


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(tiny_llama_path))


def streamed(tokenizer: Any, chunks: list[list[int]]) -> tuple[str, list[dict[str, Any]]]:
    """Content and calls as a client adds them up."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "x"}], tools=[tool]
    )
    parser = Hermes2ProToolParser(tokenizer, request.tools)
    content, calls = "", [{"name": "", "arguments": ""} for _ in CALLS]
    before: list[int] = []
    for chunk in chunks:
        now = before + chunk
        texts = [whole(tokenizer, ids) for ids in (before, now)]
        if texts[0] != texts[1]:
            delta = parser.extract_tool_calls_streaming(
                *texts, texts[1][len(texts[0]) :], before, now, chunk, request
            )
            for call in [] if delta is None else delta.tool_calls or []:
                calls[call.index]["name"] += call.function.name or ""
                calls[call.index]["arguments"] += call.function.arguments or ""
            content += "" if delta is None else delta.content or ""
        before = now
    return content, calls


def whole(tokenizer: Any, token_ids: list[int]) -> str:
    """Without the half of a character at the end, which vLLM holds back too."""
    text: str = tokenizer.decode(token_ids)
    return text.rstrip("\ufffd")


def test_l02_tool_calls_are_the_same_for_any_chunking(tokenizer: Any) -> None:
    token_ids = tokenizer.encode(SAID, add_special_tokens=False)
    assert tokenizer.decode(token_ids) == SAID

    @settings(max_examples=40)
    @given(st.lists(st.integers(1, 40), max_size=60))
    def try_it(sizes: list[int]) -> None:
        chunks, start = [], 0
        for size in [*sizes, len(token_ids)]:
            chunks.append(token_ids[start : start + size])
            start += size
        content, calls = streamed(tokenizer, [chunk for chunk in chunks if chunk])
        assert content.strip() == "Let me see."
        found = [(call["name"], json.loads(call["arguments"])) for call in calls]
        assert found == [(call["name"], call["arguments"]) for call in CALLS]

    try_it()
