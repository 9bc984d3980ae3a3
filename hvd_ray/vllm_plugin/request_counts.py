"""What a request's passes verified, on its way from the worker into the response's metrics.

The worker counts, the front end answers, and between them vLLM carries a request's own figures in
two lists of its making that are equally long: what each pass drafted and accepted (both empty
unless the engine was started with `per_request_spec_decode_metrics="detailed"`). Ours travel as
what the first has beyond the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_ray.types import Source, Step

SOURCES = (Source.NONE, Source.SUFFIX, Source.EAGLE3)
NUM_FIGURES = len(SOURCES) + 1


@dataclass(slots=True)
class RequestCounts:
    """Passes by source and tokens emitted, for each request under vLLM's id."""

    _of: dict[str, list[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._of)

    def note(self, request_id: str, step: Step) -> None:
        """One more pass of a request."""
        figures = self._of.setdefault(request_id, [0] * NUM_FIGURES)
        figures[SOURCES.index(step.source)] += 1
        figures[-1] += step.emitted

    def take(self, request_id: str) -> list[int]:
        """A request's figures, which are forgotten; none where nothing was noted."""
        return self._of.pop(request_id, [])


COUNTS = RequestCounts()
"""Of the engines in this process: ids are vLLM's own and never come twice at once."""


def shares(accepted: Sequence[int], drafted: Sequence[int]) -> dict[str, Any]:
    """The fields for the response, from the two lists that vLLM carried; none without ours."""
    figures = drafted[len(accepted) :]
    if len(figures) != NUM_FIGURES:
        return {}
    *passes, num_emitted = figures
    num_passes = sum(passes)
    return {
        "num_target_passes": num_passes,
        "emitted_per_pass": num_emitted / num_passes,
        "source_share": {
            source.value: number / num_passes
            for source, number in zip(SOURCES, passes, strict=True)
            if number
        },
    }
