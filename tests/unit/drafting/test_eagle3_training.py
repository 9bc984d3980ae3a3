"""A tiny target built in the process: states, training, checkpoints and resume."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hvd_ray.drafting.eagle3_init import default_aux_layer_ids, draft_vocabulary
from hvd_ray.drafting.eagle3_job import TrainJob, run_evaluation, run_training
from hvd_ray.drafting.eagle3_responses import read_responses
from hvd_ray.drafting.eagle3_states import StateCache, TargetStates
from hvd_ray.drafting.eagle3_training import TrainConfig, learning_rate_share
from hvd_ray.errors import UserError

QUICK = TrainConfig(
    num_steps=24,
    rows_per_step=64,
    chain_steps=2,
    regression_steps=6,
    warmup_steps=4,
    checkpoint_every=8,
    evaluate_every=100,
    learning_rate=3e-3,
    dtype="float32",
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small only wait for one another on more."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


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
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("target")
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # a random model of this size says everything at once: sharpen it
        model.model.embed_tokens.weight.mul_(8)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(target).eval()
    folder = tmp_path_factory.mktemp("responses")
    rows = [_greedy_row(model, seed) for seed in range(40)]
    rows.append(rows[0] | {"prompt_id": "test", "split": "test"})
    for part in range(2):
        pq.write_table(pa.Table.from_pylist(rows[part::2]), folder / f"part-{part}.parquet")
    return folder


def _greedy_row(model: Any, seed: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 48, (1, 6), generator=rng)
    prompt = tokens[0].tolist()
    with torch.inference_mode():
        for _ in range(24):
            tokens = torch.cat((tokens, model(tokens).logits[:, -1:].argmax(-1)), dim=1)
    return {
        "prompt_id": f"p{seed}",
        "family": "code",
        "workload": "toy",
        "temperature": 0.0,
        "split": "train",
        "error": None,
        "prompt_token_ids": prompt,
        "output_token_ids": tokens[0, len(prompt) :].tolist(),
    }


class Log:
    """Keeps what a tracker would."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Mapping[str, float]]] = []

    def __call__(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append((step, metrics))


def job(target: Path, data: Path, run: Path, **changes: Any) -> TrainJob:
    return TrainJob(target=target, data=(data,), run=run, draft_vocab_size=32, **changes)


def test_training_lowers_the_loss_and_saves_a_head(
    target: Path, data: Path, tmp_path: Path
) -> None:
    log = Log()
    folder = run_training(job(target, data, tmp_path / "run"), QUICK, log_metrics=log)
    losses = [m["cross_entropy_0"] for _, m in log.rows if "cross_entropy_0" in m]
    assert len(losses) == QUICK.num_steps - QUICK.regression_steps
    assert sum(losses[-4:]) < sum(losses[:4])
    quality = run_evaluation(folder, target=target, data=[data])["all"]
    assert quality.tokens == 41 * 24  # the row of the test split is measured
    assert 1.0 <= quality.emitted_per_pass <= 5.0
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 3]
    assert config["draft_vocab_size"] == 32


def test_a_killed_run_goes_on_from_its_checkpoint(target: Path, data: Path, tmp_path: Path) -> None:
    log = Log()

    def kill(metrics: Mapping[str, float], step: int) -> None:
        log(metrics, step)
        if step == 17:
            raise KeyboardInterrupt

    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run_training(job(target, data, run), QUICK, log_metrics=kill)
    assert json.loads((run / "checkpoint.json").read_text())["step"] == 16
    again = Log()
    run_training(job(target, data, run), QUICK, log_metrics=again)
    assert [step for step, _ in again.rows] == list(range(16, QUICK.num_steps))


def test_test_rows_are_never_trained_on(data: Path) -> None:
    responses = [
        response
        for shard in sorted(data.glob("*.parquet"))
        for response in read_responses(shard, max_prompt_tokens=100)
    ]
    assert len(responses) == 40
    assert "test" not in {response.prompt_id for response in responses}
    assert read_responses(next(data.glob("*.parquet")), max_prompt_tokens=5) == []


def test_states_are_those_of_one_plain_pass(target: Path, data: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(target).eval()
    shard = sorted(data.glob("*.parquet"))[0]
    reader = TargetStates(model, aux_layer_ids=(1, 3, 6))
    cache = StateCache(tmp_path / "states", target=reader, budget_gb=1)
    computed = list(cache.load(shard))
    assert cache.is_stored(shard)
    for states in computed:
        tokens = states.token_ids_T[None]
        with torch.inference_mode():
            output = model.model(tokens, output_hidden_states=True)
        aux = torch.cat([output.hidden_states[layer][0] for layer in (1, 3)], dim=-1)
        torch.testing.assert_close(states.aux_TA[:, :64], aux, atol=1e-4, rtol=1e-4)
        final = output.last_hidden_state[0, -states.num_rows :]
        torch.testing.assert_close(states.final_RH, final, atol=1e-4, rtol=1e-4)
        # Greedy on greedy text: the target's choice at each row is the next recorded token.
        assert states.greedy_R[:-1].tolist() == list(states.response.output_token_ids)
    for first, second in zip(computed, cache.load(shard), strict=True):
        torch.testing.assert_close(first.aux_TA.bfloat16(), second.aux_TA)
        assert first.token_ids_T.tolist() == second.token_ids_T.tolist()


def test_a_cache_over_budget_is_recomputed(target: Path, data: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(target).eval()
    shard = sorted(data.glob("*.parquet"))[0]
    reader = TargetStates(model, aux_layer_ids=default_aux_layer_ids(6))
    cache = StateCache(tmp_path / "states", target=reader, budget_gb=0)
    assert len(list(cache.load(shard))) == 20
    assert not cache.is_stored(shard)


def test_draft_vocabulary_keeps_the_frequent_and_the_ending_tokens() -> None:
    vocabulary = draft_vocabulary([[7, 7, 5], [5, 7, 9]], size=4, vocab_size=12, always=(2,))
    assert vocabulary.tolist() == [2, 5, 7, 9]


def test_learning_rate_warms_up_and_falls() -> None:
    shares = [learning_rate_share(step, QUICK) for step in range(QUICK.num_steps)]
    assert shares[0] == 0.25
    assert max(shares) == 1.0
    assert shares[-1] == pytest.approx(QUICK.final_learning_rate_share, abs=0.01)


def test_no_data_is_a_users_mistake(target: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no responses"):
        run_training(job(target, tmp_path, tmp_path / "run"), QUICK, log_metrics=Log())
