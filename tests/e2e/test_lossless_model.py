"""The default model in float32: every system gives plain decoding's tokens, 0 differing.

A sample of `make exactness`, which compares 100,000 tokens: here every system answers some of the
shipped prompts, and every prompt is answered by several systems.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_ray.bench.workloads import load_shipped, shipped_workloads
from hvd_ray.types import Completion, Request, Source, Step
from tests.exactness.arms import ARMS as ALL_ARMS
from tests.exactness.arms import Arm, Model, num_differing, tell
from tests.property.toy_requests import PARTS

PROMPTS_PER_WORKLOAD = 2
MAX_TOKENS = 52
LEFT_OUT = ("hvd_tau+nested",)
"""Left to `make exactness`: what it adds to the other arms is not worth its time here."""
ARMS = tuple(arm for arm in ALL_ARMS if arm.system not in LEFT_OUT)


@pytest.fixture(scope="module")
def model(default_model_path: Path) -> Model:
    return Model.load(default_model_path, PARTS)


@pytest.fixture(scope="module")
def requests(model: Model) -> list[Request]:
    return [
        request
        for name in shipped_workloads()
        for request in model.shortest(
            load_shipped([name]).prompts, PROMPTS_PER_WORKLOAD, MAX_TOKENS
        )
    ]


@pytest.fixture(scope="module")
def plain(model: Model, requests: list[Request]) -> list[Completion]:
    decoder = model.plain()
    return [decoder.generate(request) for request in requests]


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name.replace(" ", "-"))
def test_identical_to_plain_decoding(
    arm: Arm, model: Model, requests: list[Request], plain: list[Completion]
) -> None:
    """Cold: as drafts come, many rejected. Warm: the answers are known, drafts are long. Behind a
    slim model, the slim model must be of some use, and so must a head (case M06)."""
    decoder = model.decoder(arm)
    drafted = 0
    heads: list[Step] = []
    for index in _turn(arm, len(requests)):
        request, wanted = requests[index], plain[index]
        if arm.is_warm:
            tell(decoder, request, wanted)
        got = decoder.generate(request)
        assert num_differing(got, wanted) == 0, request.request_id
        assert (got.text, got.finish_reason) == (wanted.text, wanted.finish_reason)
        assert got.verification == ("nested" if arm.slim else "full")
        if arm.slim:
            assert got.num_target_passes < len(got.token_ids)
        drafted += sum(step.drafted for step in got.steps)
        heads += [step for step in got.steps if step.source is Source.EAGLE3]
    assert drafted > 15 or arm.system == "greedy+nested", "without drafts nothing is compared"
    if arm.has_head and not arm.slim:
        assert sum(step.accepted for step in heads) > 0.2 * len(heads) > 1, "a dead drafter"


def _turn(arm: Arm, num_prompts: int) -> list[int]:
    """Prompts spread over the workloads, other ones for the next arm; slim passes are slow."""
    num_turns = 2 if arm.slim else 3
    step = num_prompts // num_turns
    return [(ARMS.index(arm) + turn * step) % num_prompts for turn in range(num_turns)]


@pytest.mark.model
def test_the_comparison_is_large_enough(plain: list[Completion]) -> None:
    """Over 2,000 tokens are compared in all, and every prompt by some arm."""
    turns = [index for arm in ARMS for index in _turn(arm, len(plain))]
    assert set(turns) == set(range(len(plain)))
    assert sum(len(plain[index].token_ids) for index in turns) >= 2000
