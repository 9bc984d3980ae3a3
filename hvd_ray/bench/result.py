"""What a benchmark run hands on: rows, what their columns mean, where they come from.

The JSON file is the interface: reports, tables and plots are made from it alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Literal

from hvd_ray.bench.stats import Unit
from hvd_ray.errors import UserError
from hvd_ray.home import atomic_path

FORMAT = 1
"""Rises when a column changes its meaning."""
BASELINE = "greedy"
ALL_WORKLOADS = "all"

UNTIMED = "Not timed: others used the machine meanwhile, so times and speed-ups are left out."

CacheState = Literal["none", "cold", "warm"]

DEFINITIONS = {
    "cache": "none: the system remembers nothing from other requests. cold: empty at the start "
    "of each workload, it fills as the workload's prompts pass. warm: besides, it holds from the "
    "start the target's outputs for the workload's train prompts; no measured prompt and no "
    "session of one is among them.",
    "tokens_per_second": "emitted tokens / wall time of the requests, prompts included.",
    "speedup_vs_greedy": "tokens per second / those of greedy (the target alone, at the "
    "request's own temperature), on the same prompts, interleaved prompt by prompt. Workload "
    "'all': geometric mean over workloads.",
    "speedup_ci": "95 % interval, paired bootstrap over ci_unit. Degenerate (one or two units): "
    "both ends repeat the speed-up.",
    "emitted_per_pass": "emitted tokens / target passes; the first pass reads the prompt.",
    "mean_accepted_drafted_only": "accepted / drafted cycles, without the bonus token; cycles "
    "without a draft are left out, so this is no measure of speed.",
    "source_share": "share of the cycles that verified a draft of each source; a cycle is a pass "
    "of the target, but where a slim model decides without it.",
    "draft_ms_per_cycle": "look-up, decision and drafting, mean over cycles after the first of a "
    "request.",
    "verify_ms_per_cycle": "target pass and verification, mean over cycles after the first of a "
    "request, since the first pass also reads the prompt.",
    "identical_to_greedy": "share of the outputs that equal greedy's token for token, the same "
    "seed given where a prompt is sampled.",
    "differences": "where outputs first differ, and the logit by which greedy's token led there "
    "in a plain pass.",
    "identical_in_one_pass": "for greedy, at temperature 0: share of the outputs that the target "
    "gives again when it reads them in a single pass, a plain run of another batch shape.",
    "loops": "share of the outputs in which a 20-token stretch stands four times or more.",
    "full_passes_per_token": "target passes / emitted tokens.",
    "slim_passes_per_token": "passes of a slim model of the target / emitted tokens.",
    "escalated_share": "of the cycles in which a slim model read the draft, the share that needed "
    "a pass of the target as well.",
    "unchecked_share": "share of the emitted tokens that no pass of the target checked before.",
    "agreement_with_greedy": "share of positions whose token is greedy's, mean over outputs; one "
    "early difference shifts the rest, so this falls faster than quality.",
    "quality": "mean score of the answers against greedy's own, by quality_metric: same_number "
    "(the last number), chrf, rouge_l; valid_json is absolute, greedy's own beside it.",
    "quality_metric": "which score the workload has; none for most.",
    "cut_share": "share of the answers that ended at the limit of tokens; they are scored as they "
    "stand.",
    "without_loops": "the same figures without the prompts whose greedy output loops.",
}
"""What the columns mean; travels with every result."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an output first differs from greedy's."""

    prompt_id: str
    position: int
    """Output tokens that agree."""
    margin: float | None
    """Logit of greedy's token less that of the other, in a plain pass; None where one output
    merely ends earlier or the prompt is sampled."""


