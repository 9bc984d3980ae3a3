"""The comparison itself: it passes what is exact and catches what is not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hvd_ray.types import Draft, Verdict
from hvd_ray.verify.exact import FullVerifier, VerifyState
from tests.exactness.draws import WAYS, Way, draw_cell, law, sampling_of


@dataclass(frozen=True)
class Gullible:
    """Accepts the first drafted token unseen."""

    engine: object

    def verify(self, draft: Draft, state: VerifyState) -> Verdict:
        verdict = FullVerifier(self.engine).verify(draft, state)  # type: ignore[arg-type]
        if not draft.token_ids or verdict.accepted:
            return verdict
        return Verdict(1, (draft.token_ids[0],))

    def finish(self, state: VerifyState) -> None: ...


def test_a_law_sums_to_one_and_rules_out_what_top_k_does() -> None:
    masses = law(sampling_of("top_k"))
    assert sum(masses.values()) == pytest.approx(1)
    assert sum(mass > 0 for mass in masses.values()) == 3**3


@pytest.mark.parametrize("name", WAYS)
def test_every_way_follows_the_law_in_a_few_draws(name: str) -> None:
    cell = draw_cell("all together", name, WAYS[name], num_draws=400)
    assert cell.pvalue > 1e-3
    assert cell.accepted > 0.1, "nothing was drafted well enough to be kept"


@pytest.mark.parametrize("parameter", ["temperature", "min_p"])
def test_a_verifier_that_believes_its_drafter_is_caught(parameter: str) -> None:
    cell = draw_cell(parameter, "gullible", Way(False, Gullible), num_draws=400)
    assert cell.pvalue < 1e-6
