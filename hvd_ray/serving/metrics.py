"""What a front counts: under vLLM's names where vLLM has one, `hvd_*` for the rest.

Tokens are counted, never chunks: a cycle that emits five tokens in one chunk is five tokens.
"""

from __future__ import annotations

from collections import Counter as Counted
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hvd_ray.serving.calls import ReplicaState
from hvd_ray.types import Source, Step

TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
PER_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
WHOLE_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class FrontMetrics:
    """Counters of one front, with a registry of their own."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.passes: Counted[str] = Counted()
        """Target passes since the start, by what they verified."""
        self._model = {"model_name": model, "engine": "0"}
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Cycles that verified a draft")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted tokens")
        self._accepted_at = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted, by place", "position"
        )
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens read")
        self._generated = self._counter("vllm:generation_tokens", "Output tokens")
        self._success = self._counter("vllm:request_success", "Outputs ended", "finished_reason")
        self._running = self._gauge("vllm:num_requests_running", "Outputs being decoded")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Outputs in the queue")
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "To the first", TTFT_S)
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "A later token, mean of one", PER_TOKEN_S
        )
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "The whole", WHOLE_S)
        self._cycles = self._counter("hvd_steps", "Cycles, by what they verified", "source")
        self._passes = self._counter("hvd_passes", "Passes of the target and a slim model", "tier")
        self._source_drafted = self._counter("hvd_draft_tokens", "Drafted tokens", "source")
        self._source_accepted = self._counter("hvd_accepted_tokens", "Accepted tokens", "source")
        self._source_emitted = self._counter("hvd_emitted_tokens", "Output tokens", "source")
        self._rejected = self._counter("hvd_rejected_requests", "Requests refused", "status")
        self._disconnects = self._counter("hvd_client_disconnects", "Clients that left early")
        self._cached = self._gauge("hvd_cache_tokens", "Output tokens in the draft caches")
        self._is_alive = self._gauge("hvd_replicas_alive", "Replicas whose decoding thread lives")
        self._audited = self._gauge(
            "hvd_tier_audited_tokens", "Unchecked tokens that the target read later", "verification"
        )
        self._missed = self._gauge(
            "hvd_tier_missed_tokens", "Of them, those that it would not choose", "verification"
        )
        self._miss_rate_upper = self._gauge(
            "hvd_tier_miss_rate_upper", "Their share at most, 95 % confidence", "verification"
        )
        self._trusting = self._gauge(
            "hvd_tier_trusted", "Replicas whose slim model may commit tokens", "verification"
        )
        self._is_refused = self._gauge(
            "hvd_settings_refused", "Whether the latest settings were refused and older ones serve"
        )

    def cycles(self, steps: Sequence[Step]) -> None:
        """Count target passes and what they verified."""
        for step in steps:
            source = {"source": step.source.value}
            self.passes[step.source.value] += 1
            self._cycles.labels(**self._model, **source).inc()
            self._source_emitted.labels(**self._model, **source).inc(step.emitted)
            self._generated.labels(**self._model).inc(step.emitted)
            self._passes.labels(**self._model, tier="full").inc(step.full_passes)
            self._passes.labels(**self._model, tier="slim").inc(step.slim_passes)
            if step.source is Source.NONE:
                continue
            self._drafts.labels(**self._model).inc()
            self._drafted.labels(**self._model).inc(step.drafted)
            self._accepted.labels(**self._model).inc(step.accepted)
            self._source_drafted.labels(**self._model, **source).inc(step.drafted)
            self._source_accepted.labels(**self._model, **source).inc(step.accepted)
            for position in range(step.accepted):
                self._accepted_at.labels(**self._model, position=str(position)).inc()

    def prompt(self, num_tokens: int) -> None:
        self._prompt.labels(**self._model).inc(num_tokens)

    def ended(self, reason: str) -> None:
        self._success.labels(**self._model, finished_reason=reason).inc()

    def first_token(self, seconds: float) -> None:
        self._ttft.labels(**self._model).observe(seconds)

    def later_tokens(self, seconds: float, num_tokens: int) -> None:
        """The mean time of an output's tokens after those of its first cycle."""
        if num_tokens > 0:
            self._per_token.labels(**self._model).observe(seconds / num_tokens)

    def whole(self, seconds: float) -> None:
        self._whole.labels(**self._model).observe(seconds)

    def rejected(self, status: int) -> None:
        self._rejected.labels(**self._model, status=str(status)).inc()

    def disconnected(self) -> None:
        self._disconnects.labels(**self._model).inc()

    def exposition(self, state: ReplicaState | None) -> bytes:
        """The text that Prometheus scrapes, with how the replicas are doing now; None: none is."""
        if state is None:
            for gauge in (self._running, self._waiting, self._is_alive):
                gauge.labels(**self._model).set(0)
        else:
            self._note(state)
        return generate_latest(self.registry)

    def _note(self, state: ReplicaState) -> None:
        self._running.labels(**self._model).set(state.num_running)
        self._waiting.labels(**self._model).set(state.num_waiting)
        self._cached.labels(**self._model).set(state.num_cached_tokens)
        self._is_alive.labels(**self._model).set(state.num_alive if state.is_alive else 0)
        self._is_refused.labels(**self._model).set(state.refused is not None)
        for name, audited in state.audits.items():
            labels = {**self._model, "verification": name}
            self._audited.labels(**labels).set(audited.num_tokens)
            self._missed.labels(**labels).set(audited.num_missed)
            self._miss_rate_upper.labels(**labels).set(audited.miss_rate_upper)
            self._trusting.labels(**labels).set(audited.num_trusting)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        counter = Counter(name, about, [*self._model, *labels], registry=self.registry)
        if not labels:
            counter.labels(**self._model)  # there from the start, at zero
        return counter

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(name, about, [*self._model, *labels], registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, about, list(self._model), registry=self.registry, buckets=buckets)
