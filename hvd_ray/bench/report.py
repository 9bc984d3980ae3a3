"""Results for people: Markdown tables, and the README's generated part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_ray.bench.result import BASELINE, BenchResult, Row
from hvd_ray.bench.rivals import RIVALS
from hvd_ray.bench.tier_report import cost_line, has_tiers, tier_rows, tier_summary
from hvd_ray.config import Config, split_system
from hvd_ray.errors import UserError
from hvd_ray.home import atomic_path
from hvd_ray.systems import HYBRIDS
from hvd_ray.types import LOSSLESS


def markers(part: str) -> tuple[str, str]:
    """The comments between which a generated part of the README stands."""
    return f"<!-- {part}:begin -->", f"<!-- {part}:end -->"


BEGIN, END = markers("bench")
_DEFAULTS = Config()
HEADLINE = "hvd_cost"
"""The system that a reader looks for first."""

Cell = Callable[[Row], str]


# -- words -------------------------------------------------------------------------------------


def arm_label(row: Row) -> str:
    return row.system if row.cache == "none" else f"{row.system} {row.cache}"


def labels_of(rows: Sequence[Row]) -> list[str]:
    """A label for each row; the cache's state is named only where there are several."""
    is_mixed = len({row.cache for row in rows} - {"none"}) > 1
    return [arm_label(row) if is_mixed else row.system for row in rows]


def across(labels: Iterable[str]) -> list[str]:
    """Columns of a wide table: each label once, `hvd_cost` first, where no edge cuts it off."""
    return sorted(dict.fromkeys(labels), key=lambda label: label.split()[0] != HEADLINE)


def exactness_notes(rows: Iterable[Row], *, config: Config = _DEFAULTS) -> tuple[str, ...]:
    """Say so where float32 outputs differ: there they must be the same, to the last token."""
    return tuple(
        f"NOT EXACT: {len(row.differences)} of {row.prompts} outputs of {arm_label(row)} on "
        f"{row.workload} differ from greedy in float32; this is a fault of the decoder."
        for row in rows
        if row.dtype == "float32" and row.differences and _must_be_exact(row, config)
    )


def cut_notes(rows: Iterable[Row]) -> tuple[str, ...]:
    """Where a score is of answers that were not finished: half a JSON object is none."""
    return tuple(
        f"{row.workload}: {percent(row.cut_share)} of greedy's answers end at the limit of "
        "tokens; they are scored as they stand."
        for row in rows
        if row.system == BASELINE and row.quality_metric and row.cut_share
    )


def _must_be_exact(row: Row, config: Config) -> bool:
    """Textbook speculative sampling keeps the law of what is sampled, not the very tokens."""
    if row.system in RIVALS:
        return False
    policy, verification = split_system(row.system)
    draws_anew = {"nested": config.tiers.is_sampled}.get(
        verification, config.drafting.eagle3.is_sampled and policy in HYBRIDS | {"eagle3"}
    )
    is_sampled = any(temperature > 0 for temperature in row.temperatures)
    return verification in LOSSLESS and not (is_sampled and draws_anew)


def slowdown_notes(rows: Sequence[Row]) -> tuple[str, ...]:
    """One plain line for each system that is slower than plain decoding somewhere.

    "I turned it on and it is slower" (vllm#6494, #8439, #9565) should be read in the report, not
    found out in production. What the interval does not show is not called slower.
    """
    slower: dict[str, list[str]] = {}
    unclear: dict[str, list[str]] = {}
    for label, row in zip(labels_of(rows), rows, strict=True):
        if row.system != BASELINE and row.speedup_vs_greedy < 1:
            is_shown = row.speedup_ci[1] < 1 and not row.ci_is_degenerate
            where = f"{row.workload} ({row.speedup_vs_greedy:.2f}x)"
            (slower if is_shown else unclear).setdefault(label, []).append(where)
    return (
        *(
            f"{label} is slower than plain decoding on {', '.join(places)}: leave it off there."
            for label, places in slower.items()
        ),
        *(
            f"{label} shows no gain on {', '.join(places)}, within the noise or of too few prompts."
            for label, places in unclear.items()
        ),
    )


def speedup_cell(row: Row) -> str:
    """`1.52 (1.31-1.77)`; without an interval where one or two prompts give none."""
    if row.ci_is_degenerate:
        return f"{row.speedup_vs_greedy:.2f} (few)"
    return _with_interval(row.speedup_vs_greedy, row.speedup_ci)


def _with_interval(ratio: float, interval: tuple[float, float]) -> str:
    return f"{ratio:.2f} ({interval[0]:.2f}-{interval[1]:.2f})"


def _drafted_cell(row: Row) -> str:
    """Of the cycles, not of the target's passes: a slim model may decide without one."""
    return f"{row.accepted} / {row.drafted}, {percent(1 - row.source_share.get('none', 0.0))}"


def _without_loops_cell(row: Row) -> str:
    rest = row.without_loops
    return f"{rest.speedup_vs_greedy:.2f} / {rest.emitted_per_pass:.2f}" if rest else "-"


