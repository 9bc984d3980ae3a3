"""`hvd slim gate`: train a gate on recordings, judge it on others, keep it with the slim model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvd_ray.config import Config
from hvd_ray.pipelines.shards import RunProgress
from hvd_ray.provenance import provenance
from hvd_ray.systems import find_slim, load_engine
from hvd_ray.traces.store import read_traces, refuse_unknown_tokens
from hvd_ray.tracking import tracked
from hvd_ray.tuning.slim import record
from hvd_ray.verify.gate import LearnedGate
from hvd_ray.verify.gate_file import GateCard, write_gate
from hvd_ray.verify.gate_training import examples_of, train_gate
from hvd_ray.verify.slim_file import Escalation
from hvd_ray.verify.slim_window import Window, split_window

THETAS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99)


@dataclass(frozen=True, slots=True)
class GateOptions:
    """What is read and written; each field is a flag of `hvd slim gate`."""

    traces: Path
    out: Path
    num_tokens: int = 12_000


def run_gate_training(
    options: GateOptions, config: Config, *, progress: RunProgress
) -> dict[str, Any]:
    """Train, judge, write and track.

    Returns:
        The figures on held-out recordings.

    Raises:
        UserError: no slim model, or no usable traces.
    """
    slim = find_slim(config)
    progress.stage(f"reading the traces in {options.traces}")
    recordings = record(read_traces(options.traces), config, num_tokens=options.num_tokens)
    progress.stage(f"loading {config.model} ({config.dtype})")
    engine, _ = load_engine(config)
    refuse_unknown_tokens(options.traces, num_token_ids=engine.capabilities.vocab_size)
    learn, held = split_window(recordings)
    progress.stage("reading what target and slim model say")
    examples = examples_of(Window(engine, tuple(learn)).views(slim.layers))
    progress.stage("training")
    gate = LearnedGate(train_gate(examples, seed=config.seed))
    gates = [replace(gate, theta=theta) for theta in THETAS]
    tallies = Window(engine, tuple(held)).tallies(slim.layers, gates)
    curve = [
        {"theta": theta, "escalated": round(t.escalated, 4), "wrong_rate": round(t.wrong_rate, 4)}
        for theta, t in zip(THETAS, tallies, strict=True)
    ]
    about = provenance(config=config, examples=len(examples), curve=curve)
    card = GateCard(
        slim=slim.key,
        weights_sha256="",
        figures={"num_blocks": tallies[0].num_blocks, "num_examples": len(examples)},
        escalation=Escalation(theta=THETAS, escalated=tuple(t.escalated for t in tallies)),
        provenance=about,
    )
    write_gate(options.out, gate.network, card)
    with tracked(config, run_name="slim-gate") as tracker:
        tracker.log_params(about)
        tracker.log_metrics({f"wrong_at_{c['theta']}": c["wrong_rate"] for c in curve})
        tracker.log_artifacts(options.out)
    return {"curve": curve, "examples": len(examples), "num_blocks": tallies[0].num_blocks}
