"""Case G02: a grammar that begins inside a draft, behind the mark that ends the reasoning.

vLLM masks rows and cuts drafts; held here is that the version in use does so from that mark
on, with its own parsers and grammars, for a draft such as our cache makes of an earlier answer.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
THOUGHT, ANSWER, AFTERWARDS = " so it is name", '{"a": 7}', " and that is"


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_path: Path) -> Any:
    """The tiny model's, with marks of reasoning that are one token each."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(str(tiny_llama_path))
    found.add_tokens(["<think>", "</think>"], special_tokens=True)
    return found


@pytest.fixture(params=["deepseek_r1", "qwen3"])
def manager(request: pytest.FixtureRequest, tokenizer: Any) -> Any:
    from vllm.reasoning import ReasoningParserManager
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend="uni"),
        scheduler_config=SimpleNamespace(max_num_seqs=1),
        model_config=SimpleNamespace(skip_tokenizer_init=True, hf_config=None, is_diffusion=False),
        structured_outputs_config=SimpleNamespace(
            enable_in_reasoning=False, disable_any_whitespace=False
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=32),
        num_speculative_tokens=32,
    )
    config.model_config.hf_config = SimpleNamespace(model_type="llama")
    made = StructuredOutputManager(config)
    made.tokenizer = tokenizer
    made.reasoner_cls = ReasoningParserManager.get_reasoning_parser(request.param)
    made.backend = XgrammarBackend(config, tokenizer=tokenizer, vocab_size=len(tokenizer))
    return made


def thinking(manager: Any, tokenizer: Any) -> Any:
    """A request in the middle of its reasoning, with a grammar for what comes behind it."""
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions

    grammar = manager.backend.compile_grammar(StructuredOutputOptions.JSON, SCHEMA)
    prompt = ids(tokenizer, "say it<think>")
    return SimpleNamespace(
        request_id="r",
        use_structured_output=True,
        prompt_token_ids=prompt,
        all_token_ids=[*prompt, *ids(tokenizer, " well")],
        structured_output_request=SimpleNamespace(
            reasoning_ended=False, reasoner=None, reasoning_parser_kwargs=None, grammar=grammar
        ),
    )


def ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return found


def test_g02_a_draft_is_cut_where_the_grammar_forbids_it(manager: Any, tokenizer: Any) -> None:
    request = thinking(manager, tokenizer)
    good = ids(tokenizer, f"{THOUGHT}</think>{ANSWER}")
    draft = good + ids(tokenizer, AFTERWARDS)
    assert manager.validate_tokens(request, draft) == good
    only_thought = ids(tokenizer, f"{THOUGHT}{AFTERWARDS}")
    assert manager.validate_tokens(request, only_thought) == only_thought, "nothing is bound yet"
    bad = ids(tokenizer, f"{THOUGHT}</think>")
    assert manager.validate_tokens(request, bad + ids(tokenizer, AFTERWARDS)) == bad


def test_g02_rows_behind_the_mark_are_masked(manager: Any, tokenizer: Any) -> None:
    request = thinking(manager, tokenizer)
    before = ids(tokenizer, f"{THOUGHT}</think>")
    draft = before + ids(tokenizer, ANSWER)
    mask = manager.grammar_bitmask({"r": request}, ["r"], {"r": draft})
    assert mask is not None
    assert len(mask) == len(draft) + 1
    is_free = (mask == -1).all(axis=1)
    assert is_free[: len(before)].all(), "the reasoning is bound by nothing"
    assert not is_free[len(before) :].any(), "every row behind the mark is bound, the last one too"
    bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")
    for row, token in enumerate(draft[len(before) :], len(before)):
        assert bits[row, token], "and allows what the draft has there"
