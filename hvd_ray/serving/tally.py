"""What is known of one request as its events come in: tokens, times, cycles, outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from hvd_ray.serving.calls import Event, Opening, Piece, ScoredToken, Span
from hvd_ray.serving.metrics import FrontMetrics
from hvd_ray.types import Source, Step, VerificationName


@dataclass(slots=True)
class Output:
    """One choice as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scores: list[ScoredToken] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    first_s: float | None = None
    """When its first cycle came."""
    num_first: int = 0
    """Tokens of the first cycle."""
    waited_ms: float = 0.0
    verification: VerificationName = "full"

    def add(self, piece: Piece, now_s: float) -> None:
        if self.first_s is None:
            self.first_s, self.num_first = now_s, len(piece.token_ids)
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.scores += piece.scores
        self.spans += piece.spans
        self.steps += [piece.step] if piece.step else []
        self.finish_reason = piece.finish_reason
        self.stop_reason = piece.stop_reason
        self.waited_ms = piece.waited_ms
        self.verification = piece.verification


@dataclass(slots=True)
class Tally:
    """Adds up a request's events, for its answer and for the front's counters."""

    metrics: FrontMetrics
    now: Callable[[], float] = perf_counter
    started_s: float = field(init=False)
    openings: dict[int, Opening] = field(default_factory=dict)
    outputs: dict[int, Output] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.started_s = self.now()

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Opening):
                self.openings[event.prompt_index] = event
                self.metrics.prompt(event.num_prompt_tokens)
            elif isinstance(event, Piece):
                self._add_piece(event)

    def _add_piece(self, piece: Piece) -> None:
        output, now_s = self.outputs.setdefault(piece.choice_index, Output()), self.now()
        if output.first_s is None:
            self.metrics.first_token(now_s - self.started_s)
        output.add(piece, now_s)
        self.metrics.cycles([piece.step] if piece.step else [])
        if piece.finish_reason is not None:
            assert output.first_s is not None
            num_later = len(output.token_ids) - output.num_first
            self.metrics.later_tokens(now_s - output.first_s, num_later)
            self.metrics.whole(now_s - self.started_s)
            self.metrics.ended(piece.finish_reason)

    def forget(self) -> None:
        """The answer begins anew; what the counters have seen was computed all the same."""
        self.openings.clear()
        self.outputs.clear()

    @property
    def num_prompt_tokens(self) -> int:
        return sum(opening.num_prompt_tokens for opening in self.openings.values())

    @property
    def num_output_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs.values())

    @property
    def usage(self) -> dict[str, int]:
        prompt, output = self.num_prompt_tokens, self.num_output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
        }

    @property
    def first_token_s(self) -> float | None:
        """From the request's arrival to its first token."""
        times = [output.first_s for output in self.outputs.values() if output.first_s is not None]
        return min(times) - self.started_s if times else None

    def request_metrics(self) -> dict[str, Any]:
        """vLLM's `metrics`, over all outputs of the request."""
        first_s, whole_s = self.first_token_s, self.now() - self.started_s
        num_tokens = self.num_output_tokens
        later_s = whole_s - first_s if first_s is not None else None
        num_later = num_tokens - sum(output.num_first for output in self.outputs.values())
        steps = [step for output in self.outputs.values() for step in output.steps]
        waits = [output.waited_ms for output in self.outputs.values()]
        return {
            "time_to_first_token_ms": None if first_s is None else first_s * 1e3,
            "generation_time_ms": None if later_s is None else later_s * 1e3,
            "queue_time_ms": max(waits, default=None),
            "mean_itl_ms": later_s * 1e3 / num_later if later_s is not None and num_later else None,
            "tokens_per_second": num_tokens / whole_s if whole_s > 0 else None,
            "speculative_decoding": speculation(steps),
        }


def speculation(steps: Sequence[Step]) -> dict[str, Any] | None:
    """vLLM's per-request figures and, ours, what was verified: `source_share` of target passes.

    None without a target pass. `mean_acceptance_length` counts the bonus token, over the passes
    that verified a draft, as vLLM does; `emitted_per_pass` is over all passes.
    """
    if not steps:
        return None
    drafted = [step for step in steps if step.source is not Source.NONE]
    num_accepted = sum(step.accepted for step in drafted)
    num_drafted = sum(step.drafted for step in drafted)
    num_passes = sum(step.full_passes for step in steps)
    longest = max((step.drafted for step in drafted), default=0)
    histogram = [0] * (longest + 1)
    for step in drafted:
        histogram[step.accepted] += 1
    shares = {
        source.value: sum(step.source is source for step in steps) / len(steps)
        for source in Source
        if any(step.source is source for step in steps)
    }
    return {
        "mean_acceptance_length": 1 + num_accepted / len(drafted) if drafted else 1.0,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
        "acceptance_histogram": histogram if drafted else [],
        "num_spec_steps": len(drafted),
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": longest,
        "num_target_passes": num_passes,
        "num_slim_passes": sum(step.slim_passes for step in steps),
        "emitted_per_pass": sum(step.emitted for step in steps) / max(1, num_passes),
        "source_share": shares,
    }