@dataclass(frozen=True, slots=True)
class WithoutLoops:
    """The main figures without the prompts whose greedy output loops."""

    prompts: int
    speedup_vs_greedy: float
    speedup_ci: tuple[float, float]
    emitted_per_pass: float


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the result, in the order in which it is written; see `DEFINITIONS`."""

    workload: str
    family: str
    system: str
    engine: str
    cache: CacheState
    dtype: str
    temperatures: tuple[float, ...]
    prompts: int
    tokens: int
    target_passes: int
    tokens_per_second: float
    speedup_vs_greedy: float
    speedup_ci: tuple[float, float]
    ci_unit: Unit
    ci_is_degenerate: bool
    emitted_per_pass: float
    mean_accepted_drafted_only: float | None
    cycles_per_1k_tokens: float
    drafted_cycles: int
    drafted: int
    accepted: int
    source_share: dict[str, float]
    draft_ms_per_cycle: float | None
    verify_ms_per_cycle: float | None
    identical_to_greedy: float
    differences: tuple[Difference, ...]
    identical_in_one_pass: float | None
    loops: float
    without_loops: WithoutLoops | None
    full_passes_per_token: float | None = None
    """From here on absent in results of earlier versions."""
    slim_passes_per_token: float | None = None
    escalated_share: float | None = None
    unchecked_share: float | None = None
    agreement_with_greedy: float | None = None
    quality: float | None = None
    quality_metric: str | None = None
    cut_share: float | None = None


ADDED_LATER = frozenset(
    {
        "full_passes_per_token",
        "slim_passes_per_token",
        "escalated_share",
        "unchecked_share",
        "agreement_with_greedy",
        "quality",
        "quality_metric",
        "cut_share",
    }
)
"""Columns that a result may lack."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One run: every system on the same prompts, interleaved, on one machine."""

    provenance: Mapping[str, Any]
    notes: tuple[str, ...]
    """What was left out or slower than plain decoding, said plainly."""
    rows: tuple[Row, ...]
    aggregate: tuple[Row, ...]
    """One row for each system and cache state over all workloads."""

    @property
    def is_timed(self) -> bool:
        """Whether its times are worth showing: nothing else used the machine."""
        options = self.provenance.get("options") or {}
        return bool(options.get("is_timed", True))

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "provenance": dict(self.provenance),
            "definitions": DEFINITIONS,
            "notes": list(self.notes),
            "rows": [asdict(row) for row in self.rows],
            "aggregate": [asdict(row) for row in self.aggregate],
        }

    def write(self, path: Path) -> None:
        """Write the JSON file, whole or not at all."""
        text = json.dumps(self.as_json(), indent=2, allow_nan=False)
        with atomic_path(path) as draft:
            draft.write_text(text + "\n", encoding="utf-8")


def check_writable(path: Path) -> None:
    """See now, not after an hour of measuring, that a file can be written; leaves nothing behind.

    Raises:
        UserError: it cannot, or a folder stands there.
    """
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder; give the name of a file in it")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        with NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror} ({folder})") from None


def read_result(path: Path) -> BenchResult:
    """Read a result that `BenchResult.write` wrote.

    Raises:
        UserError: the file cannot be read, is no result, or is one of another format.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise UserError(f"{path} is no result of `hvd bench` in format {FORMAT}: run it again")
    try:
        return BenchResult(
            provenance=dict(tree["provenance"]),
            notes=tuple(tree["notes"]),
            rows=tuple(map(_row, tree["rows"])),
            aggregate=tuple(map(_row, tree["aggregate"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is a damaged result of `hvd bench`: {error}") from None


def _row(tree: Mapping[str, Any]) -> Row:
    names = {field.name for field in fields(Row)}
    if not names - ADDED_LATER <= set(tree) <= names:
        raise ValueError(f"columns differ: {', '.join(sorted(set(tree) ^ names))}")
    without = tree["without_loops"]
    return Row(
        **{
            **tree,
            "temperatures": tuple(tree["temperatures"]),
            "speedup_ci": _interval(tree["speedup_ci"]),
            "differences": tuple(Difference(**item) for item in tree["differences"]),
            "without_loops": without
            and WithoutLoops(**{**without, "speedup_ci": _interval(without["speedup_ci"])}),
        }
    )


def _interval(values: list[float]) -> tuple[float, float]:
    low, high = values
    return low, high
