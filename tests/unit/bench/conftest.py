"""A benchmark on the toy engine, in milliseconds, for the tests of measuring and of reports."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_ray.bench.plan import Plan, Sampling, ask, choose_arms, choose_filling
from hvd_ray.bench.result import CacheState
from hvd_ray.bench.workloads import Prompt
from hvd_ray.config import Config
from hvd_ray.decode import Decoder
from hvd_ray.engines.toy import ToyCodec, ToyEngine
from hvd_ray.payoff.cost import RowCosts
from hvd_ray.systems import Parts, build_decoder

CONFIG = Config()


@pytest.fixture(scope="session")
def toy() -> SimpleNamespace:
    """`prompt(text)`, `plan(prompts)` and `builder()` of a benchmark on the toy engine."""
    return SimpleNamespace(prompt=prompt, plan=plan, builder=builder)


class FixedEstimator:
    """Promises the same payoff for every draft."""

    def __init__(self, payoff: float = 100.0) -> None:
        self.payoff = payoff

    def expected_length(self, draft: object, context: object) -> float:  # noqa: ARG002
        return self.payoff

    has_survival = True

    def survival(self, draft, context):  # noqa: ARG002
        return np.ones(len(draft), dtype=np.float32)


def prompt(
    text: str,
    *,
    workload: str = "letters",
    prompt_id: str = "",
    session: str | None = None,
    split: str | None = "test",
    sampling: dict[str, object] | None = None,
) -> Prompt:
    return Prompt(
        id=prompt_id or text,
        workload=workload,
        family="toy",
        session_id=session,
        split=split,
        messages=(),
        prompt=text,
        prompt_token_ids=None,
        sampling=tuple(sorted((sampling or {}).items())),
        origin=f"toy.jsonl:{prompt_id or text}",
    )


def plan(
    prompts: Sequence[Prompt],
    *,
    systems: Sequence[str] = ("greedy", "suffix"),
    caches: Sequence[CacheState] = ("cold",),
    sampling: Sampling | None = None,
    engine: ToyEngine | None = None,
) -> Plan:
    """Measures the test prompts; warm caches are filled from the train prompts."""
    engine = engine or ToyEngine()
    measured = [prompt for prompt in prompts if prompt.split != "train"]
    filling = choose_filling(prompts, measured) if "warm" in caches else {}

    def asked(chosen: Sequence[Prompt]) -> dict:
        return ask(
            chosen,
            codec=ToyCodec(),
            capabilities=engine.capabilities,
            sampling=sampling or Sampling(max_tokens=40),
        )

    filling_prompts = [prompt for chosen in filling.values() for prompt in chosen]
    return Plan(choose_arms(systems, caches), asked(measured), asked(filling_prompts))


def builder(engine: ToyEngine | None = None) -> Callable[[str], Decoder]:
    engine = engine or ToyEngine()

    def build(system: str) -> Decoder:
        parts = Parts(FixedEstimator(), RowCosts((1, 64), (10.0, 20.0)))
        return build_decoder(system, engine=engine, codec=ToyCodec(), config=CONFIG, parts=parts)

    return build
