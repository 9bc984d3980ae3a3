"""Trees of drafts: the plain answer, and a cache that holds the accepted path alone."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from hvd_ray.decode import Decoder
from hvd_ray.engines.toy import ToyCache, ToyCodec, ToyEngine
from hvd_ray.payoff.policy import AlwaysModel
from hvd_ray.types import Request, SamplingParams
from hvd_ray.verify.exact import accept_in_tree
from tests.property.test_lossless import outcome, plainly
from tests.property.toy_requests import engines, requests
from tests.property.trees import ToyTreeDrafter


def _decoder(engine: ToyEngine, num_nodes: int, depth: int) -> Decoder:
    drafter = ToyTreeDrafter(engine, num_nodes, depth)
    return Decoder(engine, ToyCodec(), AlwaysModel(), None, drafter)


@given(engines, requests(), st.integers(1, 12), st.integers(1, 5))
def test_trees_give_the_plain_answer(
    engine: ToyEngine, request: Request, num_nodes: int, depth: int
) -> None:
    """Invariants 1, 3 and 4: greedy and seeded, with penalties, stops and logprobs."""
    decoder = _decoder(engine, num_nodes, depth)
    generation = decoder.start(request)
    while not generation.is_finished:
        decoder.step(generation)
        step, cache = generation.steps[-1], generation.state.cache
        assert step.emitted >= 1
        assert step.accepted <= min(depth, step.drafted)
        assert isinstance(cache, ToyCache)
        assert cache.token_ids == generation.context.token_ids.view()[:-1].tolist()
    decoder.close(generation)
    assert outcome(generation.completion()) == outcome(plainly(engine, request))


def test_the_comparison_is_not_vacuous() -> None:
    """Branches other than the first are taken, and paths of several tokens."""
    engine = ToyEngine(vocab_size=12, order=1, seed=4, sharpness=2.0)
    request = Request("r", (1,), SamplingParams(max_tokens=80, ignore_eos=True))
    completion = _decoder(engine, 10, 4).generate(request)
    assert completion.emitted_per_pass > 2


@given(
    st.lists(st.tuples(st.integers(-1, 10), st.integers(0, 3)), max_size=12),
    st.lists(st.integers(0, 3), min_size=13, max_size=13),
)
def test_the_longest_path_that_the_target_follows_is_accepted(
    nodes: list[tuple[int, int]], choices: list[int]
) -> None:
    """Against a search over every path: the target's choice is a function of the row alone."""
    parents, token_ids = _without_twins(nodes)
    emitted, path = accept_in_tree(token_ids, parents, lambda row, _before: choices[row])
    best: list[int] = []
    for leaf in range(len(parents)):
        walk = _path_to(leaf, parents)
        rows = [0, *(1 + node for node in walk)]
        if all(token_ids[node] == choices[row] for node, row in zip(walk, rows, strict=False)):
            best = max(best, walk, key=len)
    assert list(path) == best
    rows = [0, *(1 + node for node in path)]
    assert list(emitted) == [choices[row] for row in rows]


def _without_twins(nodes: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    parents: list[int] = []
    token_ids: list[int] = []
    for parent, token in nodes:
        parent = min(parent, len(parents) - 1)
        if (parent, token) not in zip(parents, token_ids, strict=True):
            parents.append(parent)
            token_ids.append(token)
    return parents, token_ids


def _path_to(node: int, parents: Sequence[int]) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
