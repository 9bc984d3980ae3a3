"""`hvd report`: Markdown, plots and a page from what bench, suite, sweep and labels have found."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hvd_ray.errors import UserError

if TYPE_CHECKING:
    from hvd_ray.bench.result import BenchResult
    from hvd_ray.paper.transfer import TransferCell

EXAMPLE = "Example: `hvd report bf16.json float32.json --out docs/bench --readme README.md`"
PAGE = "report.html"


def register(app: typer.Typer) -> None:
    app.command("report", epilog=EXAMPLE)(report)


def report(
    results: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RESULT.json]...", help="Results of `hvd bench --out`, paper.json of a suite."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write bench.md, the plots and report.html there."),
    ] = None,
    readme: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Put the tables between the comments `bench:begin` and `bench:end` there; those "
            "of a suite between `paper:begin`, `paper-vllm:begin` or `tiers:begin` and its end.",
        ),
    ] = None,
    times: Annotated[
        Path | None,
        typer.Option(
            metavar="RESULT.json",
            help="Times of a run alone, for one result of `--untimed` on more prompts.",
        ),
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Instead: draw the page of a folder of `hvd tune`."),
    ] = None,
    transfer: Annotated[
        Path | None,
        typer.Option(
            metavar="LABELS_DIR",
            help="Instead: train predictors on each kind of work and test them on the others.",
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="LABELS_DIR",
            help="Instead: replay every system on the test sessions, by workload.",
        ),
    ] = None,
    traces: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The labelled traces: with --replay, and with --transfer for their families.",
        ),
    ] = None,
    costs: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|pass", help="With --replay: as in `hvd tune`. Default: this machine's."
        ),
    ] = None,
    predictor: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|models:/...", help="With --replay. Default: the champion or shipped one."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Processes for --replay or --transfer, on Ray. Default: this one."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Say in JSON what was written; without --out, the rows.")
    ] = False,
) -> None:
    """Show results as Markdown, or write them with their plots and as one page."""
    _refuse_mixed(results, out, readme, sweep, transfer, replay)
    if times is not None and len(results or ()) != 1:
        raise UserError("--times is for one result of `hvd bench --untimed`: name that one")
    for name, value in (("--costs", costs), ("--predictor", predictor)):
        if value is not None and replay is None:
            raise UserError(f"{name} goes with --replay only")
    if traces is not None and transfer is None and replay is None:
        raise UserError("--traces is for --transfer and --replay")
    num_workers = _num_workers(workers, is_spread=replay is not None or transfer is not None)
    if replay is not None:
        from hvd_ray.commands.report_replay import show_replay

        show_replay(
            replay,
            traces,
            costs=costs,
            predictor=predictor,
            num_workers=num_workers,
            out=out,
            as_json=as_json,
        )
    elif sweep is not None:
        _draw_sweep(sweep, as_json=as_json)
    elif transfer is not None:
        _transfer(transfer, traces, out, num_workers, as_json=as_json)
    else:
        _report(results or [], out, readme, times, as_json=as_json)


def _num_workers(given: int | None, *, is_spread: bool) -> int:
    if given is not None and not is_spread:
        raise UserError("--workers goes with --replay and --transfer only")
    if given is not None and given < 1:
        raise UserError(f"--workers must be 1 or more, got {given}")
    return given or 1


def _refuse_mixed(
    results: Sequence[Path] | None,
    out: Path | None,
    readme: Path | None,
    sweep: Path | None,
    transfer: Path | None,
    replay: Path | None,
) -> None:
    kinds = [bool(results), *(given is not None for given in (sweep, transfer, replay))]
    if sum(kinds) != 1:
        raise UserError(
            "give results of `hvd bench`, or --sweep DIR, --transfer LABELS_DIR or "
            "--replay LABELS_DIR"
        )
    if sweep is not None and out is not None:
        raise UserError("--sweep draws the page into the sweep's own folder: leave --out away")
    if readme is not None and not results:
        raise UserError("--readme takes the tables of results of `hvd bench`: name some")


# -- results of the bench ---------------------------------------------------------------------


def _report(
    results: Sequence[Path],
    out: Path | None,
    readme: Path | None,
    times: Path | None,
    *,
    as_json: bool,
) -> None:
    from hvd_ray.bench.merge import own_with_times_of, with_times_of
    from hvd_ray.bench.report import markdown_report
    from hvd_ray.bench.result import check_writable, read_result

    read = [read_result(path) for path in results]
    own = [_own_part(path) for path in results]
    if times is not None:
        read = [with_times_of(read[0], read_result(times))]
        own = [part and own_with_times_of(part, _own_part(times)) for part in own]
    if readme is not None:
        _check_parts(readme, read, own)
        check_writable(readme)
    written = _written(read, own, out) if out is not None else []
    if readme is not None:
        plots = {path.name: path for path in written if path.suffix == ".png"}
        _fill_parts(readme, read, own, plots)
        written.append(readme)
    if as_json:
        found = {"written": [str(path) for path in written]}
        print(json.dumps(found if written else [result.as_json() for result in read], indent=2))
    elif written:
        print("\n".join(f"written: {path}" for path in written))
    else:
        print(markdown_report(read), end="")


def _part_of(result: BenchResult, own: Mapping[str, Any] | None) -> str:
    """Which part of the README a result fills."""
    from hvd_ray.bench.tier_report import has_tiers

    if own is not None:
        return "paper-vllm" if any(row.engine == "vllm" for row in result.rows) else "paper"
    return "tiers" if has_tiers(result) else "bench"


def _check_parts(
    readme: Path, results: Sequence[BenchResult], own: Sequence[Mapping[str, Any] | None]
) -> None:
    from hvd_ray.bench.report import check_readme

    for part in dict.fromkeys(map(_part_of, results, own)):
        check_readme(readme, part)


def _fill_parts(
    readme: Path,
    results: Sequence[BenchResult],
    own: Sequence[Mapping[str, Any] | None],
    plots: Mapping[str, Path],
) -> None:
    """Each part of the README that these results are for; the others stay as they are."""
    from hvd_ray.bench.report import plot_name, tiers_part, update_part, update_readme
    from hvd_ray.paper.report import paper_part

    parts = list(map(_part_of, results, own))
    plain = [(index, result) for index, result in enumerate(results) if parts[index] == "bench"]
    if plain:
        names = [plot_name(index, result) for index, result in plain]
        found = [plots.get(name) for name in names]
        links = [Path(os.path.relpath(p, readme.parent)).as_posix() if p else "" for p in found]
        update_readme(readme, [result for _, result in plain], images=links)
    if "tiers" in parts:
        chosen = [result for result, part in zip(results, parts, strict=True) if part == "tiers"]
        update_part(readme, "tiers", tiers_part(chosen))
    for name in ("paper", "paper-vllm"):
        papers = [
            paper_part(result, found)
            for result, found, part in zip(results, own, parts, strict=True)
            if part == name and found is not None
        ]
        if papers:
            update_part(readme, name, "\n".join(papers))


def _own_part(path: Path) -> Mapping[str, Any] | None:
    """What a suite has beside the bench's rows."""
    own = json.loads(path.read_text(encoding="utf-8")).get("paper")
    return own if isinstance(own, dict) else None


