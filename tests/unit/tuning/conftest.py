"""Small traces with something to draft from, their labels, and what a trial is given."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_ray.config import SuffixConfig
from hvd_ray.engines.toy import ToyCodec
from hvd_ray.payoff.features import FeatureExtractor
from hvd_ray.payoff.token_classes import TokenClasses
from hvd_ray.pipelines.labelling import plan_labels
from hvd_ray.pipelines.output import claimed
from hvd_ray.traces.label import label_shard
from hvd_ray.traces.schema import Trace
from hvd_ray.traces.store import write_table, write_traces
from hvd_ray.types import SamplingParams

START = datetime(2026, 1, 1, tzinfo=UTC)
VOCAB = 27
NUM_SHARDS = 2


def phrase_trace(number: int, *, workload: str, split: str, seed: int = 0) -> Trace:
    """A trace of stock phrases with other words in between; two traces make a session."""
    rng = np.random.default_rng([seed, number, len(workload)])
    book = np.random.default_rng(7).integers(1, VOCAB, (5, 12))
    pieces: list[int] = []
    while len(pieces) < 60:
        noise = rng.integers(1, VOCAB, int(rng.integers(1, 9 if workload == "chat" else 3)))
        pieces += [*book[rng.integers(0, 5)].tolist(), *noise.tolist()]
    return Trace(
        trace_id=f"{workload}-{number}",
        prompt_id=str(number),
        workload=workload,
        family="test",
        scope="default",
        session_id=f"{workload}-{number // 2}",
        created_at=START + timedelta(minutes=number),
        model="toy",
        tokenizer_sha="letters",
        prompt_token_ids=tuple(rng.integers(1, VOCAB, 20).tolist()),
        output_token_ids=tuple(pieces[:60]),
        finish_reason="length",
        sampling=SamplingParams(max_tokens=60),
        context_length=512,
        split=split,
    )


def phrase_traces(num_sessions: int = 9) -> list[Trace]:
    """Two workloads; the last third of the sessions is the test split."""
    return [
        phrase_trace(
            2 * session + part,
            workload=workload,
            split="train" if session < 2 * num_sessions // 3 else "test",
        )
        for workload in ("chat", "tools")
        for session in range(num_sessions)
        for part in (0, 1)
    ]


@dataclass(frozen=True)
class Data:
    """Folders with traces and their labels."""

    traces: Path
    labels: Path
    classes: TokenClasses


@pytest.fixture(scope="session")
def toy_classes() -> TokenClasses:
    return TokenClasses.from_codec(ToyCodec(), VOCAB)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, toy_classes: TokenClasses) -> Data:
    """Traces and labels as `hvd traces` would have written them."""
    folder = tmp_path_factory.mktemp("tuning")
    write_traces(phrase_traces(), folder / "traces" / "traces" / "part-0.parquet")
    label_folder(folder / "traces", folder / "labels", toy_classes)
    return Data(folder / "traces", folder / "labels", toy_classes)


def label_folder(traces: Path, labels: Path, classes: TokenClasses) -> None:
    plan = plan_labels(traces, num_shards=NUM_SHARDS)
    settings: dict[str, Any] = {
        "command": "traces label",
        "traces_hash": plan.traces_hash,
        "shards": NUM_SHARDS,
        "cut_loops": True,
        "suffix": SuffixConfig().model_dump(mode="json"),
    }
    with claimed(labels, settings) as out:
        for shard in plan.shards:
            found = label_shard(
                shard.read(),
                drafter_config=SuffixConfig(),
                extractor=FeatureExtractor(classes),
            )
            write_table(found.table, shard.labels_file(labels))
        out.finish({}, about={})


@pytest.fixture(scope="session")
def phrases() -> list[Trace]:
    """The traces of `data`, in time order within each workload."""
    return phrase_traces()
