"""Serve on two nodes of one machine and lose one of them while requests come.

For a program that has a cluster already, such as `tests.e2e.two_nodes`.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import httpx

from hvd_ray.serving.run import APP, deploy
from hvd_ray.serving.settings import FRONT, REPLICA, ServeConfig, serve_config

NUM_BEFORE = 8
NUM_AFTER = 24
"""Requests before the node goes, and from then on."""
ANSWER_S = 60.0
BODY = {"prompt": "say it to the name and", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def config_of(model: Path) -> ServeConfig:
    """Two replicas that need two CPUs each, so that one stands on either node of two."""
    serving = {"replicas": 2, "cpus_per_replica": 2.0, "drain_s": 1}
    return serve_config(
        {
            "model": str(model),
            "dtype": "float32",
            "num_threads": 1,
            "policy": {"name": "suffix"},
            "serving": serving,
        }
    )


def serve_and_lose(cluster: Any, node: Any, model: Path) -> dict[str, Any]:
    """Ask one request after the other; from the ninth on the node is gone."""
    from ray import serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    deploy(config_of(model))
    replicas, front = nodes_of(REPLICA), nodes_of(FRONT)
    answers = [ask(port, number) for number in range(NUM_BEFORE)]
    cluster.remove_node(node, allow_graceful=False)
    answers += [ask(port, number) for number in range(NUM_BEFORE, NUM_BEFORE + NUM_AFTER)]
    texts = {text for status, text, _ in answers if status == 200}
    serve.shutdown()
    return {
        "replicas": len(replicas),
        "replicas_lost": replicas.count(node.node_id),
        "front_was_lost": node.node_id in front,
        "answered": sum(status == 200 for status, _, _ in answers),
        "asked": len(answers),
        "distinct_texts": len(texts),
        "longest_s": round(max(seconds for _, _, seconds in answers), 2),
    }


def ask(port: int, number: int) -> tuple[int, str, float]:
    """Status, text and seconds of one request; every second one in a conversation of its own."""
    began = time.monotonic()
    body = BODY | ({"session_id": f"s{number}"} if number % 2 else {})
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=ANSWER_S)
    text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
    return answer.status_code, text, time.monotonic() - began


def nodes_of(deployment: str) -> list[str]:
    """The node of each replica that is alive."""
    import ray

    return [
        actor["Address"]["NodeID"]
        for actor in ray._private.state.actors().values()
        if actor["State"] == "ALIVE" and f"{APP}#{deployment}#" in actor["Name"]
    ]
