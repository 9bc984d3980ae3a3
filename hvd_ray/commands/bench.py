"""`hvd bench`: what each kind of speculative decoding brings, on your prompts and this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hvd_ray.commands.arguments import names_in, places, sorted_out
from hvd_ray.errors import UserError

if TYPE_CHECKING:
    from hvd_ray.bench.result import BenchResult
    from hvd_ray.bench.session import BenchOptions
    from hvd_ray.config import Config
    from hvd_ray.tracking import Tracker

EXAMPLE = (
    "Example: `hvd bench --systems suffix,hvd_tau --prompts mine.jsonl --max-tokens 128 "
    "--out result.json policy.tau=4`"
)

PROMPTS_DIR = Path("../shared/data/prompts")


def register(app: typer.Typer) -> None:
    app.command("bench", epilog=EXAMPLE)(bench)


def bench(
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE|NAME|KEY=VALUE]...",
            help="More prompt files or workloads, and settings such as policy.tau=4.",
        ),
    ] = None,
    systems: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Systems to compare, by comma; greedy always runs. Default: all of ngram, suffix, "
            "eagle3, eagle3_tree, rule_score, rule_match, hvd_tau, hvd_cost that can be built. "
            "With a slim model of the target: nested, self_spec; lossy: tiered, tiered_learned, "
            "cascade_chow, cascade_diff, cascade_opt, cascade_token_v3; or POLICY+VERIFICATION, "
            "such as hvd_cost+nested. Tiers that cannot pay here are refused unless "
            "tiers.is_forced=true. Rivals: hf_prompt_lookup, hf_assisted.",
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(metavar="FILE...", help="JSONL files of prompts.")
    ] = None,
    workloads: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Shipped workloads, by comma. Default: all.")
    ] = None,
    on_bad_line: Annotated[
        str, typer.Option(help="fail, or skip a malformed line of a prompt file and name it.")
    ] = "fail",
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="paper: all systems and rivals on every file of --prompts-dir, cold and warm. "
            "tiers: every use of a slim model, on four tasks with a score. Resumable; --out is "
            "the folder that is filled.",
        ),
    ] = None,
    prompts_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A suite's prompt files, one JSONL a workload; they are not shipped. Default: "
            "../shared/data/prompts.",
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="train, test or all, of files with splits.")] = "test",
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="At most N prompts of each workload.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Output tokens of a request. Default: 128; of --suite tiers more where a task's "
            "answers are longer, 320 of gsm8k and 256 of json_schema.",
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="For every prompt. Default: the prompt's own, or 0.")
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            help="cold (default): empty at the start of a workload; warm: filled with the outputs "
            "of its train prompts before; both (default of a suite)."
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32.")] = None,
    engine: Annotated[
        str, typer.Option(help="torch; or vllm: the plugin against vLLM's own speculation.")
    ] = "torch",
    concurrency: Annotated[
        str,
        typer.Option(
            metavar="N[,N...]",
            help="Requests served together, in vLLM; a suite takes several, and --limit then "
            "counts waves of so many prompts.",
        ),
    ] = "1",
    predictor: Annotated[
        str | None,
        typer.Option(
            metavar="REF",
            help="A folder or models:/NAME@ALIAS. Default: the champion, else what ships.",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --suite paper: processes, on Ray, for the replays after the measuring, "
            "which is done alone. Default: this one.",
        ),
    ] = None,
    untimed: Annotated[
        bool,
        typer.Option("--untimed", help="Others use the machine: leave times out of the reports."),
    ] = False,
    micro: Annotated[
        bool, typer.Option("--micro", help="Instead: the cost of one decision, in microseconds.")
    ] = False,
    track: Annotated[
        bool, typer.Option("--track", help="Keep the result as a run in MLflow, too: see hvd ui.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the JSON result there as well.")
    ] = None,
) -> None:
    """Measure systems against plain decoding, in turns, prompt by prompt, on the same prompts."""
    from hvd_ray.bench.result import check_writable
    from hvd_ray.bench.session import BenchOptions
    from hvd_ray.config import load_config
    from hvd_ray.systems import SYSTEMS

    names, settings = sorted_out(more or ())
    files, named = places(names, prompts=prompts or (), workloads=workloads)
    _refuse_unsuited(suite, prompts_dir, files, named, micro=micro, track=track)
    num_workers = _num_workers(workers, replays=suite == "paper" and engine == "torch")
    if out is not None and suite is None:
        check_writable(out)
    if dtype is not None:
        settings.append(f"dtype={dtype}")
    if predictor is not None:
        settings.append(f"policy.predictor={predictor}")
    if micro:
        if systems or files or named:
            raise UserError("--micro measures one decision: no --systems, --prompts, --workloads")
        _answer_micro(_micro(settings, config), as_json=as_json, out=out)
        return
    together = _concurrencies(concurrency, is_suite=suite is not None)
    options = BenchOptions(
        systems=names_in(systems),
        prompt_files=files,
        workloads=named,
        on_bad_line=on_bad_line,  # type: ignore[arg-type]  # checked there
        split=split,  # type: ignore[arg-type]
        limit=limit,
        max_tokens=max_tokens,
        temperature=temperature,
        cache=cache or ("both" if suite == "paper" and engine == "torch" else "cold"),  # type: ignore[arg-type]
        engine=engine,
        concurrency=max(together),
        is_timed=not untimed,
    )
    running = SYSTEMS if options.systems is None else options.systems
    loaded = load_config(config, settings, policies=running)
    if suite is not None:
        source = prompts_dir or PROMPTS_DIR
        if suite == "paper":
            _answer_suite(options, loaded, source, together, num_workers, as_json=as_json, out=out)
        else:
            _answer_tiers(options, loaded, source, as_json=as_json, out=out)
        return
    result = _measured(options, loaded, track=track)
    _answer(result, as_json=as_json, out=out)


def _measured(options: BenchOptions, config: Config, *, track: bool) -> BenchResult:
    from hvd_ray.bench.session import run_bench
    from hvd_ray.commands.traces_progress import shown_progress

    with shown_progress("requests") as progress:
        if not track:
            return run_bench(options, config, progress=progress)
        from hvd_ray.tracking import tracked

        with tracked(config, run_name="bench") as tracker:
            result = run_bench(options, config, progress=progress)
            _remember(result, tracker)
            return result


def _refuse_unsuited(
    suite: str | None,
    prompts_dir: Path | None,
    files: Sequence[Path],
    named: Sequence[str],
    *,
    micro: bool,
    track: bool,
) -> None:
    """What makes no sense together.

    Raises:
        UserError: naming it.
    """
    from hvd_ray.paper.suite import SUITES

    if suite is None:
        if prompts_dir is not None:
            raise UserError("--prompts-dir is for --suite; without it give --prompts FILE...")
        return
    if suite not in SUITES:
        raise UserError(f"--suite {suite!r}: unknown; there is {', '.join(SUITES)}")
    if files or named or micro or track:
        raise UserError(
            "--suite brings its own prompts: no --prompts, --workloads, --micro, --track"
        )


def _answer_suite(
    options: BenchOptions,
    config: Config,
    prompts_dir: Path,
    together: tuple[int, ...],
    num_workers: int,
    *,
    as_json: bool,
    out: Path | None,
) -> None:
    from rich.console import Console

    from hvd_ray.bench.terminal import terminal_report
    from hvd_ray.commands.traces_progress import shown_progress
    from hvd_ray.paper.report import write_paper
    from hvd_ray.paper.suite import RESULT, run_suite, suite_options
    from hvd_ray.paper.vllm_suite import Loaded, run_vllm_suite

    folder = Path("paper") if out is None else out
    suited = suite_options(
        options,
        prompts_dir=prompts_dir,
        out=folder,
        concurrencies=together,
        num_workers=num_workers,
    )
    with shown_progress("requests") as progress:
        if options.engine == "vllm":
            found = run_vllm_suite(suited, config, progress=progress)
        else:
            found = [Loaded(folder, *run_suite(suited, config, progress=progress))]
    written = []
    for one in found:
        written += [one.folder / RESULT, *write_paper(one.folder, one.result, one.own)]
    if as_json:
        trees = [{**one.result.as_json(), "paper": one.own} for one in found]
        print(json.dumps(trees if len(trees) > 1 else trees[0], indent=2, allow_nan=False))
        return
    for one in found:
        Console().print(terminal_report(one.result))
    print("\n".join(f"written: {path}" for path in written))


def _num_workers(given: int | None, *, replays: bool) -> int:
    if given is not None and not replays:
        raise UserError("--workers is for --suite paper with the torch engine, which replays")
    if given is not None and given < 1:
        raise UserError(f"--workers must be 1 or more, got {given}")
    return given or 1


def _concurrencies(given: str, *, is_suite: bool) -> tuple[int, ...]:
    """What stands in `--concurrency`.

    Raises:
        UserError: no whole numbers, one of them twice, or several without a suite.
    """
    parts = given.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UserError(f"--concurrency must be numbers by comma, e.g. 1,8, got {given!r}")
    numbers = tuple(int(part) for part in parts)
    if len(set(numbers)) < len(numbers):
        raise UserError(f"--concurrency {given}: a number stands there twice")
    if len(numbers) > 1 and not is_suite:
        raise UserError(f"--concurrency {given}: several are for --suite paper; give one")
    return numbers


def _answer_tiers(
    options: BenchOptions,
    config: Config,
    prompts_dir: Path,
    *,
    as_json: bool,
    out: Path | None,
) -> None:
    from hvd_ray.bench.tier_report import tier_summary_text
    from hvd_ray.commands.traces_progress import shown_progress
    from hvd_ray.paper.tier_suite import RESULT, run_tiers, tier_options

    folder = Path("tiers") if out is None else out
    suited = tier_options(options, prompts_dir=prompts_dir)
    with shown_progress("requests") as progress:
        result = run_tiers(suited, config, out=folder, progress=progress)
    if as_json:
        print(json.dumps(result.as_json(), indent=2, allow_nan=False))
        return
    print(tier_summary_text(result))
    print(f"written: {folder / RESULT}")


def _remember(result: BenchResult, tracker: Tracker) -> None:
    """The run in MLflow: where it comes from, the figures over all workloads, the whole result."""
    tracker.log_params(result.provenance)
    for row in result.aggregate:
        clocked = ("speedup_vs_greedy",) if result.is_timed else ()
        names = (*clocked, "emitted_per_pass", "identical_to_greedy")
        figures = {f"{row.system}/{row.cache}/{name}": getattr(row, name) for name in names}
        tracker.log_metrics(figures)
    with TemporaryDirectory() as folder:
        result.write(Path(folder) / "result.json")
        tracker.log_artifacts(Path(folder))


def _answer(result: BenchResult, *, as_json: bool, out: Path | None) -> None:
    from rich.console import Console

    from hvd_ray.bench.terminal import terminal_report

    if out is not None:
        result.write(out)
    if as_json:
        print(json.dumps(result.as_json(), indent=2, allow_nan=False))
        return
    Console().print(terminal_report(result))
    if out is not None:
        print(f"written: {out}")


def _micro(settings: Sequence[str], config_file: Path | None) -> dict[str, Any]:
    """The micro figures, with the champion or, without one, a predictor of the same shape."""
    from hvd_ray.bench.micro import DEFINITIONS, micro_figures, untrained_predictor
    from hvd_ray.bench.plan import encode_prompt
    from hvd_ray.bench.workloads import load_shipped
    from hvd_ray.config import load_config
    from hvd_ray.parts.payoff import feature_extractor, find_payoff
    from hvd_ray.payoff.predictor import PayoffPredictor
    from hvd_ray.pipelines.collect import open_target
    from hvd_ray.provenance import provenance

    config = load_config(config_file, settings, policies=["hvd_tau"])
    predictor: PayoffPredictor = untrained_predictor()
    facts: dict[str, Any] = {"predictor": "untrained, of the same shape"}
    try:
        payoff = find_payoff(config)
    except UserError:
        if config.policy.predictor is not None:
            raise
    else:
        predictor, facts = payoff.predictor, payoff.facts
    codec, target = open_target(config)
    vocab_size = target.capabilities.vocab_size
    figures = micro_figures(
        [encode_prompt(prompt, codec) for prompt in load_shipped().prompts],
        predictor=predictor,
        extractor=feature_extractor(
            codec, vocab_size=vocab_size, tokenizer_sha=target.tokenizer_sha
        ),
        config=config,
    )
    return {**figures, "definitions": DEFINITIONS, "provenance": provenance(config=config, **facts)}


def _answer_micro(figures: dict[str, Any], *, as_json: bool, out: Path | None) -> None:
    from hvd_ray.home import atomic_path

    text = json.dumps(figures, indent=2, allow_nan=False)
    if out is not None:
        with atomic_path(out) as draft:
            draft.write_text(text + "\n", encoding="utf-8")
    if as_json:
        print(text)
        return
    for name in (
        "decision",
        "decision_p99",
        "lookup",
        "features",
        "predictor",
        "predictor_batch",
        "plugin_step",
        "observe",
    ):
        print(f"{name:15} {_in_us(figures[f'{name}_us'])}")
    for name, word in (("label", "labelling"), ("replay", "replay")):
        print(f"{word:16}{figures[f'{name}_positions_per_second_per_core']:,} positions/s a core")
    print(f"predictor       {figures['provenance']['predictor']}")
    if out is not None:
        print(f"written: {out}")


def _in_us(value: float | dict[str, float]) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{us:,.1f} us for {size}" for size, us in value.items())
    return f"{value:,.1f} us"
