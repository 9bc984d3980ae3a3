"""What the front and a replica say to each other: calls one way, events the other.

All of it is plain data, so that it crosses processes; nothing here imports an engine or Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hvd_ray.types import FinishReason, SamplingParams, Step, VerificationName

Mode = Literal["off", "cache", "eagle3", "auto"]
MODES: tuple[Mode, ...] = ("off", "cache", "eagle3", "auto")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


Prompt = str | tuple[int, ...] | tuple[Message, ...]
"""Text, token ids, or a conversation that the chat template renders."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a client, checked as far as can be without a tokenizer."""

    request_id: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_choices: int = 1
    """Outputs for each prompt (`n`)."""
    tenant: str = "local"
    """Set by the front from the API key; scopes the cache."""
    salt: str | None = None
    """The client's own partition of its tenant's cache (`cache_salt`)."""
    session: str | None = None
    """Requests of one session go to one replica while it has room."""
    mode: Mode = "auto"
    verification: VerificationName = "full"
    """Who checks drafts; a lossy one is the client's own wish."""
    max_tokens: int | None = None
    """As the client gave it; None: what the context leaves. 0 with `scores_prompt` or `echo`."""
    usual_tokens: int | None = None
    """What a client that gave no `max_tokens` expects; None: as many as may be."""
    prompt_logprobs: int | None = None
    """Score the prompt's own tokens, with so many of the most likely ones beside each."""
    shows_prompt: bool = False
    """Whether the prompt's text and token ids are wanted back."""
    shows_spans: bool = False
    """Whether each cycle's text is wanted split by who proposed it."""
    keeps_stop: bool = False
    """Whether the text ends with the stop string that was met."""
    limit_s: float = 600.0
    """Seconds after which the request is given up."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with the target's log-probability of it and of its likeliest rivals."""

    token_id: int
    text: str
    logprob: float | None
    """None: the first token of a prompt, of which nothing can be said."""
    top: tuple[tuple[str, float], ...] = ()
    """Text and log-probability of the most likely tokens, best first."""


@dataclass(frozen=True, slots=True)
class Span:
    """Text of one cycle by one proposer; `none` is the target itself."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Opening:
    """A prompt was read: what is known before its first output token."""

    prompt_index: int
    num_prompt_tokens: int
    prompt_text: str = ""
    prompt_token_ids: tuple[int, ...] = ()
    prompt_scores: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """What one cycle added to one output."""

    choice_index: int
    text: str
    token_ids: tuple[int, ...] = ()
    scores: tuple[ScoredToken, ...] = ()
    step: Step | None = None
    spans: tuple[Span, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    waited_ms: float = 0.0
    """In the queue, before the output's first cycle."""
    verification: VerificationName = "full"
    """The weakest check that a token of the output has passed so far."""


FailureKind = Literal["bad_request", "busy", "timeout", "fault", "dead"]


@dataclass(frozen=True, slots=True)
class Failure:
    """The request ends here, unfinished."""

    kind: FailureKind
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float = 1.0


Event = Opening | Piece | Failure


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What a replica serves; stays the same for its life."""

    model: str
    root: str
    engine: str
    dtype: str
    context_length: int
    modes: tuple[Mode, ...]
    verifications: tuple[VerificationName, ...] = ("full",)
    """What a request may ask for."""


@dataclass(frozen=True, slots=True)
class Audited:
    """What the target has found of the tokens that a lossy verification did not show it."""

    num_tokens: int
    num_missed: int
    """Of them, those that the target would not have chosen."""
    miss_rate_upper: float
    """At 95 % confidence; of several replicas, the highest."""
    num_trusting: int
    """Replicas that let a slim model commit tokens now."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """How a replica is doing, or several together."""

    facts: ReplicaFacts
    is_alive: bool
    """Whether any of them decodes."""
    num_running: int = 0
    """Outputs being decoded, step by step in turn."""
    num_waiting: int = 0
    num_cached_tokens: int = 0
    policy: str = ""
    tau: float | None = None
    predictor: str | None = None
    notes: tuple[str, ...] = ()
    """Why no better policy serves, and what to doubt of the one that does."""
    refused: str | None = None
    """Why the latest change of settings was refused; the ones before it stay."""
    fault: str | None = None
    """Why the decoding thread ended."""
    num_replicas: int = 1
    num_alive: int = 1
    audits: Mapping[VerificationName, Audited] = field(default_factory=dict)
    """Of the verifications that requests may ask for and that leave tokens unchecked."""


def together(states: Sequence[ReplicaState]) -> ReplicaState:
    """One state of all replicas: counts added up, policies named where they differ."""
    alive = [state for state in states if state.is_alive]
    shown = alive or states
    first = shown[0]
    return ReplicaState(
        first.facts,
        is_alive=bool(alive),
        num_running=sum(state.num_running for state in states),
        num_waiting=sum(state.num_waiting for state in states),
        num_cached_tokens=sum(state.num_cached_tokens for state in states),
        policy=", ".join(dict.fromkeys(state.policy for state in shown)),
        tau=first.tau,
        predictor=", ".join(dict.fromkeys(s.predictor for s in shown if s.predictor)) or None,
        notes=tuple(dict.fromkeys(note for state in shown for note in state.notes)),
        refused=next((state.refused for state in shown if state.refused), None),
        fault=next((state.fault for state in states if state.fault), None),
        num_replicas=len(states),
        num_alive=len(alive),
        audits={name: _audits_together(name, states) for name in first.audits},
    )


def _audits_together(name: VerificationName, states: Sequence[ReplicaState]) -> Audited:
    found = [state.audits[name] for state in states if name in state.audits]
    return Audited(
        sum(audited.num_tokens for audited in found),
        sum(audited.num_missed for audited in found),
        max(audited.miss_rate_upper for audited in found),
        sum(audited.num_trusting for audited in found),
    )
