"""The page of a sweep: one HTML file that needs nothing else, to be looked at or printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hvd_ray.errors import UserError
from hvd_ray.home import atomic_path
from hvd_ray.tuning.contest import EVERYTHING
from hvd_ray.tuning.final import BEST, FIXED
from hvd_ray.tuning.objective import SPEED
from hvd_ray.tuning.page_figures import gap_figure, parallel_coordinates, tau_panels
from hvd_ray.tuning.svg import short

Result = Mapping[str, Any]
"""What `sweep.json` holds."""


def write_page(path: Path, result: Result) -> None:
    """Draw the result of a sweep to `path`, whole or not at all.

    Raises:
        UserError: the result lacks something or holds what no sweep writes.
    """
    try:
        text = page(result)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(
            f"{path.parent}: its result is damaged ({type(error).__name__}: {error}); "
            "run `hvd tune` again into another folder"
        ) from None
    with atomic_path(path) as draft:
        draft.write_text(text, encoding="utf-8")


def page(result: Result) -> str:
    """The page as one HTML document: no file, font or script from anywhere else."""
    title = f"Sweep of payoff predictors for {result['model']}"
    unit, best = result["unit"], result["best"]
    sections = (
        _tiles(result),
        _section(
            "Trials",
            "One line a trial, from its settings to its replayed speed on the validation "
            "sessions. Dark is fast; orange is the best. A line that dips below an axis belongs "
            "to a trial whose policy has no such setting.",
            parallel_coordinates(
                result["trials"], best=best["trial"], unit=unit, log_names=_log_names(result)
            ),
        ),
        _section(
            "Tau against speed",
            f"Replayed {unit} of the best trial's predictor as the threshold moves, on the "
            "validation sessions. Every panel has a scale of its own.",
            tau_panels(result["curves"], unit=unit),
        ),
        _section(
            "The best trial against fixed tau = 6",
            f"Test sessions, which nothing was tuned on: replayed {unit} of the best trial over "
            "those of the same predictor at tau = 6, with 95 % intervals of a paired bootstrap "
            "over sessions (over prompts where a workload has fewer than four).",
            gap_figure(result["test"]) + _test_table(result["test"]),
        ),
        _section("All trials", "Click a heading to sort.", _trials_table(result)),
        _section("Where this comes from", "", _provenance(result)),
    )
    return _DOCUMENT.format(
        title=escape(title), style=_STYLE, script=_SCRIPT, body="".join(sections)
    )


def _log_names(result: Result) -> list[str]:
    """The knobs of the sweep that were searched by their logarithm."""
    space = result["sweep"]["space"]
    return [name for name, knob in space.items() if isinstance(knob, dict) and "log" in knob]


def _section(heading: str, caption: str, body: str) -> str:
    words = f"<p>{escape(caption)}</p>" if caption else ""
    return f"<section><h2>{escape(heading)}</h2>{words}{body}</section>"


def _tiles(result: Result) -> str:
    best, whole, unit = result["best"], result["test"][0], result["unit"]
    speeds, ratio = whole["speeds"], whole["gap"]["ratio"]
    rows = result["trials"]
    counts = Counter(row["status"] for row in rows)
    ended = [f"{counts[status]} {status}" for status in _STATUSES if counts[status]]
    tiles = (
        (f"{short(speeds[BEST])} {unit}", "best trial, test sessions"),
        (f"{ratio:.2f}x {_interval(whole['gap'])}", f"over {FIXED.replace('_', ' = ')}"),
        (f"{speeds[BEST] / speeds['suffix']:.2f}x", "over always the cache"),
        (f"{speeds[BEST] / speeds['greedy']:.2f}x", "over no drafts"),
        (str(len(rows)), "trials: " + ", ".join(ended)),
    )
    boxes = "".join(
        f"<div class=tile><b>{escape(figure)}</b><span>{escape(words)}</span></div>"
        for figure, words in tiles
    )
    settings = ", ".join(f"{key} {_cell(value)}" for key, value in best["params"].items())
    return (
        f"<div class=tiles>{boxes}</div>"
        f"<p><b>Best trial, number {best['number']}:</b> {escape(settings)}</p>"
    )


_STATUSES = ("finished", "stopped early", "failed")


def _interval(gap: Mapping[str, Any]) -> str:
    if gap["interval"] is None:
        return ""
    low, high = gap["interval"]
    return f"[{low:.2f}, {high:.2f}]"


def _test_table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(rows[0]["speeds"])
    head = ["workload", "sessions", "tokens", *names, f"{BEST} / {FIXED}", "drawn"]
    body = [
        [
            "all workloads" if row["workload"] == EVERYTHING else row["workload"],
            row["sessions"],
            row["tokens"],
            *(float(row["speeds"][name]) for name in names),
            f"{row['gap']['ratio']:.3f} {_interval(row['gap'])}",
            f"{row['gap']['units']} {row['gap']['unit']}s",
        ]
        for row in rows
    ]
    return _table(head, body)


def _trials_table(result: Result) -> str:
    rows = result["trials"]
    names, fixed = varied(rows)
    head = ["trial", "status", result["unit"], "tokens/pass", "at epoch", *names]
    body, ids = [], []
    for row in sorted(rows, key=lambda r: -float(r["metrics"].get(SPEED, 0))):
        metrics = row["metrics"]
        figures = [metrics.get(key, "") for key in (SPEED, "emitted_per_pass")]
        epoch = int(metrics["epoch"]) if metrics else ""
        params = [row["params"].get(name, "") for name in names]
        body.append([row["number"], row["status"], *figures, epoch, *params])
        ids.append(row["trial"])
    words = ", ".join(f"{name} {_cell(value)}" for name, value in fixed.items())
    note = f"<p>The same in every trial: {escape(words)}.</p>" if fixed else ""
    return note + _table(head, body, ids=ids, best=result["best"]["trial"])


def varied(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[str, Any]]:
    """Names of the settings that differ between trials, and the others with their value."""
    names = dict.fromkeys(name for row in rows for name in row["params"])
    absent = object()
    found = {name: {row["params"].get(name, absent) for row in rows} for name in names}
    fixed = {name: values.pop() for name, values in found.items() if len(values) == 1}
    return [name for name in names if name not in fixed], fixed


def _table(
    head: Sequence[str],
    body: Sequence[Sequence[Any]],
    *,
    ids: Sequence[str] = (),
    best: str | None = None,
) -> str:
    kinds = [" class=num" if _is_number(value) else "" for value in body[0]]
    headings = "".join(
        f"<th{kind}>{escape(name)}</th>" for name, kind in zip(head, kinds, strict=True)
    )
    lines = []
    for index, row in enumerate(body):
        name = ids[index] if ids else None
        kind = " class=best" if name is not None and name == best else ""
        link = f' data-trial="{escape(name)}"' if name is not None else ""
        lines.append(f"<tr{kind}{link}>{''.join(map(_data, row))}</tr>")
    table = f"<table><thead><tr>{headings}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f"<div class=scroll>{table}</div>"


def _data(value: Any) -> str:
    kind = f' class=num data-value="{value}"' if _is_number(value) else ""
    return f"<td{kind}>{escape(_cell(value))}</td>"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    return short(value) if isinstance(value, float) else str(value)


def _provenance(result: Result) -> str:
    about = result["provenance"]
    changes = " and uncommitted changes" if about.get("is_dirty") else ""
    facts = {
        "command": about.get("command"),
        "made": about.get("created_at"),
        "commit": f"{about.get('commit')}{changes}",
        "machine": f"{about.get('cpu')}, {about.get('cores')} cores",
        "costs": _costs(about.get("costs")),
        "traces": about.get("traces_hash"),
        "seed": about.get("seed"),
        "tracking run": result.get("run_id"),
        "registered": result.get("registered"),
    }
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>"
        for name, value in facts.items()
        if value is not None
    )
    return f"<dl>{rows}</dl>"


def _costs(about: Any) -> str:
    if not isinstance(about, Mapping):
        return "every target pass costs the same"
    facts = [about[key] for key in ("engine", "dtype", "device")]
    return f"measured: {', '.join(facts)}, {about['num_threads']} threads"


_DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
<script>{script}</script>
</body>
</html>
"""

