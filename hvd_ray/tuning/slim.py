"""`hvd slim search`: candidates by every method, judged on recordings that no search has seen."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvd_ray.config import Config
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.engines.slim import SlimLayers
from hvd_ray.engines.torch_engine import TorchEngine
from hvd_ray.errors import UserError
from hvd_ray.fetch import model_fingerprint, resolve_model
from hvd_ray.home import atomic_path
from hvd_ray.pipelines.output import claimed
from hvd_ray.pipelines.shards import RunProgress
from hvd_ray.provenance import provenance
from hvd_ray.systems import load_engine
from hvd_ray.traces.schema import Trace, cut_at_loop
from hvd_ray.traces.store import read_traces, refuse_unknown_tokens
from hvd_ray.traces.walk import accepted_len, in_time_order, walking
from hvd_ray.tracking import tracked
from hvd_ray.tuning.slim_trials import Searched, run_slim_trials
from hvd_ray.verify.slim_file import Escalation, SlimFile, read_slim, write_slim
from hvd_ray.verify.slim_search import (
    THETAS,
    Method,
    SublayerCosts,
    best_layers,
    best_sublayers,
    measure_sublayers,
    num_skipped,
    sweep_gates,
    wrong_accepts,
)
from hvd_ray.verify.slim_window import Block, Recorded, Tally, Window, split_window, within

METHODS: tuple[Method, ...] = ("prefix", "dp", "knapsack", "dimr", "ours")
RECORDINGS, RESULT, SLIM = "recordings.json", "search.json", "slim.json"
MIN_RECORDINGS, MIN_OUTPUT_TOKENS = 4, 8
FEW_BLOCKS = 50
"""Held-out blocks below which a share near one half is known to 14 points or worse (95 %)."""


@dataclass(frozen=True, slots=True)
class SlimOptions:
    """What a search reads, writes and aims at; each field is a flag of `hvd slim search`.

    Raises:
        UserError: a value is out of range.
    """

    traces: Path
    out: Path
    skip_ratio: float = 0.45
    methods: tuple[Method, ...] = METHODS
    num_trials: int = 48
    num_tokens: int = 4000
    """Of the recordings, prompts included."""
    max_escalated: float = 0.3
    """At what share of escalated blocks wrong accepts are counted."""
    concurrency: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.skip_ratio < 1:
            raise UserError(f"--skip must be above 0 and below 1, got {self.skip_ratio}")
        if not self.methods:
            raise UserError(f"--methods names none; choose from {', '.join(METHODS)}")
        if unknown := [method for method in self.methods if method not in METHODS]:
            raise UserError(f"method {unknown[0]!r}: unknown; choose from {', '.join(METHODS)}")
        if not 0 <= self.max_escalated <= 1:
            raise UserError(f"--escalated must be from 0 to 1, got {self.max_escalated}")
        counts = {"trials": self.num_trials, "tokens": self.num_tokens}
        for flag, value in {**counts, "concurrency": self.concurrency}.items():
            if value < 1:
                raise UserError(f"--{flag} must be 1 or more, got {value}")


def run_slim_search(
    options: SlimOptions, config: Config, *, progress: RunProgress
) -> dict[str, Any]:
    """Search, judge, write and track; the best of the methods becomes `slim.json`.

    Returns:
        What `search.json` holds, and `warning` where the result is little to go by.

    Raises:
        UserError: no usable traces, the target has no layers to skip, another run or other
            settings in the folder: nothing has been written then. The store fails.
    """
    progress.stage(f"reading the traces in {options.traces}")
    recordings = record(read_traces(options.traces), config, num_tokens=options.num_tokens)
    progress.stage(f"loading {config.model} ({config.dtype})")
    engine, _ = load_engine(config)
    refuse_unknown_tokens(options.traces, num_token_ids=engine.capabilities.vocab_size)
    _require_slim(engine)
    search, held = split_window(recordings)
    with claimed(options.out, _settings(options, config, recordings)) as folder:
        save_recordings(options.out / RECORDINGS, search)
        progress.stage("reading what the target says")
        window, judge = Window(engine, tuple(search)), Window(engine, tuple(held))
        costs = measure_sublayers(window)
        found = _candidates(options, config, window, costs, progress)
        progress.stage("judging on held-out recordings")
        rows = [_row(method, slim, judge, costs, options) for method, slim in found.items()]
        result = _keep(rows, found, judge, options, config, costs)
        folder.finish({"best": result["best"]}, about=result["provenance"])
    return result | warning_of(result, options, config)


def _settings(
    options: SlimOptions, config: Config, recordings: Sequence[Recorded]
) -> dict[str, Any]:
    """What decides a search's result, but for what the clock says of sublayers."""
    tokens = b"".join(recorded.token_ids.tobytes() for recorded in recordings)
    return {
        "model": config.model,
        "dtype": config.dtype,
        "seed": config.seed,
        "skip": options.skip_ratio,
        "methods": ",".join(options.methods),
        "trials": options.num_trials,
        "escalated": options.max_escalated,
        "recordings": hashlib.sha256(tokens).hexdigest()[:16],
        "suffix": config.drafting.suffix.for_rules().model_dump(mode="json"),
    }


