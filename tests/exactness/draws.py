"""Chi-square of what is emitted against the target's law, for each sampling parameter.

A toy target of six tokens, decoded by the loop with its own verifiers. The law of the first three
tokens is written out longhand from the parameters' documentation and compared with the counts of
many seeded requests; every request is a draw of its own.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.stats import chisquare

from hvd_ray.decode import Decoder
from hvd_ray.engines.base import Engine
from hvd_ray.engines.toy import ToyCodec, ToyEngine
from hvd_ray.engines.toy_tiers import ToyTiers
from hvd_ray.payoff.policy import AlwaysModel
from hvd_ray.randomness import pick, seeded_generator
from hvd_ray.types import Draft, Request, SamplingParams, Source
from hvd_ray.verify.exact import FullVerifier, Verifier
from hvd_ray.verify.nested import NestedVerifier
from tests.unit.verify.longhand import longhand

VOCAB = 6
NUM_TOKENS = 3
PROMPT = (4, 2)
TARGET = ToyEngine(VOCAB, order=1, seed=3, sharpness=1.2)
PROPOSAL = ToyTiers(ToyEngine(VOCAB, order=1, seed=3, sharpness=1.2), closeness=0.8)
"""What is drafted from, by its slim half: often right, often wrong."""
FEWEST = 10
"""Outcomes expected less often are counted together, as the approximation wants."""

PARAMETERS: Mapping[str, Mapping[str, object]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "logit_bias": {"logit_bias": {2: 1.5, 5: -1.0}},
    "all together": {
        **{"temperature": 1.3, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
        **{"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        "logit_bias": {1: 0.8},
    },
}


@dataclass
class TableDrafter:
    """Drafts two tokens from a table of its own: the most likely ones, or samples."""

    is_sampled: bool
    source: Source = Source.EAGLE3
    _prefixes: dict[str, list[int]] = field(default_factory=dict)
    _numbers: dict[str, np.random.Generator] = field(default_factory=dict)

    def start(self, request: Request) -> None:
        self._prefixes[request.request_id] = list(request.prompt_token_ids)
        self._numbers[request.request_id] = seeded_generator(request.sampling.seed, stream=9)

    def observe(self, request_id: str, token_ids: tuple[int, ...], hidden: object | None) -> None:
        del hidden
        self._prefixes[request_id].extend(token_ids)

    def room(self, request_id: str) -> int:
        del request_id
        return 2

    def propose(self, request_id: str, limit: int) -> Draft:
        prefix, rows = list(self._prefixes[request_id]), []
        for _ in range(min(limit, 2)):
            probs_V = torch.softmax(PROPOSAL.slim_logits_after(prefix).double(), dim=-1)
            rows.append(probs_V.numpy())
            number = self._numbers[request_id].random()
            prefix.append(pick(probs_V, number) if self.is_sampled else int(probs_V.argmax()))
        tokens = tuple(prefix[len(self._prefixes[request_id]) :])
        proposal = np.stack(rows) if self.is_sampled and rows else None
        return Draft(self.source, tokens, proposal_probs_KV=proposal)

    def stop(self, request_id: str) -> None:
        del self._prefixes[request_id], self._numbers[request_id]


@dataclass(frozen=True)
class Way:
    """Who drafts and who verifies."""

    is_sampled: bool
    verifier: Callable[[Engine], Verifier]
    has_slim: bool = False

    def decoder(self) -> Decoder:
        engine = ToyTiers(TARGET) if self.has_slim else TARGET
        drafter = TableDrafter(self.is_sampled)
        return Decoder(engine, ToyCodec(), AlwaysModel(), None, drafter, self.verifier)


WAYS: Mapping[str, Way] = {
    "fixed draft": Way(False, FullVerifier),
    "sampled draft": Way(True, FullVerifier),
    "nested": Way(False, NestedVerifier, has_slim=True),  # type: ignore[arg-type]
    "nested, sampled": Way(
        False,
        lambda engine: NestedVerifier(engine, is_sampled=True),  # type: ignore[arg-type]
        has_slim=True,
    ),
}


@dataclass(frozen=True)
class Cell:
    """One comparison of counts with a law."""

    parameter: str
    way: str
    draws: int
    outcomes: int
    """Kinds that were told apart."""
    accepted: float
    """Share of the drafted tokens that stood: a way that accepts nothing shows nothing."""
    pvalue: float


def sampling_of(parameter: str, seed: int = 0) -> SamplingParams:
    values = {"temperature": 1.0, **PARAMETERS[parameter]}
    return SamplingParams(**values, max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed)  # type: ignore[arg-type]


def law(sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    """The exact probability of every three tokens."""
    masses: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer = {}
        for output, mass in masses.items():
            logits = TARGET.logits_after([*PROMPT, *output]).numpy().astype(np.float64)
            probs = longhand(logits, sampling, np.array(PROMPT), np.array(output, dtype=int))
            longer |= {(*output, token): mass * probs[token] for token in range(VOCAB)}
        masses = longer
    return masses


def draw_cell(parameter: str, name: str, way: Way, *, num_draws: int, first_seed: int = 0) -> Cell:
    """Decode `num_draws` requests of seeds of their own and compare."""
    decoder = way.decoder()
    counts: Counter[tuple[int, ...]] = Counter()
    drafted = accepted = 0
    for seed in range(first_seed, first_seed + num_draws):
        got = decoder.generate(Request("r", PROMPT, sampling_of(parameter, seed)))
        counts[got.token_ids] += 1
        drafted += sum(step.drafted for step in got.steps)
        accepted += sum(step.accepted for step in got.steps)
    masses = law(sampling_of(parameter))
    observed, expected = _merged(counts, masses, num_draws)
    if len(observed) < 2:
        raise ValueError(f"{num_draws} draws tell no outcomes apart: take more")
    pvalue = float(chisquare(observed, expected).pvalue)
    if any(masses[outcome] == 0 for outcome in counts):
        pvalue = 0.0  # what is ruled out came
    return Cell(parameter, name, num_draws, len(observed), accepted / max(1, drafted), pvalue)


def named_cell(parameter: str, way: str, num_draws: int) -> Cell:
    """`draw_cell` by name, in a process of its own."""
    torch.set_num_threads(1)
    return draw_cell(parameter, way, WAYS[way], num_draws=num_draws)


def _merged(
    counts: Mapping[tuple[int, ...], int], masses: Mapping[tuple[int, ...], float], num_draws: int
) -> tuple[list[int], list[float]]:
    """Counts and expectations, the rare outcomes as one (with the rarest of the others, if few)."""
    by_mass = sorted(masses, key=lambda outcome: -masses[outcome])
    common = [outcome for outcome in by_mass if masses[outcome] * num_draws >= FEWEST]
    observed = [counts.get(outcome, 0) for outcome in common]
    expected = [masses[outcome] * num_draws for outcome in common]
    rest = num_draws - sum(expected)
    if rest >= FEWEST:
        observed.append(num_draws - sum(observed))
        expected.append(rest)
    else:
        observed[-1] += num_draws - sum(observed)
        expected[-1] += rest
    return observed, expected


def cells() -> list[tuple[str, str]]:
    """Every parameter with every way."""
    return list(itertools.product(PARAMETERS, WAYS))