def percent(share: float) -> str:
    """Never rounds to 100 % what is not all, nor to 0 % what is not none."""
    value = 100 * share
    if 99 < value < 100 or 0 < value < 1:
        return f"{min(max(value, 0.1), 99.9):.1f} %"
    return f"{value:.0f} %"


# -- Markdown ----------------------------------------------------------------------------------


def markdown_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table that reads well raw: padded, text to the left, the other columns to the right."""
    body = [[cell.replace("|", "\\|") for cell in cells] for cells in body]
    widths = [max(len(line[i]) for line in [header, *body]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(header), line(rule), *map(line, body)])


def markdown_report(
    results: Sequence[BenchResult], *, heading: str = "##", images: Sequence[str] = ()
) -> str:
    """All results, one section each; `images` are links to their plots, in the same order."""
    sections = [
        _section(result, heading, images[i] if images else None) for i, result in enumerate(results)
    ]
    return "\n\n".join(sections) + "\n"


def _section(result: BenchResult, heading: str, image: str | None) -> str:
    rows = [*result.rows, *result.aggregate]
    drafting = [row for row in rows if row.system != BASELINE]
    parts = [f"{heading} {title(result)}"]
    if image:
        parts.append(f"![Speed-up against greedy by workload and system]({image})")
    if drafting and result.is_timed:
        parts += [
            "Speed-up against greedy in tokens per second, with its 95 % interval:",
            _matrix(drafting, speedup_cell),
        ]
    if drafting:
        parts += [
            "Emitted tokens per target pass:",
            _matrix(drafting, lambda row: f"{row.emitted_per_pass:.2f}"),
            "Accepted / drafted tokens, and the share of cycles that verified a draft:",
            _matrix(drafting, _drafted_cell),
        ]
    if drafting and result.is_timed:
        parts += [
            "Speed-up / emitted per pass without the prompts whose greedy output loops:",
            _matrix(drafting, _without_loops_cell),
        ]
    if has_tiers(result):
        parts += [
            TIERS_CAPTION + " " + cost_line(result.provenance),
            markdown_table(*tier_summary(result)),
            "The same by workload:",
            markdown_table(*tier_rows(result)),
        ]
    parts += [
        "Plain decoding, and how much of its output loops (a 20-token stretch four times or more):",
        _greedy_table([row for row in rows if row.system == BASELINE], is_timed=result.is_timed),
        *result_ending(result),
    ]
    return "\n\n".join(parts)


TIERS_CAPTION = (
    "Verification by a slim model: passes of target and slim model for an output token, and what "
    "answers lose against greedy's own (same last number, chrF, ROUGE-L; valid JSON of all "
    "answers). Lossy modes run here without budget and fall-back."
)


def tiers_part(results: Sequence[BenchResult], *, heading: str = "###") -> str:
    """The one table of results with slim models, for the README."""
    sections = [
        "\n\n".join(
            [
                f"{heading} {title(result)}",
                f"{TIERS_CAPTION} {cost_line(result.provenance)}",
                markdown_table(*tier_summary(result)),
                *result_ending(result),
            ]
        )
        for result in results
    ]
    return "\n\n".join(sections) + "\n"


def result_ending(result: BenchResult) -> list[str]:
    """What stands below the tables."""
    notes = ["\n".join(f"- {note}" for note in result.notes)] if result.notes else []
    words = [*opening_lines(result), *notes]
    return [*words, f"<sub>{provenance_line(result)}</sub>"]


def title(result: BenchResult) -> str:
    row = result.rows[0]
    caches = " and ".join(sorted({row.cache for row in result.rows} - {"none"}))
    state = f", {caches} cache" if caches else ""
    together = (result.provenance.get("options") or {}).get("concurrency", 1)
    load = f", {together} requests at once" if together > 1 else ""
    return f"{_model(result)}, {row.dtype}, {row.engine} engine{state}{load}"


def _model(result: BenchResult) -> str:
    """The target's name; of a folder, the last part: results travel, paths do not."""
    config = result.provenance.get("config") or {}
    return str(config.get("model", "target")).rstrip("/").rpartition("/")[2]


def _matrix(rows: Sequence[Row], cell: Cell) -> str:
    """Workloads down, systems across."""
    labels = labels_of(rows)
    cells = {(row.workload, label): cell(row) for row, label in zip(rows, labels, strict=True)}
    columns = across(labels)
    workloads = dict.fromkeys(row.workload for row in rows)
    body = [[w, *(cells.get((w, label), "-") for label in columns)] for w in workloads]
    return markdown_table(["workload", *columns], body)


def _greedy_table(rows: Sequence[Row], *, is_timed: bool) -> str:
    clocked = ["tokens/s"] if is_timed else []
    header = ["workload", "family", "temperature", "prompts", "tokens", *clocked, "loops"]
    body = [
        [
            row.workload,
            row.family,
            ", ".join(f"{t:g}" for t in row.temperatures),
            str(row.prompts),
            str(row.tokens),
            *([f"{row.tokens_per_second:.1f}"] if is_timed else []),
            percent(row.loops),
        ]
        for row in rows
    ]
    return markdown_table(header, body)


