"""The nouns that every layer shares: drafts, decisions, verdicts, requests, steps, completions.

Nothing here imports an engine, Ray or torch; DESIGN's vocabulary is the vocabulary of this file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from hvd_ray.errors import UserError

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
FinishReason = Literal["stop", "length", "abort"]
VerificationName = Literal[
    "full",
    "nested",
    "tiered",
    "tiered_learned",
    "cascade_chow",
    "cascade_diff",
    "cascade_opt",
    "cascade_token_v3",
]
"""Who checks a token before it is committed; all but the first two may change the output."""
VERIFICATION_NAMES: tuple[VerificationName, ...] = get_args(VerificationName)
LOSSLESS: frozenset[VerificationName] = frozenset({"full", "nested"})

MAX_TOP_LOGPROBS = 20
MAX_COUNT = 2**31 - 1
"""Counts are kept as int32 on disk."""
MIN_TEMPERATURE = 1e-5
"""Below it the arg max is all that is left, and dividing by it overflows: ask for 0."""


class Source(StrEnum):
    """Who guessed a draft."""

    NONE = "none"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    EAGLE3 = "eagle3"
    SLIM = "slim"
    """The target's own first layers."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A guess of the next tokens, from one source.

    A draft is *deterministic* (a one-hot proposal at every position) unless `proposal_probs_KV`
    says from which distributions its tokens were sampled. It is a chain, each token following the
    one before it, unless `parents` makes it a tree: several guesses that share their beginnings.
    """

    source: Source
    token_ids: tuple[int, ...] = ()
    probs: tuple[float, ...] = ()
    """The drafter's own estimate of P(token | prefix) at each position, or empty."""
    score: float = 0.0
    """Sum of `probs`: the drafter's own estimate of the accepted length."""
    match_len: int = 0
    """Committed tokens that the look-up matched before drafting (cache sources)."""
    is_local: bool = True
    """Drafted from the request's own prompt and output rather than from other requests."""
    proposal_probs_KV: NDArray[np.float64] | None = None
    parents: tuple[int, ...] = ()
    """Of a tree, the index of the token that each one follows, always an earlier one, or -1 for
    the prefix; the tokens after one parent differ. Empty: a chain."""
    evidence_E: Float32Array | None = field(default=None, compare=False, repr=False)
    """What the cache knows of the draft besides (`drafting.evidence.EVIDENCE_NAMES`)."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_sampled(self) -> bool:
        """Whether looking at the tokens and then dropping the draft would bias the output."""
        return self.proposal_probs_KV is not None

    def cut(self, length: int) -> Draft:
        """The first `length` tokens of a deterministic draft.

        A sampled draft may not be cut after its tokens were seen (papers.md, section 4: the
        second silent breakage), so this is asserted.
        """
        if length >= len(self.token_ids):
            return self
        assert not self.parents, "a tree is verified whole"
        assert not self.is_sampled, "a sampled draft may not be cut once it was looked at"
        probs = self.probs[:length]
        return replace(self, token_ids=self.token_ids[:length], probs=probs, score=sum(probs))


NO_DRAFT = Draft(Source.NONE)


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy wants verified in this cycle."""

    source: Source
    length: int
    """The most draft tokens to verify; 0 with `Source.NONE`."""
    predicted_payoff: float | None = None
    """Expected accepted length of the cache draft, in tokens, where a predictor was asked."""
    tau: float | None = None
    reason: str = ""
    """Why, in a few words, for the log of steps: a skipped draft can always be explained."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The target's own log-probabilities at one emitted token, before sampling changes them."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens and their log-probabilities, best first."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification says of a draft.

    `token_ids` are the accepted draft tokens followed by one bonus token, so its length is
    `accepted + 1`; a verifier with a slim model may let it follow with more of its own.
    """

    accepted: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    hidden: object | None = None
    """The engine's hidden states of the rows it computed, for a model drafter; opaque here.
    None too where the target made no pass."""
    verify_us: float = 0.0
    full_passes: int = 1
    """Passes of the target; 0 where a slim model alone decided."""
    slim_passes: int = 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen from the target's distribution.

    Names and meanings are those of vLLM and the OpenAI endpoints. `temperature=0` is greedy.

    Raises:
        UserError: a value is out of its range; the message names field and value.
    """

    temperature: float = 0.0
    top_k: int = 0
    """0 or -1: all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    """How many of the most likely tokens to report beside each emitted one; None: no logprobs."""

    def __post_init__(self) -> None:
        warm = _is_number(self.temperature) and (
            self.temperature == 0 or self.temperature >= MIN_TEMPERATURE
        )
        _require(warm, "temperature", f"0 or >= {MIN_TEMPERATURE:g}", self)
        _require(_is_count(self.top_k, least=-1), "top_k", f"in -1..{MAX_COUNT}", self)
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "in (0, 1]", self)
        _require(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", "in [0, 1]", self)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_is_number(value) and -2 <= value <= 2, name, "in [-2, 2]", self)
        penalty = self.repetition_penalty
        bounded = _is_number(penalty) and 0.01 <= penalty <= 100
        _require(bounded, "repetition_penalty", "in [0.01, 100]", self)
        _require(_is_count(self.max_tokens, least=1), "max_tokens", f"in 1..{MAX_COUNT}", self)
        allowed = _is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens
        _require(allowed, "min_tokens", "in 0..max_tokens", self)
        given: object = self.stop  # a lone string would pass as a sequence of letters
        stops_are_text = isinstance(given, tuple | list) and all(
            isinstance(s, str) and s for s in given
        )
        _require(stops_are_text, "stop", "a list of non-empty strings", self)
        ids_are_ints = all(_is_int(token) and token >= 0 for token in self.stop_token_ids)
        _require(ids_are_ints, "stop_token_ids", "a list of token ids", self)
        _require(self.seed is None or _is_int(self.seed), "seed", "an integer", self)
        _require(_is_logprob_count(self.logprobs), "logprobs", f"in 0..{MAX_TOP_LOGPROBS}", self)
        for token, bias in self.logit_bias.items():
            known = _is_int(token) and token >= 0 and _is_number(bias) and abs(bias) <= 100
            _require(known, "logit_bias", "a map of token ids to values in [-100, 100]", self)
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))

    def __reduce__(self) -> tuple[object, ...]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["logit_bias"] = dict(self.logit_bias)
        return (_sampling_from_dict, (values,))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Whether a row's distribution depends on which tokens stand before it (penalties)."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