def warning_of(result: Mapping[str, Any], options: SlimOptions, config: Config) -> dict[str, str]:
    """`warning` in one line, where the best was judged on little or is bad; else nothing."""
    best = next(row for row in result["rows"] if row["method"] == result["best"])
    num_blocks, wrong = result["provenance"]["held_out_blocks"], best["wrong_accepts"]
    said = []
    if num_blocks < FEW_BLOCKS:
        said.append(f"{num_blocks} held-out blocks are few to judge by, record more traces")
    if wrong > config.tiers.max_miss_rate:
        said.append(
            f"{wrong:.1%} of its unchecked tokens are wrong with {options.max_escalated:.0%} of "
            f"the blocks escalated, over tiers.max_miss_rate={config.tiers.max_miss_rate:g}"
        )
    return {"warning": f"{best['method']}: {'; '.join(said)}"} if said else {}


def record(traces: Sequence[Trace], config: Config, *, num_tokens: int) -> list[Recorded]:
    """Greedy outputs of no test prompt, shortest prompts first, with the cache's drafts.

    The drafts are those of decoding that verifies every one, in the order of the recordings.

    Raises:
        UserError: there are too few.
    """
    left_out: Counter[str] = Counter()
    usable = []
    for trace in map(cut_at_loop, in_time_order(list(traces))):
        why = _unusable(trace)
        if why is None:
            usable.append(trace)
        else:
            left_out[why] += 1
    drafter = SuffixDrafter(config.drafting.suffix.for_rules())
    recordings = [_recorded(trace, drafter) for trace in usable]
    drafted = [recorded for recorded in recordings if recorded.blocks]
    left_out["the cache drafts nothing for them"] = len(recordings) - len(drafted)
    chosen = within(sorted(drafted, key=lambda r: len(r.token_ids)), num_tokens)
    left_out[f"beyond --tokens {num_tokens}"] = len(drafted) - len(chosen)
    if len(chosen) < MIN_RECORDINGS:
        raise UserError(_too_few(len(chosen), left_out))
    return chosen


def _unusable(trace: Trace) -> str | None:
    """Why a trace, cut where it loops, says nothing of greedy outputs; None: it does."""
    if trace.error is not None:
        return "failed"
    if trace.split == "test":
        return "of the test split"
    if not trace.sampling.is_greedy:
        return "sampled at a temperature"
    if len(trace.output_token_ids) < MIN_OUTPUT_TOKENS:
        return f"under {MIN_OUTPUT_TOKENS} output tokens before any loop"
    return None


def _too_few(num_chosen: int, left_out: Counter[str]) -> str:
    """One line: how many there are, where the others went, and what makes more."""
    whys = ", ".join(f"{count} {why}" for why, count in left_out.most_common() if count)
    kept = "1 trace is" if num_chosen == 1 else f"{num_chosen} traces are"
    return (
        f"{kept} usable, at least {MIN_RECORDINGS} are needed (left out: {whys or 'none'}); make "
        "more with `hvd traces collect --split train --temperature 0 --out MORE`, and more "
        "--workloads or a larger --max-tokens"
    )


