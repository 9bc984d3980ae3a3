"""Two Ray Train workers train one head together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hvd_ray.drafting.eagle3_checkpoint import load_head, target_shape
from hvd_ray.drafting.eagle3_job import TrainJob, load_target
from hvd_ray.drafting.eagle3_training import TrainConfig
from hvd_ray.pipelines.eagle3_train import train_on_workers

pytestmark = [pytest.mark.ray]

QUICK = TrainConfig(
    num_steps=6,
    rows_per_step=32,
    chain_steps=2,
    regression_steps=2,
    warmup_steps=2,
    checkpoint_every=3,
    evaluate_every=100,
    dtype="float32",
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _row(seed: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 48, (26,), generator=rng).tolist()
    return {
        "prompt_id": f"p{seed}",
        "family": "code",
        "workload": "toy",
        "temperature": 0.0,
        "prompt_token_ids": tokens[:6],
        "output_token_ids": tokens[6:],
    }


@pytest.mark.usefixtures("ray_session")
def test_two_workers_train_one_head(target: Path, tmp_path: Path) -> None:
    data = tmp_path / "responses"
    data.mkdir()
    for part in range(4):
        rows = [_row(10 * part + index) for index in range(10)]
        pq.write_table(pa.Table.from_pylist(rows), data / f"part-{part}.parquet")
    job = TrainJob(target=target, data=(data,), run=tmp_path / "run", draft_vocab_size=32)
    folder = train_on_workers(job, QUICK, num_workers=2, use_gpu=False, storage=tmp_path / "ray")
    head = load_head(folder, target=target_shape(load_target(target)))
    assert head.config.draft_vocab_size == 32
    lines = (job.run / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == list(range(QUICK.num_steps)), "the first worker alone logs"
    assert json.loads((job.run / "checkpoint.json").read_text())["step"] == QUICK.num_steps
