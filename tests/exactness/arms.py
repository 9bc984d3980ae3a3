"""The systems that must give plain decoding's tokens, and one comparison of one of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from hvd_ray.bench.workloads import Prompt
from hvd_ray.config import Config
from hvd_ray.decode import Decoder
from hvd_ray.engines.slim import SlimLayers
from hvd_ray.engines.torch_engine import TorchEngine
from hvd_ray.engines.torch_tiers import torch_tiers
from hvd_ray.systems import Parts, build_decoder, load_head
from hvd_ray.text import HFTextCodec
from hvd_ray.types import Completion, Request, SamplingParams

CONFIG = Config.model_validate({"dtype": "float32", "policy": {"tau": 2.0}})
SLIM = {
    "prefix": SlimLayers.prefix(20, num_layers=30),
    "mask": SlimLayers.without(frozenset({7, 12, 18, 23}), num_layers=30),
}
SAMPLED = {"open_chat": 0.7}
"""Sampled with a seed: the same tokens all the same, since the random number belongs to the
position."""


@dataclass(frozen=True)
class Arm:
    """A system, and what it is given: a head, a slim model, a cache that knows the answers."""

    system: str
    has_head: bool = False
    is_warm: bool = False
    slim: str | None = None

    @property
    def name(self) -> str:
        marks = ("head" * self.has_head, "warm" * self.is_warm, self.slim or "")
        return " ".join((self.system, *filter(None, marks)))


COLD = (Arm("ngram"), Arm("suffix"))
WARM = tuple(
    Arm(name, is_warm=True)
    for name in ("suffix", "rule_score", "rule_match", "hvd_tau", "hvd_cost")
)
WITH_HEAD = tuple(
    Arm(name, has_head=True)
    for name in ("eagle3", "eagle3_tree", "rule_score", "rule_match", "hvd_tau", "hvd_cost")
)
NESTED = (
    Arm("suffix+nested", slim="mask"),
    Arm("ngram+nested", slim="prefix"),
    Arm("greedy+nested", slim="mask"),
    Arm("eagle3+nested", has_head=True, slim="prefix"),
    Arm("hvd_tau+nested", has_head=True, slim="prefix"),
    Arm("hvd_cost+nested", has_head=True, slim="mask"),
)
ARMS = (*COLD, *WARM, *WITH_HEAD, *NESTED)


@dataclass(frozen=True)
class Model:
    """A target, its tokenizer, and what systems need besides a head and a slim model."""

    engine: TorchEngine
    codec: HFTextCodec
    parts: Parts

    @classmethod
    def load(cls, path: Path, parts: Parts) -> Model:
        return cls(TorchEngine.load(path, dtype="float32"), HFTextCodec(path), parts)

    @cached_property
    def reading(self) -> tuple[Parts, TorchEngine]:
        """The parts with the shipped head, and the engine whose hidden states it reads."""
        head, engine = load_head(CONFIG, self.engine)
        return replace(self.parts, head=head), engine

    def decoder(self, arm: Arm) -> Decoder:
        """A decoder with a cold cache."""
        parts, engine = self.reading if arm.has_head else (self.parts, self.engine)
        if arm.slim is not None:
            parts = replace(parts, tiers=torch_tiers(engine, SLIM[arm.slim]))
        return build_decoder(
            arm.system, engine=engine, codec=self.codec, config=CONFIG, parts=parts
        )

    def plain(self) -> Decoder:
        return self.decoder(Arm("greedy"))

    def request(self, prompt: Prompt, max_tokens: int) -> Request:
        sampling = SamplingParams(
            temperature=SAMPLED.get(prompt.workload, 0.0), max_tokens=max_tokens, seed=1
        )
        if prompt.prompt_token_ids is not None:
            token_ids = tuple(prompt.prompt_token_ids)
        elif prompt.prompt is not None:
            token_ids = tuple(self.codec.encode(prompt.prompt))
        else:
            messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
            token_ids = tuple(self.codec.encode_chat(messages))
        return Request(f"{prompt.workload}-{prompt.id}", token_ids, sampling)

    def shortest(self, prompts: Iterable[Prompt], count: int, max_tokens: int) -> list[Request]:
        """So that the time goes into decoding and not into reading prompts."""
        encoded = [self.request(prompt, max_tokens) for prompt in prompts]
        return sorted(encoded, key=lambda request: len(request.prompt_token_ids))[:count]


def tell(decoder: Decoder, request: Request, answer: Completion) -> None:
    """Let a decoder's cache know an answer, as if it had given it before."""
    drafter = decoder.cache_drafter
    assert drafter is not None
    drafter.start(request)
    drafter.observe(request.request_id, answer.token_ids, None)
    drafter.stop(request.request_id)


def num_differing(got: Completion, wanted: Completion) -> int:
    """Tokens that are not the wanted ones, missing and extra ones included."""
    pairs = zip(got.token_ids, wanted.token_ids, strict=False)
    by_length = abs(len(got.token_ids) - len(wanted.token_ids))
    return sum(a != b for a, b in pairs) + by_length
