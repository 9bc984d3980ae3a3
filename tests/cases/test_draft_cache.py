"""The draft cache (cases C01 to C08)."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import pytest

from hvd_ray.config import SuffixConfig
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.engines.toy import ToyEngine
from hvd_ray.types import Request, SamplingParams, scope_key
from tests.cases.decoding import PROMPT, longest_draft
from tests.property.toy_requests import decoder

OUTPUT = tuple(range(100, 140))
"""An output of one request, ending in tokens that stand nowhere else."""


def finish(drafter: SuffixDrafter, name: str, output: tuple[int, ...], *, scope: str) -> None:
    drafter.start(Request(name, (1, 2, 3), scope=scope))
    drafter.observe(name, output)
    drafter.stop(name)


def draft_after(drafter: SuffixDrafter, tail: tuple[int, ...], *, scope: str) -> tuple[int, ...]:
    drafter.start(Request("asking", tail, scope=scope))
    draft = drafter.propose("asking", 64)
    drafter.stop("asking")
    return draft.token_ids


def test_c01_distinct_outputs_stay_under_the_cap_for_ever() -> None:
    rng = np.random.default_rng(0)
    drafter = SuffixDrafter(SuffixConfig(max_cached_tokens=5_000))
    sizes = []
    for number in range(400):
        output = tuple(rng.integers(0, 40_000, 200).tolist())
        finish(drafter, f"r{number}", output, scope="one")
        assert drafter.num_cached_tokens <= 5_000
        sizes.append(drafter._scopes["one"].tree.estimate_memory())
    assert max(sizes[200:]) < 1.2 * max(sizes[:100]), "the tree's own estimate stays flat"


def test_c03_another_scope_never_drafts_and_the_same_one_does() -> None:
    drafter = SuffixDrafter()
    finish(drafter, "first", OUTPUT, scope="tenant-a")
    assert draft_after(drafter, OUTPUT[:8], scope="tenant-b") == ()
    assert draft_after(drafter, OUTPUT[:8], scope="tenant-a")[:4] == OUTPUT[8:12]


def test_c03_v06_adapters_and_models_are_scopes_of_their_own() -> None:
    keys = {
        scope_key(tenant=tenant, model=model, adapter=adapter)
        for tenant in ("a", "a/b", "a%2Fb")
        for model in ("", "m", "b/m")
        for adapter in ("", "x")
    }
    assert len(keys) == 18


def test_c03_one_requests_prompt_never_drafts_for_the_next() -> None:
    """Prompts stay private even within a scope: only outputs are shared."""
    drafter = SuffixDrafter()
    drafter.start(Request("first", OUTPUT, scope="one"))
    drafter.stop("first")
    assert draft_after(drafter, OUTPUT[:8], scope="one") == ()


def test_c04_a_bad_streak_of_one_request_leaves_the_others_drafts() -> None:
    engine = ToyEngine(vocab_size=24, order=3, seed=7, sharpness=6.0)
    shared = decoder("hvd_cost", engine)
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    shared.generate(Request("good", PROMPT, sampling))
    wild = SamplingParams(max_tokens=60, ignore_eos=True, temperature=50.0, seed=1)
    for number in range(5):
        shared.generate(Request(f"bad{number}", PROMPT, wild))
    assert longest_draft(shared.generate(Request("again", PROMPT, sampling))) > 10


def test_c06_a_look_up_in_a_long_prompt_takes_no_longer_than_a_short_one() -> None:
    """One pass over 50,000 tokens would show; the fastest of five, the machine may be shared."""
    rng = np.random.default_rng(1)
    drafter = SuffixDrafter()
    times_ms = {}
    for length in (500, 50_000):
        prompt = tuple(rng.integers(0, 500, length).tolist())
        drafter.start(Request(f"p{length}", prompt))
        times = []
        for token in prompt[:100]:
            times.append(min(look_up_ms(drafter, f"p{length}") for _ in range(5)))
            drafter.observe(f"p{length}", (token,))
        times_ms[length] = float(np.median(times))
    assert times_ms[50_000] < 2 * times_ms[500] + 0.02


def look_up_ms(drafter: SuffixDrafter, name: str) -> float:
    started = perf_counter()
    drafter.propose(name, 64)
    return (perf_counter() - started) * 1e3


def test_c07_a_scope_can_be_cleared_on_request() -> None:
    drafter = SuffixDrafter()
    finish(drafter, "a", OUTPUT, scope="one")
    finish(drafter, "b", OUTPUT, scope="two")
    drafter.clear("one")
    assert draft_after(drafter, OUTPUT[:8], scope="one") == ()
    assert draft_after(drafter, OUTPUT[:8], scope="two")
    drafter.clear()
    assert drafter.num_cached_tokens == 0
    assert draft_after(drafter, OUTPUT[:8], scope="two") == ()


def test_c07_a_conversation_at_rest_is_cleared_too() -> None:
    drafter = SuffixDrafter()
    for scope in ("one", "two"):
        drafter.start(Request(scope, tuple(range(200)), scope=scope))
        drafter.stop(scope)
    assert drafter._resting.num_tokens == 400
    drafter.clear("one")
    assert drafter._resting.num_tokens == 200
    drafter.clear()
    assert drafter._resting.num_tokens == 0


@pytest.mark.parametrize("num_noises", [0, 4])
def test_c08_unrelated_outputs_beside_a_good_one_cost_no_accepted_token(num_noises: int) -> None:
    """Noise of the same words: every pair of them is followed by anything. The drafts stay as
    long as the match allows, and right to their last token."""
    rng = np.random.default_rng(2)
    config = SuffixConfig()
    drafter = SuffixDrafter(config)
    finish(drafter, "good", OUTPUT, scope="one")
    for number in range(num_noises):
        noise = tuple(rng.choice(OUTPUT, 2_000).tolist())
        finish(drafter, f"noise{number}", noise, scope="one")
    for start in range(5, 40, 5):
        longest = int(config.max_spec_factor * (start - 1))  # the last token stands for itself
        draft = draft_after(drafter, OUTPUT[:start], scope="one")
        assert draft == OUTPUT[start : start + longest], start
