"""What an advice hands on; the page and the table are made from it alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_ray.advise.filling import Filling
from hvd_ray.advise.judging import Row
from hvd_ray.advise.loading import LoadPoint
from hvd_ray.advise.recommend import Recommendation
from hvd_ray.advise.verdict import Verdict
from hvd_ray.home import atomic_path
from hvd_ray.payoff.quality import QualityRow

FORMAT = 1
"""Rises when a field changes its meaning."""

DEFINITIONS = {
    "emitted_per_pass": "output tokens / target passes of the replay; plain decoding is 1.",
    "speedup": "tokens a second over plain decoding's, by the cost table and at the concurrency "
    "asked for; decoding alone, without reading the prompt.",
    "is_upper_bound": "whether, for want of a cost table, speed-ups are passes saved: at most.",
    "kind": "helps, or will not help: the interval lies above 1x, or below 1.1x; may help, or too "
    "short to say: it does not, there is none, or (may help) speed-ups are upper bounds.",
    "recommendation": "system null: turn nothing on; with an empty vllm_command: the log is too "
    "short to say, nothing is advised.",
    "ci": "95 % bootstrap over ci_unit; null where there are too few.",
    "source_share": "share of the target passes that verified a draft of each source.",
    "precision, recall": "of accepted length >= 6, at the positions that the replay visited.",
    "predictor": "the same on every position with a draft, beside the cache's own score.",
    "caps": "suffix with caches of so many output tokens; 1 holds none.",
    "fills": "suffix on the judged requests from a cold start, by the number of outputs that the "
    "cache held when a request began, beside the same requests with an empty cache.",
    "load": "speed-up by requests at once; rows_per_pass are those of all of them.",
    "is_assumed": "whether a figure rests on an assumed acceptance of a head or assumed costs.",
    "+head": "the hybrid falls back to an EAGLE-3 head instead of plain decoding.",
    "oracle": "knows every accepted length: no policy over these drafts can do better.",
}


@dataclass(frozen=True, slots=True)
class TauPoint:
    """`hvd_tau` at one threshold, over all traffic."""

    tau: float
    emitted_per_pass: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Advice:
    """The whole answer."""

    verdict: Verdict
    recommendation: Recommendation
    traffic: Mapping[str, Any]
    rows: tuple[Row, ...]
    taus: tuple[TauPoint, ...]
    quality: tuple[QualityRow, ...]
    filling: Filling
    load: tuple[LoadPoint, ...]
    """Empty without a cost table: every pass would cost the same at any load."""
    rests_on: tuple[str, ...]
    provenance: Mapping[str, Any]

    @property
    def systems(self) -> list[str]:
        return list(dict.fromkeys(row.system for row in self.rows))

    @property
    def workloads(self) -> list[str]:
        """`all` first."""
        return list(dict.fromkeys(row.workload for row in self.rows))

    def row(self, workload: str, system: str) -> Row:
        return next(r for r in self.rows if (r.workload, r.system) == (workload, system))

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "verdict": self.verdict.as_json(),
            "recommendation": self.recommendation.as_json(),
            "traffic": dict(self.traffic),
            "definitions": DEFINITIONS,
            "rows": [row.as_json() for row in self.rows],
            "taus": [
                {"tau": p.tau, "emitted_per_pass": p.emitted_per_pass, "speedup": p.speedup}
                for p in self.taus
            ],
            "predictor": quality_json(self.quality),
            "filling": self.filling.as_json(),
            "load": [point.as_json() for point in self.load],
            "rests_on": list(self.rests_on),
            "provenance": dict(self.provenance),
        }

    def write(self, path: Path) -> None:
        """Write the JSON file, whole or not at all."""
        text = json.dumps(self.as_json(), indent=2, allow_nan=False)
        with atomic_path(path) as draft:
            draft.write_text(text + "\n", encoding="utf-8")


def quality_json(rows: Sequence[QualityRow]) -> list[dict[str, Any]]:
    return [{"workload": r.workload, "judge": r.judge, **r.quality.as_dict()} for r in rows]
