"""Would it help? The answer in plain words, "it will not" among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from hvd_ray.advise.contestants import GREEDY, ORACLE
from hvd_ray.advise.judging import ALL, Row

Kind = Literal["helps", "may help", "too short to say", "will not help"]
Prices = Literal["known", "assumed", "none"]
"""Where a pass's cost comes from; `none`: every pass costs the same, so passes are counted."""

WORTH = 1.1
"""A gain below it is not worth another thing to operate."""
SAME = 0.98
"""Systems this close to the best are as good: the simplest of them is advised."""
FEW_TOKENS = 2_000
"""Judged output tokens below which the headline gets a warning."""
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

    @property
    def is_unproven(self) -> bool:
        """Whether the log does not tell: no interval, or one with both answers in it."""
        low, high = self.speedup_ci or (0.0, float("inf"))
        return low <= 1 if self.speedup >= WORTH else high >= WORTH


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer over all traffic and for each workload."""

    overall: WorkloadVerdict
    workloads: tuple[WorkloadVerdict, ...]
    lines: tuple[str, ...]
    """The answer in sentences, the first one is the headline."""
    is_upper_bound: bool
    """Whether speed-ups are passes saved: what a pass with more rows costs was not known."""

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self.overall),
            "is_upper_bound": self.is_upper_bound,
            "workloads": [asdict(item) for item in self.workloads],
            "lines": list(self.lines),
        }


def verdict_of(
    rows: Sequence[Row],
    *,
    concurrency: int,
    head_is_at_hand: bool,
    prices: Prices,
    doubts: Sequence[str] = (),
) -> Verdict:
    """Judge by what could be turned on today.

    Args:
        rows: of all systems and workloads.
        concurrency: that the speed-ups hold for.
        head_is_at_hand: whether systems with a head count; an assumed one does not.
        prices: where the costs of passes come from; without any, nothing is shown to help.
        doubts: about the log, in sentences; they come right after the headline.
    """
    usable = [row for row in rows if _is_usable(row, with_head=head_is_at_hand)]
    workloads = list(dict.fromkeys(row.workload for row in usable))
    judged = [
        _judged([row for row in usable if row.workload == name], prices) for name in workloads
    ]
    overall = next(item for item in judged if item.workload == ALL)
    others = tuple(item for item in judged if item.workload != ALL)
    headline = _headline(overall, concurrency, prices)
    lines = (headline, *doubts, *_by_workload(others))
    if not head_is_at_hand:
        lines += tuple(_of_a_head(rows, overall))
    return Verdict(overall, others, lines, prices == "none")


def doubts_about(outputs: Sequence[Sequence[Sequence[int]]]) -> list[str]:
    """What makes a log tell less than its figures seem to.

    Args:
        outputs: of each judged session, its answers as token ids.
    """
    doubts = []
    answers = [answer for session in outputs for answer in session]
    num_tokens = sum(map(len, answers))
    if num_tokens < FEW_TOKENS:
        doubts.append(
            f"Judged on {num_tokens:,} tokens in {len(answers)} answers, which is little: more of "
            "the log may say something else."
        )
    num_copies = len(outputs) - len({tuple(map(tuple, session)) for session in outputs})
    if num_copies > len(outputs) / 2:
        doubts.append(
            f"{num_copies} of {len(outputs)} judged sessions repeat the answers of another word "
            "for word: if they are retries or copies, none of this holds for new traffic."
        )
    return doubts


def _is_usable(row: Row, *, with_head: bool) -> bool:
    is_system = row.system != GREEDY and not row.system.startswith(ORACLE)
    return is_system and (with_head or not row.uses_head)


def _judged(rows: Sequence[Row], prices: Prices) -> WorkloadVerdict:
    best = max(row.speedup for row in rows)
    as_good = [row for row in rows if row.speedup >= SAME * best]
    chosen = min(as_good, key=lambda row: _SIMPLEST_FIRST.index(row.system.split("+")[0]))
    found = WorkloadVerdict(
        chosen.workload, "will not help", chosen.system, chosen.speedup, chosen.speedup_ci
    )
    if chosen.speedup >= WORTH:
        is_shown = not found.is_unproven and prices != "none"
        return replace(found, kind="helps" if is_shown else "may help")
    return replace(found, kind="too short to say") if found.is_unproven else found


def _headline(overall: WorkloadVerdict, concurrency: int, prices: Prices) -> str:
    where = f"plain decoding at concurrency {concurrency}"
    assumed = ", by assumed costs" if prices == "assumed" else ""
    gain = f"is {overall.in_words} as fast as {where}{assumed}"
    if prices == "none":
        gain = (
            f"needs {overall.in_words} fewer passes than plain decoding, and is at most that much "
            "faster (no cost table)"
        )
    if overall.kind == "will not help":
        return (
            f"It will not help you: the best system, {overall.system}, {gain}; less than "
            f"{WORTH:g}x is not worth operating."
        )
    if overall.kind == "too short to say":
        return (
            f"The log is too short to say: the best system, {overall.system}, {gain}; less than "
            f"{WORTH:g}x would not be worth operating."
        )
    start = "It will help" if overall.kind == "helps" else "It may help"
    if overall.is_unproven:
        start += ", the log is too short to say"
    return f"{start}: {overall.system} {gain}."


def _by_workload(workloads: Sequence[WorkloadVerdict]) -> list[str]:
    if len(workloads) < 2:
        return []
    told: dict[str, list[str]] = {start: [] for start in _STARTS.values()}
    for item in workloads:
        kind = "unproven" if item.kind == "may help" and item.is_unproven else item.kind
        told[_STARTS[kind]].append(f"{item.workload} ({item.system} {item.speedup:.2f}x)")
    return [f"{start} {', '.join(names)}." for start, names in told.items() if names]


_STARTS = {
    "helps": "It helps on",
    "may help": "It may help on",
    "unproven": "It may help, too little is known of",
    "too short to say": "The log is too short to say for",
    "will not help": "It will not help on",
}


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
            f"{best.speedup:.2f}x, less than {WORTH:g} times {overall.system}'s."
        ]
    return [
        f"A head as good as assumed would bring {best.system} to {best.speedup:.2f}x: "
        "worth measuring one (`--eagle3`)."
    ]