def _recorded(trace: Trace, drafter: SuffixDrafter) -> Recorded:
    output, blocks = trace.output_token_ids, []
    with walking(trace, drafter) as walk:
        position = 0
        while position < len(output):
            draft = walk.look_up()
            if draft.token_ids:
                blocks.append(Block(position, draft))
            step = accepted_len(draft, output, position) + 1
            walk.commit(output[position : position + step])
            position += step
    token_ids = np.array([*trace.prompt_token_ids, *output], np.int32)
    return Recorded(token_ids, len(trace.prompt_token_ids), tuple(blocks))


def save_recordings(path: Path, recordings: Sequence[Recorded]) -> None:
    """For the trials' workers."""
    rows = [
        {
            "token_ids": recorded.token_ids.tolist(),
            "prompt_len": recorded.prompt_len,
            "blocks": [
                [block.position, block.draft.token_ids, block.draft.probs]
                for block in recorded.blocks
            ],
        }
        for recorded in recordings
    ]
    with atomic_path(path) as draft:
        draft.write_text(json.dumps(rows), encoding="utf-8")


def _require_slim(engine: TorchEngine) -> None:
    if not engine.capabilities.can_slim:
        kind = engine.model.config.model_type
        raise UserError(f"a target of type {kind!r} has no layers that can be skipped one by one")


def _candidates(
    options: SlimOptions,
    config: Config,
    window: Window,
    costs: SublayerCosts,
    progress: RunProgress,
) -> dict[Method, SlimLayers]:
    """One slim model for each method, all of (about) the same cost."""
    num_layers, skip_ratio = window.num_layers, options.skip_ratio
    kept = num_layers - num_skipped(num_layers, skip_ratio)
    prefix = SlimLayers.prefix(kept, num_layers=num_layers)
    max_ratio = costs.ratio(prefix)
    found: dict[Method, SlimLayers] = {}
    for method in options.methods:
        progress.stage(f"searching: {method}")
        if method == "prefix":
            found[method] = prefix
        elif method == "dp":
            found[method] = best_layers(window, skip_ratio=skip_ratio)
        elif method == "knapsack":
            found[method] = best_sublayers(window, costs=costs, max_ratio=max_ratio)
        else:
            searched = Searched(
                method=method,
                folder=str(options.out.absolute()),
                config=config.model_dump(mode="json"),
                num_layers=num_layers,
                skip_ratio=skip_ratio,
                max_ratio=max_ratio,
                max_escalated=options.max_escalated,
                costs=asdict(costs),
                start=tuple(found.values()),
            )
            found[method] = run_slim_trials(
                searched,
                num_trials=options.num_trials,
                concurrency=options.concurrency,
                seed=config.seed,
                progress=progress,
            )
    return found


def _row(
    method: Method, slim: SlimLayers, judge: Window, costs: SublayerCosts, options: SlimOptions
) -> dict[str, Any]:
    """A method's figures on held-out recordings."""
    tallies = sweep_gates(judge, slim)
    return {
        "method": method,
        "skip_ratio": round(slim.skip_ratio, 4),
        "cost_ratio": round(costs.ratio(slim), 4),
        "agreement": round(tallies[0].agreement, 4),
        "log_margin": round(tallies[0].mean_log_margin, 4),
        "wrong_accepts": round(wrong_accepts(tallies, max_escalated=options.max_escalated), 4),
        "curve": [
            _point(theta, tally, costs.ratio(slim))
            for theta, tally in zip(THETAS, tallies, strict=True)
        ],
        "skipped_attention": sorted(slim.skipped_attention),
        "skipped_mlp": sorted(slim.skipped_mlp),
    }


def _point(theta: float, tally: Tally, cost_ratio: float) -> dict[str, float]:
    return {
        "theta_escalate": theta,
        "escalated": round(tally.escalated, 4),
        "wrong_rate": round(tally.wrong_rate, 4),
        "committed_per_block": round(tally.num_committed / max(1, tally.num_blocks), 4),
        "speed_vs_full": round(tally.speed_vs_full(cost_ratio), 4),
    }


