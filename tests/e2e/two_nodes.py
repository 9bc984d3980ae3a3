"""Collect, label and serve on two nodes of one machine; lose one of them while it works.

A program of its own, since a process has one Ray: `python -m tests.e2e.two_nodes WORK`, where
WORK holds `tiny/` (a model) and `notes.jsonl`. It prints on which nodes the shards were labelled.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"  # loopback alone; read when Ray is imported

from hvd_ray.config import Config
from hvd_ray.pipelines import label as label_module
from hvd_ray.pipelines.collect import CollectOptions, collect
from hvd_ray.pipelines.label import LabelOptions, LabelWorker, label
from tests.e2e.two_nodes_serve import serve_and_lose

NUM_SHARDS = 8
PACE_S = 0.5
"""So slowly that a node can be lost in between."""


class NotingWorker(LabelWorker):
    """Notes on which node it labels."""

    def run(self, shard: Any, report: Any) -> None:
        import ray

        if not shard.labels_file(self._out).exists():
            place = self._out / "nodes"
            place.mkdir(exist_ok=True)
            node = ray.get_runtime_context().get_node_id()
            time.sleep(PACE_S)
            super().run(shard, report)
            with (place / "log").open("a") as log:
                log.write(f"{node} {shard.number}\n")


class Silent:
    def stage(self, text: str) -> None: ...
    def expect(self, total: int) -> None: ...
    def advance(self, done: int, text: str) -> None: ...


def noted(out: Path) -> list[tuple[str, str]]:
    log = out / "nodes" / "log"
    if not log.exists():
        return []
    return [tuple(line.split()) for line in log.read_text().splitlines()]  # type: ignore[misc]


def lose(cluster: Any, node: Any, out: Path, is_over: threading.Event) -> None:
    """Take the node away once it has labelled something."""
    while not is_over.wait(0.05):
        if any(name == node.node_id for name, _ in noted(out)):
            cluster.remove_node(node, allow_graceful=False)
            return


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster

    work = Path(sys.argv[1])
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "object_store_memory": 100_000_000},
    )
    second = cluster.add_node(num_cpus=2, object_store_memory=100_000_000)
    os.environ["RAY_ADDRESS"] = cluster.address
    config = Config(model=str(work / "tiny"), dtype="float32")
    traces = work / "traces"
    options = CollectOptions(
        traces, prompt_files=(work / "notes.jsonl",), max_tokens=24, policy="suffix", num_workers=3
    )
    collected = collect(options, config, progress=Silent())
    alone = LabelOptions(traces, work / "alone", num_shards=NUM_SHARDS, num_workers=1)
    label(alone, config, progress=Silent())
    label_module.LabelWorker = NotingWorker  # type: ignore[misc]
    out, is_over = work / "shared-out", threading.Event()
    thief = threading.Thread(target=lose, args=(cluster, second, out, is_over))
    thief.start()
    result = label(
        LabelOptions(traces, out, num_shards=NUM_SHARDS, num_workers=3), config, progress=Silent()
    )
    is_over.set()
    thief.join()
    by_node = Counter(node for node, _ in noted(out))
    answer = {
        "collected": collected["traces"],
        "labelled": result["traces"],
        "by_node": list(by_node.values()),
        "shards": sorted(int(shard) for _, shard in noted(out)),
        "second_was_lost": second.node_id in by_node and second not in cluster.list_all_nodes(),
    }
    third = cluster.add_node(num_cpus=2, object_store_memory=100_000_000)
    answer["served"] = serve_and_lose(cluster, third, work / "tiny")
    print(json.dumps(answer))
    ray.shutdown()  # a cluster does not let go of the node that its driver is connected to
    cluster.shutdown()


if __name__ == "__main__":
    main()