_STYLE = """
:root { color-scheme: light; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
body { font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: #1f2933;
  max-width: 1120px; margin: 28px auto; padding: 0 24px; background: #fff; }
h1 { font-size: 26px; margin: 0 0 16px; } h2 { font-size: 19px; margin: 36px 0 4px; }
p { margin: 4px 0 12px; max-width: 80ch; color: #3e4c59; }
svg { display: block; font-family: inherit; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(250px, 1fr));
  gap: 8px; margin-top: 12px; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin-bottom: 12px; }
.tile { border: 1px solid #d9e2ec; border-radius: 8px; padding: 10px 14px; min-width: 140px; }
.tile b { display: block; font-size: 19px; } .tile span { color: #616e7c; font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 12.5px; margin-top: 8px; width: 100%; }
th { text-align: left; border-bottom: 2px solid #9aa5b1; padding: 4px 6px; cursor: pointer; }
td { border-bottom: 1px solid #e4e7eb; padding: 3px 6px; white-space: nowrap; }
td.num, th.num { text-align: right; font-variant-numeric: tabular-nums; }
tr.best td { font-weight: 600; background: #fff4ec; }
tr.lit td { background: #e6f0fa; }
path.trial.lit { stroke: #0b7285; stroke-width: 5; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; font-size: 13px; }
dt { color: #616e7c; } dd { margin: 0; overflow-wrap: anywhere; }
@media print {
  @page { size: A4 landscape; margin: 12mm; }
  body { margin: 0; padding: 0; font-size: 12px; max-width: none; }
  svg, tr, p { break-inside: avoid; } h2, p { break-after: avoid; } h2 { margin-top: 18px; }
  table { font-size: 9.5px; } td, th { padding: 2px 5px; }
  .scroll { overflow: visible; }
}
"""

_SCRIPT = """
for (const head of document.querySelectorAll("th")) {
  head.addEventListener("click", () => {
    const column = head.cellIndex, body = head.closest("table").tBodies[0];
    const down = head.dataset.down !== "1";
    head.dataset.down = down ? "1" : "0";
    const key = (row) => {
      const cell = row.cells[column];
      return cell.dataset.value !== undefined ? Number(cell.dataset.value) : cell.textContent;
    };
    const order = (a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (down ? -1 : 1);
    body.append(...[...body.rows].sort(order));
  });
}
const all = document.querySelectorAll("[data-trial]");
const light = (trial, on) => all.forEach((item) => {
  if (item.dataset.trial === trial) item.classList.toggle("lit", on);
});
all.forEach((item) => {
  item.addEventListener("mouseenter", () => light(item.dataset.trial, true));
  item.addEventListener("mouseleave", () => light(item.dataset.trial, false));
});
"""
