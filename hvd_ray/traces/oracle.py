"""The oracle: the cheapest way through a trace for whoever knows every accepted length.

An upper bound for any policy over the same drafts. The drafts at a position depend on the prefix
alone, not on how decoding got there, so the cheapest sequence of cycles is a shortest path.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvd_ray.drafting.base import Drafter
from hvd_ray.payoff.cost import CostTable, PassCost
from hvd_ray.traces.replay import ModelDrafts, PayoffOutcome, Replay
from hvd_ray.traces.schema import Trace
from hvd_ray.traces.walk import accepted_len, walking
from hvd_ray.types import Source, Step


@dataclass(frozen=True, slots=True)
class _Place:
    """A position of the output and what could be drafted there."""

    source: Source
    draft_len: int
    accepted_len: int
    match_len: int
    score: float
    model_accepted_len: int
    """Of the model drafter's chain, within the room that it has there."""


@dataclass(frozen=True, slots=True)
class _Move:
    """A cycle that verifies exactly the tokens it will accept."""

    source: Source
    length: int


_PLAIN = _Move(Source.NONE, 0)


def replay_oracle(
    trace: Trace,
    *,
    drafter: Drafter,
    costs: CostTable | None = None,
    model: ModelDrafts | None = None,
) -> Replay:
    """Decode a trace at the least cost that its drafts allow, as `replay` would report it.

    Without a cost table it takes the fewest target passes.
    """
    places = _places(trace, drafter, model)
    moves = _cheapest_moves(places, costs or PassCost(), model)
    steps: list[Step] = []
    position = 0
    while position < len(places):
        steps.append(_step(len(steps), position, moves[position], places))
        position += steps[-1].emitted
    cost_ms = None
    if costs is not None:
        cost_ms = sum(costs.cost_ms(step.source, step.drafted + 1) for step in steps)
    payoffs = [_payoff(step.position, places) for step in steps if step.cache_draft_len]
    return Replay(trace.trace_id, tuple(steps), tuple(payoffs), cost_ms)


def _places(trace: Trace, drafter: Drafter, model: ModelDrafts | None) -> list[_Place]:
    """What can be drafted at every position of the output, with its true accepted length."""
    output, places = trace.output_token_ids, []
    with walking(trace, drafter) as walk:
        for position, token in enumerate(output):
            draft = walk.look_up()
            accepted = accepted_len(draft, output, position)
            chain = 0
            if model is not None:
                room = min(walk.context.room, model.room(walk.context))
                chain = min(int(model.accepted_len_T[position]), room)
            places.append(
                _Place(draft.source, len(draft), accepted, draft.match_len, draft.score, chain)
            )
            walk.commit((token,))
    return places


def _cheapest_moves(
    places: list[_Place], costs: CostTable, model: ModelDrafts | None
) -> list[_Move]:
    """The best move at every position, found from the end backwards."""
    end = len(places)
    cost_to_end = [0.0] * (end + 1)
    moves = [_PLAIN] * end
    for position in range(end - 1, -1, -1):
        best = float("inf")
        for move in _moves(places[position], model):
            after = min(position + move.length + 1, end)
            cost = costs.cost_ms(move.source, move.length + 1) + cost_to_end[after]
            if cost < best:
                best, moves[position] = cost, move
        cost_to_end[position] = best
    return moves


def _moves(place: _Place, model: ModelDrafts | None) -> list[_Move]:
    """Every source cut to every length it would be accepted at, the longest first."""
    found = [_Move(place.source, length) for length in range(place.accepted_len, 0, -1)]
    if model is not None:
        lengths = range(place.model_accepted_len, 0, -1)
        found += [_Move(model.source, length) for length in lengths]
    return [*found, _PLAIN]


def _step(cycle: int, position: int, move: _Move, places: list[_Place]) -> Step:
    place = places[position]
    return Step(
        cycle=cycle,
        position=position,
        source=move.source,
        drafted=move.length,
        accepted=move.length,
        emitted=min(move.length + 1, len(places) - position),
        match_len=place.match_len,
        score=place.score,
        cache_draft_len=place.draft_len,
        predicted_payoff=float(place.accepted_len) if place.draft_len else None,
        reason="oracle",
    )


def _payoff(position: int, places: list[_Place]) -> PayoffOutcome:
    place = places[position]
    return PayoffOutcome(position, place.draft_len, place.accepted_len, float(place.accepted_len))
