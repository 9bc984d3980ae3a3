"""Trees of the head: grown right, verified in one pass, and gone from every cache afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hvd_ray.config import Config
from hvd_ray.decode import Decoder
from hvd_ray.drafting.eagle3 import Eagle3Head, Eagle3KV
from hvd_ray.drafting.eagle3_drafter import Eagle3Drafter
from hvd_ray.drafting.eagle3_tree import Tree, TreeShape, grow_tree
from hvd_ray.engines.base import EngineCapabilities
from hvd_ray.engines.torch_engine import TorchCache, TorchEngine
from hvd_ray.engines.tree import tree_attention
from hvd_ray.errors import NotSupportedError
from hvd_ray.payoff.policy import AlwaysModel, NeverDraft
from hvd_ray.systems import Parts, build_decoder, build_model_drafter
from hvd_ray.text import HFTextCodec
from hvd_ray.types import Request, SamplingParams

from .eagle3_heads import head_of_words

LAYERS = (0, 1, 2)
WORDS = (7, 31, 77, 120)
"""All that the target may say, so that a random head is often right, and not at its first guess."""
ONLY_WORDS = dict.fromkeys(WORDS, 60.0)
SHAPE = TreeShape(depth=3, width=2, total=6)


@pytest.fixture(scope="module")
def engine(tiny_llama_path: Path) -> TorchEngine:
    return TorchEngine.load(tiny_llama_path, dtype="float32", hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def codec(tiny_llama_path: Path) -> HFTextCodec:
    return HFTextCodec(tiny_llama_path)


@pytest.fixture(scope="module")
def head(engine: TorchEngine) -> Eagle3Head:
    return head_of_words(engine, WORDS, layers=LAYERS)


def _rooted(head: Eagle3Head, num_rows: int = 9) -> tuple[Eagle3KV, torch.Tensor, torch.Tensor]:
    """A cache with a few committed rows, and the head's outputs at the last of them."""
    rng = torch.Generator().manual_seed(5)
    kv = head.new_kv(capacity=4)
    token_ids_T = torch.tensor(WORDS)[torch.randint(len(WORDS), (num_rows,), generator=rng)]
    aux_TA = torch.randn(num_rows, head.config.aux_size, generator=rng)
    normed_TH, feature_TH = head.extend(kv, token_ids_T, head.combine(aux_TA))
    return kv, normed_TH[-1:], feature_TH[-1:]


def _path(tree: Tree, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = tree.parents[node]
    return path[::-1]


@torch.inference_mode()
@pytest.mark.parametrize("shape", [SHAPE, TreeShape(4, 3, 40), TreeShape(2, 4, 3)])
def test_every_node_has_the_probability_of_its_path_as_a_chain(
    shape: TreeShape, head: Eagle3Head
) -> None:
    """Tree attention in the head: a node sees its own ancestors and no cousins."""
    kv, root_1H, feature_1H = _rooted(head)
    tree = grow_tree(head, kv, root_1H, feature_1H, shape)
    assert kv.length == 9, "the tree's rows are gone"
    assert 0 < len(tree.token_ids) <= shape.total
    for node in range(len(tree.token_ids)):
        log_prob, normed_1H, state_1H = 0.0, root_1H, feature_1H
        for step in _path(tree, node):
            log_probs_V = head.logits(normed_1H)[0].log_softmax(-1)
            log_prob += float(log_probs_V[WORDS.index(tree.token_ids[step])])
            token_T = torch.tensor([tree.token_ids[step]])
            normed_1H, state_1H = head.extend(kv, token_T, state_1H)
        kv.truncate(9)
        assert tree.probs[node] == pytest.approx(np.exp(log_prob), rel=1e-4)


@torch.inference_mode()
def test_the_likeliest_nodes_are_kept(head: Eagle3Head) -> None:
    """A tree that may expand everything holds the `total` likeliest paths there are."""
    kv, root_1H, feature_1H = _rooted(head)
    whole = grow_tree(head, kv, root_1H, feature_1H, TreeShape(3, 16, 4 + 16 + 64))
    assert len(whole.token_ids) == 4 + 16 + 64
    for total in (1, 5, 20):
        tree = grow_tree(head, kv, root_1H, feature_1H, TreeShape(3, 16, total))
        assert sorted(tree.probs) == pytest.approx(sorted(whole.probs)[-total:])
        assert all(parent < node for node, parent in enumerate(tree.parents))
        assert len(set(zip(tree.parents, tree.token_ids, strict=True))) == total


def _decoder(engine: TorchEngine, codec: HFTextCodec, drafter: Eagle3Drafter) -> Decoder:
    return Decoder(engine, codec, AlwaysModel(), None, drafter)


def _request(temperature: float = 0.0, *, seed: int = 0) -> Request:
    prompt = tuple(np.random.default_rng(seed).choice(WORDS, 11).tolist())
    sampling = SamplingParams(
        temperature=temperature, max_tokens=40, seed=seed, ignore_eos=True, logit_bias=ONLY_WORDS
    )
    return Request("r", prompt, sampling)


def test_a_tree_of_width_one_is_the_chain(
    engine: TorchEngine, codec: HFTextCodec, head: Eagle3Head
) -> None:
    vocab = engine.capabilities.vocab_size
    drafters = (
        Eagle3Drafter(head, vocab, 4),
        Eagle3Drafter(head, vocab, tree=TreeShape(4, 1, 4)),
    )
    chain, tree = (_decoder(engine, codec, each).generate(_request()) for each in drafters)
    figures = [[(s.drafted, s.accepted) for s in run.steps] for run in (chain, tree)]
    assert figures[0] == figures[1]
    assert max(accepted for _, accepted in figures[0]) > 1


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_trees_are_lossless_and_the_cache_is_a_fresh_one(
    temperature: float, engine: TorchEngine, codec: HFTextCodec, head: Eagle3Head
) -> None:
    """Invariants 1 and 4: also after a branch that was not the first."""
    paths = []
    drafter = Eagle3Drafter(head, engine.capabilities.vocab_size, tree=SHAPE)
    plain = Decoder(engine, codec, NeverDraft())
    for seed in range(3):
        request = _request(temperature, seed=seed)
        decoder = _decoder(engine, codec, drafter)
        generation = decoder.start(request)
        while not generation.is_finished:
            draft = drafter.propose("r", generation.context.room)
            decoder.step(generation)
            step = generation.steps[-1]
            if step.accepted:
                emitted = generation.context.token_ids.tail(step.emitted)
                paths.append(_is_first_path(draft.token_ids, emitted[: step.accepted].tolist()))
        _assert_fresh(engine, generation.state.cache, generation.context.token_ids.view())
        decoder.close(generation)
        assert generation.completion().token_ids == plain.generate(request).token_ids
    assert paths.count(False) > 3, "no branch but the first was ever accepted"


def _is_first_path(token_ids: tuple[int, ...], accepted: list[int]) -> bool:
    """Nodes stand in the order in which they were found, so the first path comes first."""
    return list(token_ids[: len(accepted)]) == accepted


def _assert_fresh(engine: TorchEngine, cache: object, token_ids: np.ndarray) -> None:
    fresh = engine.new_cache()
    engine.forward(token_ids[:-1], fresh, num_logits=1)
    assert isinstance(cache, TorchCache)
    assert cache.length == fresh.length
    for ours, theirs in zip(cache.growing, fresh.growing, strict=True):
        for name in ("_keys_HSD", "_values_HSD"):
            states = [getattr(layer, name)[..., : fresh.length, :] for layer in (ours, theirs)]
            torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)


