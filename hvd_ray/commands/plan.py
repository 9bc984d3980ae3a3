"""`hvd plan`: time, memory, disk and cost of the pipeline on so many workers."""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hvd_ray.scaling.plan import Plan

EXAMPLE = "Example: `hvd plan --tokens 1e9 --workers 64 --largest-tenant 0.5 --price 1.20`"
CURVE = (1, 2, 4, 8, 16, 32, 64, 256)
MAX_TOKENS = 10**15
MAX_WORKERS = 100_000
MAX_PIECES = 4 * MAX_WORKERS
"""The simulation draws every shard."""
USUAL_TRACE_TOKENS = 128
LEGEND = (
    "busy: of the workers' time after their start; hours: workers times time, of which --price is "
    "the price\na worker, driver: the memory that each needs"
)


def register(app: typer.Typer) -> None:
    app.command("plan", epilog=EXAMPLE)(plan)


def _count(most: int, **about: Any) -> Any:
    return typer.Option(metavar="N", min=1, max=most, **about)


def _amount(*, least: float = 0.001, metavar: str = "N", **about: Any) -> Any:
    return typer.Option(metavar=metavar, min=least, max=10**9, **about)


def plan(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Costs of your own, e.g. collect.token_us=400."
        ),
    ] = None,
    tokens: Annotated[
        int,
        _count(
            MAX_TOKENS,
            help="Output tokens to trace and label, e.g. 1e9.",
            show_default="1e6",
        ),
    ] = 1_000_000,
    workers: Annotated[int, _count(MAX_WORKERS, help="Workers of every stage.")] = 4,
    cores: Annotated[
        int | None, _count(MAX_PIECES, help="Cores under them. Default: one each.")
    ] = None,
    shards: Annotated[
        int | None, _count(MAX_PIECES, help="Shards. Default: four a worker.")
    ] = None,
    trace_tokens: Annotated[
        int | None, _count(MAX_TOKENS, help="Output tokens of a trace. Default: 128.")
    ] = None,
    session_traces: Annotated[int, _count(MAX_TOKENS, help="Traces of a session.")] = 4,
    largest_tenant: Annotated[
        float, typer.Option(metavar="SHARE", help="One tenant's share of the traffic, e.g. 0.5.")
    ] = 0.0,
    trials: Annotated[int, _count(MAX_WORKERS, help="Trials of the sweep.")] = 64,
    storage_mb_s: Annotated[
        float | None, _amount(help="What the shared storage takes. Default: all.")
    ] = None,
    memory_gb: Annotated[
        float, _amount(help="Memory of a worker and of the driver: warn beyond.")
    ] = 64.0,
    price: Annotated[
        float | None, _amount(least=0, metavar="X", help="Of one worker for an hour.")
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Stage costs. Default: those measured for hvd, on a CPU."
        ),
    ] = None,
    curve: Annotated[
        bool, typer.Option("--curve", help="Also times for 1 to 256 workers.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout.")] = False,
) -> None:
    """Simulate collect, label, train and tune from measured stage costs."""
    from hvd_ray.scaling.costs import load_stage_costs
    from hvd_ray.scaling.load import Load
    from hvd_ray.scaling.model import Machines
    from hvd_ray.scaling.plan import Plan

    planned = Plan(
        load_stage_costs(costs, tuple(settings or ())),
        Load(
            tokens,
            trace_tokens=trace_tokens or min(USUAL_TRACE_TOKENS, tokens),
            session_traces=session_traces,
            largest_tenant=largest_tenant,
        ),
        Machines(workers, cores, float("inf") if storage_mb_s is None else storage_mb_s),
        num_shards=shards,
        num_trials=trials,
    )
    if as_json:
        found = planned.as_json()
        if curve:
            found["curve"] = _curve(planned)
        print(json.dumps(found, allow_nan=False))
        return
    _show(planned, price=price, memory_gb=memory_gb, with_curve=curve)


def _curve(planned: Plan) -> dict[str, dict[str, float]]:
    from hvd_ray.scaling.costs import STAGES

    return {
        name: {str(workers): planned.with_workers(workers).stage(name).seconds for workers in CURVE}
        for name in STAGES
    }


def _show(planned: Plan, *, price: float | None, memory_gb: float, with_curve: bool) -> None:
    from rich.console import Console

    from hvd_ray.scaling.costs import STAGES

    console = Console(highlight=False)
    console.print(_stages_table(planned, price))
    console.print(LEGEND)
    if with_curve:
        console.print(_curve_table(planned))
    console.print("Where it stops scaling (twice the workers less than 1.25 times as fast):")
    for name in STAGES:
        limit = planned.limit(name)
        console.print(f"  {name:8} {limit.num_workers:,} workers: {limit.reason}")
    for line in (*_skew(planned), *_too_large(planned, memory_gb), *_source(planned)):
        console.print(line)


