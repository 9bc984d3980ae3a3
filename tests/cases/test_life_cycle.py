"""Scheduling and life cycle (cases L01 to L10)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.engines.toy import ToyCodec, ToyEngine
from hvd_ray.types import Draft, Request, SamplingParams, Source
from tests.cases.decoding import PROMPT, same, warm
from tests.property.toy_requests import HEADLESS_SYSTEMS, decoder


def test_l01_the_stream_joined_is_the_text() -> None:
    cached = warm()
    stop = cached.answer.text[40:43]
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, stop=(stop,))
    generation = cached.decoder.start(Request("stream", cached.prompt, sampling))
    pieces = []
    while not generation.is_finished:
        pieces.append(cached.decoder.step(generation).text)
    cached.decoder.close(generation)
    assert len(pieces) < 20, "runs of several tokens"
    assert "".join(pieces) == generation.completion().text == cached.answer.text[:40]


def test_l04_an_aborted_request_counts_what_was_committed_and_no_more() -> None:
    cached = warm()
    generation = cached.decoder.start(Request("aborted", PROMPT, SamplingParams(max_tokens=60)))
    cached.decoder.step(generation)
    cached.decoder.close(generation)
    completion = generation.completion()
    assert completion.finish_reason == "abort"
    assert sum(step.emitted for step in completion.steps) == len(completion.token_ids) > 0
    assert all(0 <= step.accepted <= step.drafted for step in completion.steps)


def test_l04_a_request_aborted_before_its_first_cycle_counts_nothing() -> None:
    cached = warm()
    generation = cached.decoder.start(Request("aborted", PROMPT))
    cached.decoder.close(generation)
    completion = generation.completion()
    assert (completion.token_ids, completion.text, completion.steps) == ((), "", ())


@pytest.mark.parametrize("system", HEADLESS_SYSTEMS)
def test_l08_a_system_without_a_model_drafter_is_whole(system: str) -> None:
    tried = decoder(system, ToyEngine())
    assert tried.model_drafter is None
    completion = tried.generate(Request("r", PROMPT, SamplingParams(max_tokens=20)))
    assert completion.finish_reason in ("stop", "length")


def test_l09_closing_frees_the_draft_trees() -> None:
    cached = warm()
    generation = cached.decoder.start(Request("gone", PROMPT))
    cached.decoder.step(generation)
    cached.decoder.close(generation)
    drafter = cached.decoder.cache_drafter
    assert isinstance(drafter, SuffixDrafter)
    assert not drafter._active


@dataclass
class Broken:
    """A model drafter that fails on the third proposal for one request."""

    source: str = "eagle3"
    fails_for: str = "r"
    proposed: Counter[str] = field(default_factory=Counter)
    stopped: list[str] = field(default_factory=list)

    def start(self, request: Request) -> None: ...

    def observe(self, request_id: str, token_ids: tuple[int, ...], hidden: object) -> None: ...

    def propose(self, request_id: str, limit: int) -> Draft:  # noqa: ARG002
        self.proposed[request_id] += 1
        if request_id == self.fails_for and self.proposed[request_id] == 3:
            raise RuntimeError("the head is broken")
        return Draft(Source.EAGLE3, (1, 2))

    def room(self, request_id: str) -> int:  # noqa: ARG002
        return 4

    def stop(self, request_id: str) -> None:
        self.stopped.append(request_id)


def test_l10_a_drafter_that_fails_ends_its_request_and_no_other() -> None:
    """The fault is told at once and frees the request; it neither hangs nor spreads."""
    from hvd_ray.decode import Decoder
    from hvd_ray.payoff.policy import AlwaysModel

    engine, broken = ToyEngine(seed=3), Broken()
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    shared = Decoder(engine, ToyCodec(), AlwaysModel(), None, broken)  # type: ignore[arg-type]
    failing, other = (shared.start(Request(name, PROMPT, sampling)) for name in ("r", "other"))
    for _ in range(2):
        shared.step(failing)
        shared.step(other)
    with pytest.raises(RuntimeError, match="head is broken"):
        shared.step(failing)
    shared.close(failing)
    assert broken.stopped == ["r"]
    assert len(failing.completion().token_ids) < 40
    while not other.is_finished:
        shared.step(other)
    shared.close(other)
    assert broken.stopped == ["r", "other"]
    assert broken.proposed["r"] == 3 < broken.proposed["other"]
    plain = decoder("greedy", engine).generate(Request("plain", PROMPT, sampling))
    assert other.completion().token_ids == plain.token_ids


def test_l10_a_request_that_is_generated_whole_is_closed_by_its_fault() -> None:
    from hvd_ray.decode import Decoder
    from hvd_ray.payoff.policy import AlwaysModel

    broken = Broken(fails_for="second")
    shared = Decoder(ToyEngine(seed=3), ToyCodec(), AlwaysModel(), None, broken)  # type: ignore[arg-type]
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    for name in ("first", "second", "third"):
        if name == "second":
            with pytest.raises(RuntimeError, match="head is broken"):
                shared.generate(Request(name, PROMPT, sampling))
        else:
            assert len(shared.generate(Request(name, PROMPT, sampling)).token_ids) == 20
        assert broken.stopped[-1] == name


def test_neighbours_of_an_aborted_request_are_undisturbed() -> None:
    cached = warm()
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    neighbour = cached.decoder.start(Request("neighbour", cached.prompt, sampling))
    cached.decoder.step(neighbour)
    gone = cached.decoder.start(Request("gone", PROMPT, sampling))
    cached.decoder.step(gone)
    cached.decoder.close(gone)
    while not neighbour.is_finished:
        cached.decoder.step(neighbour)
    cached.decoder.close(neighbour)
    assert same(neighbour.completion(), cached.answer)
