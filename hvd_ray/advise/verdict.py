"""Would it help? The answer in plain words, "it will not" among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hvd_ray.advise.contestants import GREEDY, ORACLE
from hvd_ray.advise.judging import ALL, Row

Kind = Literal["helps", "may help", "will not help"]

WORTH = 1.1
"""A gain below it is not worth another thing to operate."""
SAME = 0.98
"""Systems this close to the best are as good: the simplest of them is advised."""
_SIMPLEST_FIRST = ("ngram", "suffix", "rule_score", "rule_match", "hvd_tau", "hvd_cost", "eagle3")


@dataclass(frozen=True, slots=True)
class WorkloadVerdict:
    """The best system that can be turned on for one workload, and whether it is worth it."""

    workload: str
    kind: Kind
    system: str
    speedup: float
    speedup_ci: tuple[float, float] | None

    @property
    def in_words(self) -> str:
        """`1.52x (1.31-1.77)`."""
        if self.speedup_ci is None:
            return f"{self.speedup:.2f}x (too few sessions for an interval)"
        low, high = self.speedup_ci
        return f"{self.speedup:.2f}x ({low:.2f}-{high:.2f})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer over all traffic and for each workload."""

    overall: WorkloadVerdict
    workloads: tuple[WorkloadVerdict, ...]
    lines: tuple[str, ...]
    """The answer in sentences, the first one is the headline."""

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self.overall),
            "workloads": [asdict(item) for item in self.workloads],
            "lines": list(self.lines),
        }


def verdict_of(rows: Sequence[Row], *, concurrency: int, head_is_at_hand: bool) -> Verdict:
    """Judge by what could be turned on today.

    Args:
        rows: of all systems and workloads.
        concurrency: that the speed-ups hold for.
        head_is_at_hand: whether systems with a head count; an assumed one does not.
    """
    usable = [row for row in rows if _is_usable(row, with_head=head_is_at_hand)]
    workloads = list(dict.fromkeys(row.workload for row in usable))
    judged = [_judged([row for row in usable if row.workload == name]) for name in workloads]
    overall = next(item for item in judged if item.workload == ALL)
    others = tuple(item for item in judged if item.workload != ALL)
    lines = (_headline(overall, concurrency), *_by_workload(others))
    if not head_is_at_hand:
        lines += tuple(_of_a_head(rows, overall))
    return Verdict(overall, others, lines)


def _is_usable(row: Row, *, with_head: bool) -> bool:
    is_system = row.system != GREEDY and not row.system.startswith(ORACLE)
    return is_system and (with_head or not row.uses_head)


def _judged(rows: Sequence[Row]) -> WorkloadVerdict:
    best = max(row.speedup for row in rows)
    as_good = [row for row in rows if row.speedup >= SAME * best]
    chosen = min(as_good, key=lambda row: _SIMPLEST_FIRST.index(row.system.split("+")[0]))
    kind: Kind = "will not help"
    if chosen.speedup >= WORTH:
        is_shown = chosen.speedup_ci is not None and chosen.speedup_ci[0] > 1
        kind = "helps" if is_shown else "may help"
    return WorkloadVerdict(chosen.workload, kind, chosen.system, chosen.speedup, chosen.speedup_ci)


def _headline(overall: WorkloadVerdict, concurrency: int) -> str:
    where = f"plain decoding at concurrency {concurrency}"
    if overall.kind == "will not help":
        return (
            f"It will not help you: the best system, {overall.system}, is {overall.in_words} as "
            f"fast as {where}, and less than {WORTH:g}x is not worth operating."
        )
    start = (
        "It will help" if overall.kind == "helps" else "It may help, the log is too short to say"
    )
    return f"{start}: {overall.system} is {overall.in_words} as fast as {where}."


def _by_workload(workloads: Sequence[WorkloadVerdict]) -> list[str]:
    if len(workloads) < 2:
        return []
    lines = []
    for kind, words in (
        ("helps", "It helps on"),
        ("may help", "It may help, too little is known of"),
        ("will not help", "It will not help on"),
    ):
        names = [f"{w.workload} ({w.system} {w.speedup:.2f}x)" for w in workloads if w.kind == kind]
        if names:
            lines.append(f"{words} {', '.join(names)}.")
    return lines


def _of_a_head(rows: Sequence[Row], overall: WorkloadVerdict) -> list[str]:
    """What an EAGLE-3 head would add, if it were as good as was assumed."""
    with_head = [
        r for r in rows if r.workload == ALL and _is_usable(r, with_head=True) and r.uses_head
    ]
    if not with_head:
        return []
    best = max(with_head, key=lambda row: row.speedup)
    if best.speedup < overall.speedup * WORTH:
        return [
            f"A head as good as assumed would not be worth it: {best.system} reaches "
            f"{best.speedup:.2f}x."
        ]
    return [
        f"A head as good as assumed would bring {best.system} to {best.speedup:.2f}x: "
        "worth measuring one (`--eagle3`)."
    ]