def _sampling_from_dict(values: dict[str, object]) -> SamplingParams:
    return SamplingParams(**values)  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_count(value: object, *, least: int) -> bool:
    return _is_int(value) and least <= value <= MAX_COUNT  # type: ignore[operator]


def _is_logprob_count(value: object) -> bool:
    return value is None or (_is_int(value) and 0 <= value <= MAX_TOP_LOGPROBS)  # type: ignore[operator]


def _require(holds: bool, name: str, expected: str, params: SamplingParams) -> None:
    if not holds:
        raise UserError(f"sampling: {name} must be {expected}, got {getattr(params, name)!r}")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    scope: str = "default"
    """Whose past outputs may be drafted from: tenant, model and adapter, see `scope_key`."""
    allows_loss: bool = False
    """Whether a verification that may change the output is welcome; `full` is used where not."""


def scope_key(*, tenant: str = "default", model: str = "", adapter: str = "") -> str:
    """One string for a tenant, a model and an adapter; different triples never collide."""
    parts = (tenant, model, adapter)
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in parts)


def tenant_of(scope: str) -> str:
    """The tenant of a scope that `scope_key` made, its parts by `cache_salt` included."""
    return scope.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Step:
    """The record of one cycle; the columns of `steps/` (DESIGN, section 5)."""

    cycle: int
    position: int
    """Output tokens committed before this cycle."""
    source: Source
    drafted: int
    accepted: int
    emitted: int
    """Tokens committed in this cycle: `accepted + 1`, less when a stop cut the run, more where a
    slim model went on."""
    match_len: int = 0
    score: float = 0.0
    cache_draft_len: int = 0
    """Length of the cache draft that was looked up, whether it was verified or not."""
    predicted_payoff: float | None = None
    tau: float | None = None
    draft_us: float = 0.0
    verify_us: float = 0.0
    reason: str = ""
    full_passes: int = 1
    slim_passes: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. Text, token ids, log-probabilities and steps end at the same token."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the output, if one did."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    steps: tuple[Step, ...] = ()
    verification: VerificationName = "full"
    """The weakest check that a token of this output passed: lossy only if it was used."""

    @property
    def num_target_passes(self) -> int:
        """One a cycle, or none where a slim model decided; the first also reads the prompt."""
        return sum(step.full_passes for step in self.steps)

    @property
    def num_slim_passes(self) -> int:
        return sum(step.slim_passes for step in self.steps)

    @property
    def emitted_per_pass(self) -> float:
        """Tokens emitted / target passes: the headline figure."""
        return len(self.token_ids) / max(1, self.num_target_passes)


def room_left(*, num_tokens: int, num_generated: int, max_tokens: int, context_length: int) -> int:
    """The most draft tokens that may be verified: one more token, the bonus, must fit as well.

    Args:
        num_tokens: committed tokens, prompt included.
        num_generated: committed output tokens.
        max_tokens: the request's budget of output tokens.
        context_length: the most tokens that the target can hold.
    """
    return max(0, min(max_tokens - num_generated, context_length - num_tokens) - 1)


class TokenBuffer:
    """A growing int32 array whose tail can be read without a copy."""

    def __init__(self, token_ids: Sequence[int] | Int32Array = ()) -> None:
        self._length = len(token_ids)
        self._data = np.empty(max(64, 2 * self._length), dtype=np.int32)
        self._data[: self._length] = token_ids

    def __len__(self) -> int:
        return self._length

    def extend(self, token_ids: Sequence[int] | Int32Array) -> None:
        needed = self._length + len(token_ids)
        if needed > len(self._data):
            grown = np.empty(max(needed, 2 * len(self._data)), dtype=np.int32)
            grown[: self._length] = self._data[: self._length]
            self._data = grown
        self._data[self._length : needed] = token_ids
        self._length = needed

    def view(self, start: int = 0) -> Int32Array:
        """The tokens from `start` on, as a view that the next `extend` may leave stale."""
        return self._data[start : self._length]

    def tail(self, count: int) -> Int32Array:
        """The last `count` tokens at the most, as a view."""
        return self._data[max(0, self._length - count) : self._length]
