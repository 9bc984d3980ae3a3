"""The stored report of `make exactness`, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.exactness.draws import WAYS, Cell
from tests.exactness.greedy import Row, by

LEAST_PVALUE = 1e-4
"""With three dozen comparisons a fair sampler falls below it once in some 280 runs; the seeds are
fixed, so a run that passed passes again."""


def page(
    rows: Sequence[Row], cells: Sequence[Cell], facts: Mapping[str, Any], num_asked: int
) -> str:
    """Greedy tokens by arm and by workload, chi-squares, and where the figures come from."""
    parts = ["# Exactness at scale", "", _provenance(rows, facts), ""]
    parts += _greedy(rows, num_asked) if rows else ["No greedy tokens were compared."]
    parts += ["", *(_draws(cells) if cells else ["Nothing was drawn."]), ""]
    return "\n".join(parts)


def _provenance(rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    commits = sorted({row.commit[:12] for row in rows} | {str(facts["commit"])[:12]})
    return (
        f"Written by `make exactness` on {str(facts['created_at'])[:10]}; commits "
        f"{', '.join(commits)}; {facts['cpu']}, one thread a worker; torch "
        f"{facts['packages'].get('torch')}, transformers {facts['packages'].get('transformers')}."
    )


def _greedy(rows: Sequence[Row], num_asked: int) -> list[str]:
    total, bad = sum(r.tokens for r in rows), sum(r.differing for r in rows)
    prompts = len({(r.workload, r.prompt_id) for r in rows})
    more = "" if total >= num_asked else f" (of {num_asked:,} asked for: not finished)"
    lines = [
        "## Tokens against plain decoding, float32",
        "",
        f"**{bad} of {total:,} tokens differ**{more}. SmolLM2-135M, {prompts} prompts of "
        f"{len(by(rows, 'workload'))} workloads, the shortest of each. Every prompt is answered by "
        "plain decoding once and by every system; each system's tokens count. `open_chat` is "
        "sampled with a seed, the others are greedy. *head*: with the shipped EAGLE-3 head; "
        "*warm*: the cache knows the answer, so drafts are long; *prefix*, *mask*: the slim model "
        "behind which `nested` verifies. Text and finish reason are compared too.",
        "",
    ]
    head = ("system", "answers", "tokens", "differing", "accepted / drafted", "tokens a pass")
    lines += _table(head, (_line(name, group) for name, group in by(rows, "arm").items()))
    lines += ["", *_table(("workload", *head[1:]), _lines_by_workload(rows))]
    return lines


def _lines_by_workload(rows: Sequence[Row]) -> Iterable[Sequence[object]]:
    return (_line(name, group) for name, group in by(rows, "workload").items())


def _line(name: str, rows: Sequence[Row]) -> Sequence[object]:
    tokens, passes = sum(r.tokens for r in rows), sum(r.passes for r in rows)
    accepted, drafted = sum(r.accepted for r in rows), sum(r.drafted for r in rows)
    return (
        *(name, len(rows), f"{tokens:,}", sum(r.differing for r in rows)),
        *(f"{accepted:,} / {drafted:,}", f"{tokens / max(1, passes):.2f}"),
    )


def _draws(cells: Sequence[Cell]) -> list[str]:
    found = {(cell.parameter, cell.way): cell for cell in cells}
    draws = sorted({cell.draws for cell in cells})
    lines = [
        "## Sampling against the target's law",
        "",
        f"Chi-square over all outcomes of three tokens (six kinds each), "
        f"{' or '.join(f'{n:,}' for n in draws)} draws a cell, each a request of its own through "
        "the loop; the law is written out longhand. p-value, and the share of drafted tokens that "
        f"stood. Least p-value {min(cell.pvalue for cell in cells):.2g} of {len(cells)} "
        f"(refused below {LEAST_PVALUE:g}).",
        "",
    ]
    rows = []
    for parameter in dict.fromkeys(cell.parameter for cell in cells):
        shown = [found.get((parameter, way)) for way in WAYS]
        rows.append(
            (parameter, *(f"{c.pvalue:.3f}, {c.accepted:.0%}" if c else "-" for c in shown))
        )
    return lines + _table(("parameter", *WAYS), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "| :-- |" + " --: |" * (len(head) - 1)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]
