"""Where on the ring a session's tries go."""

import asyncio
from types import SimpleNamespace
from typing import Any

from ray.serve._private.common import DeploymentID, ReplicaID

from hvd_ray.serving.ring import SessionRouter, place_of

NUM_REPLICAS = 3


def ring() -> Any:
    """A router that knows three replicas, without Serve around it."""
    router: Any = SessionRouter.__new__(SessionRouter)
    names = [ReplicaID(f"replica{i}", DeploymentID("Replica")) for i in range(NUM_REPLICAS)]
    router._deployment_id = names[0].deployment_id
    router._num_virtual_nodes, router._num_fallback_replicas = 100, 2
    router._replicas = {name: SimpleNamespace(name=name.unique_id) for name in names}
    router._rebuild_ring(frozenset(names))
    return router


def order(router: Any, session_id: str) -> list[str]:
    metadata = SimpleNamespace(session_id=session_id, internal_request_id="another")
    pending: Any = SimpleNamespace(metadata=metadata, routing_context=SimpleNamespace())
    ranks = asyncio.run(router.choose_replicas(list(router._replicas.values()), pending))
    return [rank[0].name for rank in ranks]


def test_each_try_of_a_session_goes_to_another_replica() -> None:
    router = ring()
    for session in map(str, range(20)):
        first = order(router, place_of(session, 0))
        asked = [order(router, place_of(session, attempt))[0] for attempt in range(NUM_REPLICAS)]
        assert asked == first
        assert len(set(asked)) == NUM_REPLICAS
        assert order(router, session) == first


def test_sessions_are_spread() -> None:
    router = ring()
    asked = {order(router, place_of(str(session), 0))[0] for session in range(50)}
    assert len(asked) == NUM_REPLICAS