def _keep(
    rows: list[dict[str, Any]],
    found: Mapping[Method, SlimLayers],
    judge: Window,
    options: SlimOptions,
    config: Config,
    costs: SublayerCosts,
) -> dict[str, Any]:
    best = min(rows, key=lambda row: (row["wrong_accepts"], -row["agreement"]))
    about = provenance(
        config=config,
        skip_ratio=options.skip_ratio,
        num_trials=options.num_trials,
        held_out_rows=judge.num_rows,
        held_out_blocks=sum(len(recorded.blocks) for recorded in judge.recordings),
        sublayer_ms=asdict(costs),
    )
    fingerprint = model_fingerprint(resolve_model(config.model).path_or_id)
    for row in rows:
        slim = slim_file(row, found[row["method"]], model=fingerprint, about=about)
        write_slim(options.out / f"slim-{row['method']}.json", slim)
        if row is best:
            write_slim(options.out / SLIM, slim)
    result = {"best": best["method"], "rows": rows, "provenance": about}
    with atomic_path(options.out / RESULT) as draft:
        draft.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    with tracked(config, run_name="slim-search") as tracker:
        tracker.log_params(about)
        for row in rows:
            names = ("cost_ratio", "agreement", "log_margin", "wrong_accepts")
            tracker.log_metrics({f"{row['method']}/{name}": row[name] for name in names})
        tracker.log_artifacts(options.out)
    return result


def slim_file(
    row: Mapping[str, Any], slim: SlimLayers, *, model: str, about: Mapping[str, Any]
) -> SlimFile:
    """A candidate as it is kept."""
    names = ("skip_ratio", "cost_ratio", "agreement", "log_margin", "wrong_accepts")
    return SlimFile(
        model=model,
        num_layers=slim.num_layers,
        skipped_attention=tuple(sorted(slim.skipped_attention)),
        skipped_mlp=tuple(sorted(slim.skipped_mlp)),
        method=row["method"],
        figures={name: row[name] for name in names},
        escalation=Escalation(
            theta=tuple(point["theta_escalate"] for point in row["curve"]),
            escalated=tuple(point["escalated"] for point in row["curve"]),
        ),
        provenance=dict(about),
    )


def read_search(folder: Path) -> dict[str, Any]:
    """What a search has written into its folder, and how many layers its target has.

    Raises:
        UserError: nothing readable is there, or what another version wrote.
    """
    path = folder / RESULT
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _check_search(found)
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{path}: no result of this version's `hvd slim search` (without {error}); search again"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: no result of `hvd slim search` ({error})") from None
    return found | {"num_layers": read_slim(folder / SLIM).num_layers}


def _check_search(found: Mapping[str, Any]) -> None:
    """Touch what `frontier_curves` needs.

    Raises:
        KeyError, TypeError, ValueError: it is not there.
    """
    SublayerCosts(**found["provenance"]["sublayer_ms"])
    if found["best"] not in [row["method"] for row in found["rows"]]:
        raise ValueError(f"no row of the best method, {found['best']!r}")
    for row in found["rows"]:
        frozenset(row["skipped_attention"]), frozenset(row["skipped_mlp"])
        float(row["skip_ratio"])
        for point in row["curve"]:
            for name in ("escalated", "wrong_rate", "speed_vs_full"):
                float(point[name])


def frontier_curves(
    searches: Sequence[Mapping[str, Any]], *, every_method: bool = False
) -> dict[str, list[dict[str, float]]]:
    """The curves over thresholds of each search's best method, or of all, by label.

    A slim pass costs what the sublayers did that the first search timed: another run's clock
    would move its curve against the others.
    """
    costs = SublayerCosts(**searches[0]["provenance"]["sublayer_ms"])
    return {
        f"{row['method']}, {row['skip_ratio']:.0%} skipped": _at_costs(row, costs, found)
        for found in searches
        for row in found["rows"]
        if every_method or row["method"] == found["best"]
    }


def _at_costs(
    row: Mapping[str, Any], costs: SublayerCosts, found: Mapping[str, Any]
) -> list[dict[str, float]]:
    timed = found["provenance"]["sublayer_ms"]
    layers = {kind: frozenset(row[f"skipped_{kind}"]) for kind in ("attention", "mlp")}
    slim = SlimLayers(found["num_layers"], layers["attention"], layers["mlp"])
    before, now = SublayerCosts(**timed).ratio(slim), costs.ratio(slim)
    return [
        {
            **point,
            "speed_vs_full": point["speed_vs_full"]
            * (before + point["escalated"])
            / (now + point["escalated"]),
        }
        for point in row["curve"]
    ]