def _stages_table(planned: Plan, price: float | None) -> Any:
    from hvd_ray.scaling.costs import STAGES

    load = planned.load
    title = f"{load.num_tokens:,} tokens in {load.num_traces:,} traces, {_machines(planned)}"
    table = _compact_table(title)
    headings = ["workers", "time", "busy", "a worker", "driver", "disk", "hours"]
    for heading in [*headings, *([] if price is None else ["cost"])]:
        table.add_column(heading, justify="right", no_wrap=True)
    for name in STAGES:
        stage = planned.stage(name)
        cost = [] if price is None else [f"{stage.worker_hours * price:,.0f}"]
        table.add_row(
            *(name, f"{stage.num_used:,}", time_text(stage.seconds), f"{stage.busy_share:.0%}"),
            *(size_text(stage.worker_mb), size_text(stage.driver_mb), size_text(stage.disk_mb)),
            *(f"{stage.worker_hours:,.1f}", *cost),
        )
    return table


def _compact_table(title: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
    )
    table.add_column("stage", no_wrap=True)
    return table


def _curve_table(planned: Plan) -> Any:
    table = _compact_table("Time by workers")
    for workers in CURVE:
        table.add_column(str(workers), justify="right", no_wrap=True)
    for name, row in _curve(planned).items():
        table.add_row(name, *(time_text(seconds) for seconds in row.values()))
    return table


def _machines(planned: Plan) -> str:
    machines = planned.machines
    cores = "" if machines.num_cores is None else f" on {machines.num_cores} cores"
    return f"{machines.num_workers:,} workers{cores}"


def _skew(planned: Plan) -> list[str]:
    """What one large tenant does, dealt as the pipelines deal and by tenant alone."""
    from dataclasses import replace

    share = planned.load.largest_tenant
    if not share:
        return []
    lines = [f"One tenant with {share:.0%} of the traffic, labelling:"]
    for dealt_by, text in (
        ("session", "sessions dealt to shards, as here"),
        ("tenant", "were tenants never split"),
    ):
        stage = replace(planned, dealt_by=dealt_by).stage("label")  # type: ignore[arg-type]
        lines.append(
            f"  {text}: {time_text(stage.seconds)}, largest shard "
            f"{stage.largest_shard:.1%}, busy {stage.busy_share:.0%}"
        )
    return lines


def _too_large(planned: Plan, memory_gb: float) -> list[str]:
    from hvd_ray.scaling.costs import STAGES

    lines = []
    for name in STAGES:
        stage, is_dealt = planned.stage(name), planned.costs.of(name).work == "shards"
        for who, need_mb in (("a worker", stage.worker_mb), ("the driver", stage.driver_mb)):
            if need_mb <= memory_gb * 1000:
                continue
            way = _way_out(name, who, share=need_mb / (memory_gb * 1000), is_dealt=is_dealt)
            need = size_text(need_mb)
            lines.append(f"Careful: {name}: {who} needs {need} and has {memory_gb:g} GB; {way}")
    return lines


def _way_out(name: str, who: str, *, share: float, is_dealt: bool) -> str:
    """What to type instead; `share` is how many times too much it is (jobs/README.md)."""
    num_parts = ceil(share)
    if not is_dealt:
        return f"label 1 in {num_parts:,} of the traces' files and learn from that (jobs/README.md)"
    if who == "a worker":
        return "use more --shards"
    what = {"collect": "the prompts", "label": "the traces' files"}[name]
    return f"{name} {what} in {num_parts:,} parts, each with an --out of its own (jobs/README.md)"


def _source(planned: Plan) -> list[str]:
    about = planned.costs.provenance
    facts = [str(about[key]) for key in ("model", "dtype", "cpu") if key in about]
    facts += [str(about["created_at"])[:10]] if "created_at" in about else []
    lines = [f"Simulated from stage costs: {', '.join(facts) or 'without provenance'}."]
    if about.get("device") == "cpu":
        lines.append(
            "Those are of one small model on a CPU: for another model or a GPU collecting takes "
            "other times, give your own (collect.token_us=..., or --costs FILE)."
        )
    return lines


def time_text(seconds: float) -> str:
    """`45 s`, `3.2 min`, `5.1 h` or `12 d`."""
    for least, whole, unit in ((3 * 86400, 86400, "d"), (5400, 3600, "h"), (90, 60, "min")):
        if seconds >= least:
            count = seconds / whole
            return f"{count:,.0f} {unit}" if count >= 100 else f"{count:.1f} {unit}"
    return f"{seconds:,.0f} s"


def size_text(size_mb: float) -> str:
    """`45 MB`, `3.2 GB` or `1.1 TB`."""
    if size_mb >= 1e6:
        return f"{size_mb / 1e6:,.1f} TB"
    return f"{size_mb / 1e3:,.1f} GB" if size_mb >= 1e3 else f"{size_mb:,.0f} MB"