def _written(
    results: Sequence[BenchResult], own: Sequence[Mapping[str, Any] | None], out: Path
) -> list[Path]:
    from hvd_ray.bench.page import write_bench_page
    from hvd_ray.bench.report import write_report
    from hvd_ray.bench.result import check_writable
    from hvd_ray.home import atomic_path
    from hvd_ray.paper.report import MARKDOWN, own_markdown, paper_sections

    check_writable(out / "bench.md")
    written = write_report(results, out)
    pairs = list(zip(results, own, strict=True))
    more = [paper_sections(result, part) if part is not None else [] for result, part in pairs]
    write_bench_page(out / PAGE, results, more)
    written.append(out / PAGE)
    texts = [own_markdown(result, part) for result, part in pairs if part is not None]
    if texts:
        with atomic_path(out / MARKDOWN) as draft:
            draft.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
        written.append(out / MARKDOWN)
    return written


# -- the others -------------------------------------------------------------------------------


def _draw_sweep(folder: Path, *, as_json: bool) -> None:
    from hvd_ray.tuning.folder import SweepFolder
    from hvd_ray.tuning.page import write_page

    place = SweepFolder(folder)
    write_page(place.page, place.read_result())
    found = {"written": [str(place.page)]}
    print(json.dumps(found) if as_json else f"written: {place.page}")


def _transfer(
    labels: Path, traces: Path | None, out: Path | None, num_workers: int, *, as_json: bool
) -> None:
    from hvd_ray.commands.traces_progress import shown_progress
    from hvd_ray.commands.workers import bar, started_workers
    from hvd_ray.paper.transfer import read_kinds, transfer_json, transfer_markdown, transfer_table
    from hvd_ray.payoff.training_settings import TrainingSettings
    from hvd_ray.provenance import provenance

    kinds = read_kinds(labels, traces)
    settings = TrainingSettings(kind="survival")
    with (
        shown_progress("predictors") as progress,
        started_workers(num_workers, progress) as workers,
    ):
        told = bar(progress, "learning from each kind of work")
        cells = transfer_table(kinds.labels, kinds.groups, settings, workers=workers, on_done=told)
    about = provenance(labels=labels.name, groups=dict(kinds.groups), note=kinds.note)
    tree = transfer_json(cells, about)
    written = [] if out is None else _write_transfer(out, cells, tree, kinds.note)
    if kinds.note and (as_json or written):
        typer.echo(kinds.note, err=True)
    if as_json:
        print(json.dumps(tree, indent=2, allow_nan=False))
    elif written:
        print("\n".join(f"written: {path}" for path in written))
    else:
        print(transfer_markdown(cells, kinds.note))


def _write_transfer(
    out: Path, cells: Sequence[TransferCell], tree: Mapping[str, Any], note: str
) -> list[Path]:
    from hvd_ray.home import atomic_path
    from hvd_ray.paper.transfer import transfer_markdown, write_transfer_page

    texts = {
        out / "transfer.json": json.dumps(tree, indent=2, allow_nan=False) + "\n",
        out / "transfer.md": transfer_markdown(cells, note) + "\n",
    }
    for path, text in texts.items():
        with atomic_path(path) as draft:
            draft.write_text(text, encoding="utf-8")
    write_transfer_page(out / "transfer.html", cells, note)
    return [*texts, out / "transfer.html"]
