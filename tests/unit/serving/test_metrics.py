"""What is counted, and that the Grafana board asks for nothing else."""

import json
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from hvd_ray.serving.calls import Piece, ReplicaFacts, ReplicaState
from hvd_ray.serving.metrics import FrontMetrics
from hvd_ray.serving.tally import Tally
from hvd_ray.types import FinishReason

BOARD = Path(__file__).parents[3] / "cluster" / "grafana-hvd.json"
_NAME = re.compile(r"\b(?:vllm:|hvd_)[a-z_:]+")


def test_every_metric_of_the_board_is_served(client: TestClient) -> None:
    board = json.loads(BOARD.read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in _NAME.findall(target["expr"])
    }
    client.post("/v1/completions", json={"prompt": "badge", "temperature": 0})
    served = set(_NAME.findall(client.get("/metrics").text))
    assert len(asked) > 15
    assert asked <= served


def test_the_boards_labels_are_those_of_the_metrics(client: TestClient) -> None:
    client.post("/v1/completions", json={"prompt": "badge", "temperature": 0})
    client.post("/v1/completions", json={"prompt": ""})
    text = client.get("/metrics").text
    for label in ("source", "status", "finished_reason", "model_name"):
        assert f'{label}="' in text
        assert label in BOARD.read_text()


def test_time_per_output_token_is_counted_by_tokens_not_by_chunks() -> None:
    """Case L03: nine tokens come in two chunks over two seconds."""
    metrics, times = FrontMetrics("toy"), iter([0.0, 1.0, 2.0, 3.0, 3.0])
    tally = Tally(metrics, lambda: next(times))
    chunks: list[tuple[int, FinishReason | None]] = [(1, None), (5, None), (4, "length")]
    for num_tokens, reason in chunks:
        token_ids = tuple(range(num_tokens))
        tally.add([Piece(0, "a" * num_tokens, token_ids, finish_reason=reason)])
    facts = ReplicaFacts("toy", "/toy", "toy", "float32", 512, ("off",))
    text = metrics.exposition(ReplicaState(facts, is_alive=True)).decode()
    name = "vllm:request_time_per_output_token_seconds"
    labels = '{engine="0",model_name="toy"}'
    assert f"{name}_count{labels} 1.0" in text
    (total,) = re.findall(rf"^{name}_sum{re.escape(labels)} (\S+)$", text, re.MULTILINE)
    assert float(total) == pytest.approx(2 / 9)
    assert tally.request_metrics()["mean_itl_ms"] == pytest.approx(2_000 / 9)


def test_the_page_is_told_what_passes_verified(client: TestClient) -> None:
    client.post("/v1/completions", json={"prompt": "badge", "temperature": 0})
    passes = client.get("/ui/state").json()["passes"]
    served = client.get("/metrics").text
    for source, count in passes.items():
        assert f'model_name="toy",source="{source}"}} {count}.0' in served
    assert set(passes) == {"none", "suffix"}
