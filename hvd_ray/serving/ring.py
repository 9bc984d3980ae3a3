"""Where on the ring of replicas a call goes: to its session's, at each further try to the next.

Ray's consistent-hash router passes over a replica that is full by Serve's own count. Ours say that
they are full themselves, and by Serve's lights another try of the same session would go to the same
one again, and one of no session to any, the full one too.
"""

from __future__ import annotations

from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

_MARK = "#"


def place_of(session: str, attempt: int) -> str:
    """What Serve is told as the session: whose place on the ring, and how far to go on from it."""
    return f"{session}{_MARK}{attempt}"


class SessionRouter(ConsistentHashRouter):  # type: ignore[misc]
    """Stickiness by session; the n-th try begins n replicas further on."""

    def _routing_key(self, pending_request: PendingRequest | None) -> str | None:
        key: str | None = super()._routing_key(pending_request)
        return None if key is None else key.partition(_MARK)[0]

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Replicas in the order in which they are tried."""
        ranks: list[list[RunningReplica]]
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        attempt = _attempt(pending_request)
        first = attempt % len(ranks) if ranks else 0
        return ranks[first:] + ranks[:first]


def _attempt(pending_request: PendingRequest | None) -> int:
    session: str = getattr(getattr(pending_request, "metadata", None), "session_id", None) or ""
    number = session.partition(_MARK)[2]
    return int(number) if number.isdecimal() else 0
