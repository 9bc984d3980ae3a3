"""Targets and EAGLE-3 heads of well-known shapes with random weights: what a pass of them costs.

Shapes decide the cost, not values, so nothing is downloaded. Every shape is measured at each
context as the engine runs it and, on a GPU, as a CUDA graph replays it, which is how servers run
small batches: launching a few hundred kernels takes longer than they do.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_ray.bench.calibrate import (
    NUM_REPEATS,
    VerifyTimes,
    measure_cache_draft,
    measure_model_draft,
    measure_verify,
    timed,
    verify_times,
)
from hvd_ray.config import Eagle3TreeConfig
from hvd_ray.drafting.base import Drafter
from hvd_ray.errors import UserError
from hvd_ray.payoff.cost_file import CostFile, CostKey, write_costs
from hvd_ray.provenance import cpu_model, provenance
from hvd_ray.types import Request, Source

if TYPE_CHECKING:
    from hvd_ray.drafting.eagle3 import Eagle3Head
    from hvd_ray.engines.torch_engine import TorchEngine

ROWS = (1, 2, 4, 5, 8, 12, 16, 17, 24, 32, 48, 64, 96, 128, 192, 256)
"""Beyond 64 a pass is one of a batch: its rows are those of all requests."""
CONTEXTS = (512, 4096)
EAGER, GRAPHS = "torch", "torch-cuda-graphs"
NUM_TREE_DRAFTS = 20


@dataclass(frozen=True, slots=True)
class Shape:
    """A target's architecture, as its config.json has it, and its head's draft vocabulary."""

    model_type: str
    config: Mapping[str, Any]
    draft_vocab_size: int


_QWEN3_4B = {
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_TINY = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "qwen3-4b": Shape("qwen3", _QWEN3_4B, 32_000),  # huggingface.co/Qwen/Qwen3-4B
        "llama-3.1-8b": Shape("llama", _LLAMA_8B, 32_000),  # .../meta-llama/Llama-3.1-8B
        "tiny": Shape("llama", _TINY, 200),
    }
)


@dataclass(frozen=True, slots=True)
class ShapeOptions:
    """What is measured, where, and where the tables go.

    Raises:
        UserError: an unknown shape, or a GPU is asked for and there is none.
    """

    names: tuple[str, ...]
    device: str
    out: Path
    num_repeats: int = NUM_REPEATS

    def __post_init__(self) -> None:
        import torch

        for name in self.names:
            if name not in SHAPES:
                raise UserError(f"--shapes {name}: expected some of {', '.join(SHAPES)}")
        if self.device not in ("cuda", "cpu"):
            raise UserError(f"--device {self.device}: expected cuda or cpu")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "--shapes needs a CUDA GPU, and torch sees none here; "
                "`--shapes tiny --device cpu` tries the check without one"
            )


def measure_shape(
    name: str, options: ShapeOptions, *, stage: Callable[[str], None]
) -> list[tuple[Path, CostFile]]:
    """Measure one shape at every context and write a table each as soon as it is known.

    Raises:
        RuntimeError: of torch, such as too little memory; tables written before stay.
    """
    stage(f"{name}: drawing weights")
    engine, head = build(name, options.device)
    longest = engine.capabilities.context_length // 2
    contexts = list(dict.fromkeys(min(context, longest) for context in CONTEXTS))
    drafts, written = {}, []
    for context_len in contexts:
        stage(f"{name}: drafts at a context of {context_len}")
        drafts[context_len] = _measure_drafts(engine, head, context_len, options.num_repeats)
    for kind, measure in _kinds(options.device).items():
        for context_len in contexts:
            stage(f"{name}: passes at a context of {context_len}, {kind}")
            times = measure(engine, context_len, options.num_repeats)
            costs = _cost_file(name, kind, engine, times, drafts[context_len], context_len)
            path = options.out / f"{name}-context{context_len}-{kind}.json"
            write_costs(path, costs)
            written.append((path, costs))
    return written


def build(name: str, device: str) -> tuple[TorchEngine, Eagle3Head]:
    """Target and head of a shape with random weights: bfloat16 on a GPU, float32 on a CPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hvd_ray.drafting.eagle3 import Eagle3Head
    from hvd_ray.drafting.eagle3_init import config_for_target, weights_from_target
    from hvd_ray.engines.torch_engine import TorchEngine

    shape = SHAPES[name]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = AutoConfig.for_model(shape.model_type, **shape.config)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=False
        ).requires_grad_(False)
        head_config = config_for_target(model, draft_vocab_size=shape.draft_vocab_size)
        vocabulary_V = torch.arange(shape.draft_vocab_size)
        weights = weights_from_target(model, head_config, vocabulary_V).to(dtype)
    engine = TorchEngine.from_model(model, hidden_layers=head_config.aux_layer_ids)
    return engine, Eagle3Head(head_config, weights)


