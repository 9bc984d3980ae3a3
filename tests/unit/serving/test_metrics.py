"""What is counted, and that the Grafana board asks for nothing else."""

import json
import re
from pathlib import Path

from starlette.testclient import TestClient

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


def test_the_page_is_told_what_passes_verified(client: TestClient) -> None:
    client.post("/v1/completions", json={"prompt": "badge", "temperature": 0})
    passes = client.get("/ui/state").json()["passes"]
    served = client.get("/metrics").text
    for source, count in passes.items():
        assert f'model_name="toy",source="{source}"}} {count}.0' in served
    assert set(passes) == {"none", "suffix"}