def test_proposals_after_trees_are_those_of_a_head_that_saw_plain_decoding(
    engine: TorchEngine, codec: HFTextCodec, head: Eagle3Head
) -> None:
    """The hidden states of an accepted branch, not of the rows that stood there, were read."""
    vocab = engine.capabilities.vocab_size
    treeing, plain = Eagle3Drafter(head, vocab, tree=SHAPE), Eagle3Drafter(head, vocab, tree=SHAPE)
    ahead = _decoder(engine, codec, treeing)
    behind = Decoder(engine, codec, NeverDraft(), None, plain)
    first, second = ahead.start(_request()), behind.start(_request())
    compared = 0
    while not first.is_finished:
        ahead.step(first)
        while len(second.context.token_ids) < len(first.context.token_ids):
            behind.step(second)
        mine, theirs = treeing.propose("r", 3), plain.propose("r", 3)
        assert (mine.token_ids, mine.parents) == (theirs.token_ids, theirs.parents)
        assert mine.probs == pytest.approx(theirs.probs, rel=1e-3)
        compared += 1
    ahead.close(first)
    behind.close(second)
    assert compared > 5


def test_a_tree_is_no_deeper_than_the_room(
    engine: TorchEngine, codec: HFTextCodec, head: Eagle3Head
) -> None:
    short = Eagle3Head(replace(head.config, max_position_embeddings=20), head.weights)
    drafter = Eagle3Drafter(short, engine.capabilities.vocab_size, tree=TreeShape(3, 2, 9))
    completion = _decoder(engine, codec, drafter).generate(_request())
    drafted = {step.position: step.drafted for step in completion.steps}
    assert drafted[0] == 0, "no states before the prompt's pass"
    assert max(drafted.values()) > 2
    assert all(count <= 2 for position, count in drafted.items() if position + 11 == 19)
    assert all(count == 0 for position, count in drafted.items() if position + 11 >= 20)


def test_the_system_of_trees(engine: TorchEngine, codec: HFTextCodec, head: Eagle3Head) -> None:
    config = Config.model_validate({"drafting": {"eagle3": {"tree": {"total": 5, "width": 3}}}})
    parts = Parts(head=head)
    decoder = build_decoder("eagle3_tree", engine=engine, codec=codec, config=config, parts=parts)
    assert isinstance(decoder.model_drafter, Eagle3Drafter)
    assert decoder.model_drafter.tree == TreeShape(5, 3, 5)
    chains = build_decoder("eagle3", engine=engine, codec=codec, config=config, parts=parts)
    assert isinstance(chains.model_drafter, Eagle3Drafter)
    assert chains.model_drafter.tree is None


def test_an_engine_without_trees_is_refused_by_name(head: Eagle3Head) -> None:
    class NoTrees:
        capabilities = EngineCapabilities("other", 300, 100, (), "float32", has_hidden=True)

    with pytest.raises(NotSupportedError, match="the other engine cannot verify trees"):
        build_model_drafter(
            "eagle3_tree",
            Config(),
            engine=NoTrees(),  # type: ignore[arg-type]
            parts=Parts(head=head),
        )


def test_a_tree_row_sees_its_path_and_stands_at_its_depth() -> None:
    mask_TS, positions_T = tree_attention((-1, -1, 0, 2), num_rows=6, num_cached=3)
    assert positions_T.tolist() == [3, 4, 5, 5, 6, 7]
    assert [row.nonzero()[:, 0].tolist() for row in mask_TS] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 6],
        [0, 1, 2, 3, 4, 5, 7],
        [0, 1, 2, 3, 4, 5, 7, 8],
    ]