def free_memory() -> None:
    """Give a shape's memory back, so that the next one finds it."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- target passes ------------------------------------------------------------------------------

_Measure = Callable[["TorchEngine", int, int], VerifyTimes]


def _kinds(device: str) -> dict[str, _Measure]:
    return {EAGER: _eager, GRAPHS: _graphed} if device == "cuda" else {EAGER: _eager}


def _eager(engine: TorchEngine, context_len: int, num_repeats: int) -> VerifyTimes:
    return measure_verify(engine, rows=ROWS, context_len=context_len, num_repeats=num_repeats)


def _graphed(engine: TorchEngine, context_len: int, num_repeats: int) -> VerifyTimes:
    """One captured pass for each number of rows; a replay reads and writes the same places."""
    import torch

    plain = replace(engine, hidden_layers=())
    cache = plain.new_cache()
    ids = np.zeros(context_len + max(ROWS), np.int32)
    plain.forward(ids, cache, num_logits=1)  # all rows once, so that no buffer moves later
    times_ms = []
    for rows in ROWS:
        graph = torch.cuda.CUDAGraph()
        ids_BT = torch.zeros((1, rows), dtype=torch.int64, device=engine.model.device)
        run = partial(_pass, engine, ids_BT, cache, context_len)
        _warm_up(run)
        with torch.cuda.graph(graph):
            run()
        times_ms.append([timed(graph.replay)[1] for _ in range(num_repeats + 2)][2:])
    return verify_times(times_ms)


def _pass(engine: TorchEngine, ids_BT: Any, cache: Any, context_len: int) -> Any:
    """The target over some rows at the same place of the cache, by nothing but kernels."""
    import torch

    cache.truncate(context_len)
    with torch.no_grad():
        positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None] + context_len
        return engine.model(
            ids_BT, past_key_values=cache.layers, position_ids=positions_BT, use_cache=True
        ).logits


def _warm_up(run: Callable[[], Any]) -> None:
    """Three passes beside the main stream, as capturing asks for."""
    import torch

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)


# -- drafts -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Drafts:
    fixed_ms: dict[Source, float]
    token_ms: dict[Source, float]
    tree_ms: float
    not_measured: tuple[str, ...]


def _measure_drafts(
    engine: TorchEngine, head: Eagle3Head, context_len: int, num_repeats: int
) -> _Drafts:
    from hvd_ray.drafting.eagle3_drafter import Eagle3Drafter

    vocab_size = engine.capabilities.vocab_size
    chain = Eagle3Drafter(head, vocab_size)
    fixed_ms, token_ms = measure_model_draft(
        engine, chain, context_len=context_len, num_repeats=num_repeats
    )
    found, lacking = _cache_drafts(context_len, vocab_size)
    return _Drafts(
        {Source.EAGLE3: round(fixed_ms, 5), **found},
        {Source.EAGLE3: round(token_ms, 5)},
        round(_tree_ms(engine, head, context_len), 5),
        lacking,
    )


def _cache_drafts(context_len: int, vocab_size: int) -> tuple[dict[Source, float], tuple[str, ...]]:
    """Look-ups in a repetitive text; without arctic-inference those of the suffix cache lack."""
    from hvd_ray.config import NgramConfig
    from hvd_ray.drafting.ngram import NgramDrafter

    words = np.random.default_rng(0).integers(0, vocab_size, (16, 12))
    order = np.random.default_rng(1).integers(0, 16, 2 * context_len // 12)
    prompt = words[order].ravel().tolist()
    found = {Source.NGRAM: round(measure_cache_draft(NgramDrafter(NgramConfig()), prompt), 5)}
    try:
        drafter = _suffix_drafter()
    except ImportError:
        return found, ("suffix: arctic-inference is not installed",)
    return found | {Source.SUFFIX: round(measure_cache_draft(drafter, prompt), 5)}, ()


def _suffix_drafter() -> Drafter:
    import arctic_inference.suffix_decoding  # noqa: F401  # absent where only passes are measured

    from hvd_ray.drafting.suffix import SuffixDrafter

    return SuffixDrafter()


def _tree_ms(engine: TorchEngine, head: Eagle3Head, context_len: int) -> float:
    """Median milliseconds of growing a tree of the usual size."""
    from hvd_ray.drafting.eagle3_drafter import Eagle3Drafter
    from hvd_ray.drafting.eagle3_tree import TreeShape

    tree = TreeShape(**_tree().model_dump())
    grower = Eagle3Drafter(head, engine.capabilities.vocab_size, tree=tree)
    prompt = np.zeros(context_len, np.int32)
    grower.start(Request("calibrate", tuple(prompt.tolist())))
    cache, token = engine.new_cache(), np.zeros(1, np.int32)
    hidden = engine.forward(prompt, cache, num_logits=1).hidden_TD
    times_ms = []
    for _ in range(NUM_TREE_DRAFTS):
        grower.observe("calibrate", (0,), hidden)
        times_ms.append(timed(partial(grower.propose, "calibrate", tree.depth))[1])
        hidden = engine.forward(token, cache, num_logits=1).hidden_TD
    grower.stop("calibrate")
    return float(np.median(times_ms[2:]))


def _tree() -> Eagle3TreeConfig:
    return Eagle3TreeConfig()


def _cost_file(
    name: str,
    kind: str,
    engine: TorchEngine,
    times: VerifyTimes,
    drafts: _Drafts,
    context_len: int,
) -> CostFile:
    import torch

    is_gpu = engine.model.device.type == "cuda"
    return CostFile(
        key=CostKey(
            model=f"shape:{name}",
            dtype=engine.capabilities.dtype,
            engine=kind,
            device=torch.cuda.get_device_name() if is_gpu else cpu_model(),
            num_threads=torch.get_num_threads(),
        ),
        rows=ROWS,
        verify_ms=times.median_ms,
        draft_ms=drafts.fixed_ms,
        draft_token_ms=drafts.token_ms,
        provenance=provenance(
            context_len=context_len,
            spread=round(times.spread, 3),
            tree={**_tree().model_dump(), "draft_ms": drafts.tree_ms},
            not_measured=list(drafts.not_measured),
            shape=dict(SHAPES[name].config),
        ),
    )