def exactness_line(result: BenchResult) -> str:
    """What share of the outputs equals greedy's, beside what plain runs do among themselves."""
    drafting = [row for row in result.aggregate if row.system != BASELINE]
    shares = zip(labels_of(drafting), drafting, strict=True)
    same = ", ".join(f"{label} {percent(row.identical_to_greedy)}" for label, row in shares)
    line = f"Outputs identical to greedy: {same or 'only greedy was measured'}."
    controls = [row.identical_in_one_pass for row in result.aggregate]
    known = [share for share in controls if share is not None]
    if known:
        line += f" Control, the target reading greedy's output in one pass: {percent(known[0])}."
    margins = [d.margin for row in drafting for d in row.differences if d.margin is not None]
    if margins:
        line += f" Largest logit margin at a first difference: {max(map(abs, margins)):.3f}."
    return line


def opening_lines(result: BenchResult) -> list[str]:
    """What stands first below the tables: how exact it was, and who foretold payoffs."""
    lines = [exactness_line(result), predictor_line(result.provenance)]
    return [line for line in lines if line]


def predictor_line(provenance: Mapping[str, Any]) -> str:
    """Which predictor decided in `hvd_tau` and `hvd_cost`; empty where none did."""
    reference = str(provenance.get("predictor") or "")
    if Path(reference).is_absolute():  # results travel, paths do not
        reference = "/".join(Path(reference).parts[-2:])
    sha = str(provenance.get("predictor_sha256") or "")[:12]
    return f"Predictor: {reference}{f' (sha256 {sha})' if sha else ''}." if reference else ""


def provenance_line(result: BenchResult) -> str:
    """Where the figures come from, in one line."""
    known = result.provenance
    commit = str(known.get("commit", "unknown"))[:12] + (
        "+changes" if known.get("is_dirty") else ""
    )
    prompts = str(known.get("workload_hash", ""))[:12]
    facts = {
        "command": f"`{known['command']}`" if known.get("command") else None,
        "commit": commit,
        "date": str(known.get("created_at", ""))[:10],
        "machine": known.get("cpu"),
        "threads": known.get("torch_threads"),
        "load before": known.get("load_average"),
        "prompts sha256": prompts,
    }
    parts = [f"{name} {value}" for name, value in facts.items() if value not in (None, "")]
    units = sorted({row.ci_unit for row in result.rows})
    parts.append(f"intervals: paired bootstrap over {' or '.join(f'{u}s' for u in units)}")
    return "; ".join(parts)


# -- files ------------------------------------------------------------------------------------


def write_report(results: Sequence[BenchResult], out: Path) -> list[Path]:
    """Write `bench.md` and a plot for each timed result into a folder; the paths written.

    Raises:
        UserError: the folder cannot be written.
    """
    from hvd_ray.bench.plots import plot_speedups

    plots = [out / plot_name(i, r) if r.is_timed else None for i, r in enumerate(results)]
    for result, path in zip(results, plots, strict=True):
        if path is not None:
            with atomic_path(path) as draft:
                plot_speedups(result).savefig(draft, dpi=130, metadata={"Software": None})
    images = [path.name if path is not None else "" for path in plots]
    _write(out / "bench.md", "# Benchmark\n\n" + markdown_report(results, images=images))
    return [out / "bench.md", *(path for path in plots if path is not None)]


def plot_name(index: int, result: BenchResult) -> str:
    """The plot's file of the result at a place of the report."""
    return f"speedup-{index + 1}-{result.rows[0].dtype}.png"


def update_readme(
    readme: Path, results: Sequence[BenchResult], *, images: Sequence[str] = ()
) -> None:
    """Put the tables between the markers of a Markdown file; the rest stays as it is.

    Raises:
        UserError: the file cannot be read, or has not one pair of markers in order.
    """
    update_part(readme, "bench", markdown_report(results, heading="###", images=images))


def update_part(readme: Path, part: str, block: str) -> None:
    """Put a text between the markers of a part.

    Raises:
        UserError: the file cannot be read, or has not one pair of markers in order.
    """
    head, tail = check_readme(readme, part)
    begin, end = markers(part)
    _write(readme, f"{head}{begin}\n{block}{end}{tail}")


def check_readme(readme: Path, part: str = "bench") -> tuple[str, str]:
    """What stands before and after the markers of a Markdown file.

    Raises:
        UserError: the file cannot be read, or has not one pair of markers in order.
    """
    begin, end = markers(part)
    try:
        text = readme.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {readme}: {error}") from None
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise UserError(f"{readme}: expected one {begin} and, after it, one {end}")
    head, _, rest = text.partition(begin)
    return head, rest.partition(end)[2]


def _write(path: Path, text: str) -> None:
    with atomic_path(path) as draft:
        draft.write_text(text, encoding="utf-8")
