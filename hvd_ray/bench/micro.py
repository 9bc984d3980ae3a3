"""What a decision costs: look-up, features and predictor, timed alone and together.

The contexts are the shipped workloads' own texts in the target's tokens: of each prompt the first
half plays the prompt and the second half the output, walked token by token as decoding would. No
target runs. Shapes: B requests decided for in one step, F features.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from random import Random
from time import perf_counter_ns, process_time
from typing import Any, TypeVar

import numpy as np

from hvd_ray.bench.plugin_step import PluginSteps
from hvd_ray.config import Config
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.payoff.estimator import CacheOwnEstimator, PredictorEstimator
from hvd_ray.payoff.features import NUM_FEATURES, FeatureExtractor
from hvd_ray.payoff.joint_policy import BatchSurvivalEstimator
from hvd_ray.payoff.network import Network
from hvd_ray.payoff.policy import Candidates, Policy, ThresholdPolicy
from hvd_ray.payoff.predictor import MlpPredictor, PayoffPredictor, PredictorCard
from hvd_ray.traces.label import label_rate
from hvd_ray.traces.replay import replay
from hvd_ray.traces.schema import Trace
from hvd_ray.traces.walk import Walk
from hvd_ray.types import Float32Array, SamplingParams

BATCH_SIZES = (1, 64)
MIN_TEXT_TOKENS = 32
MIN_STEPS = 50
Result = TypeVar("Result")

DEFINITIONS = {
    "decision_us": "median time to decide for one step, by number of requests in the batch: for "
    "each request the cache's look-up and, where it found a draft, features, predictor and "
    "threshold. The whole batch's time, one thread; *_p99_us is the 99th percentile.",
    "decision_us_per_request": "decision_us / requests in the batch.",
    "lookup_us": "median time of one look-up in the request's own and the shared suffix tree.",
    "features_us": "median time to write one draft's features.",
    "predictor_us": "median time to judge one draft from its features.",
    "predictor_batch_us": "median time to judge so many drafts from their features in one call, as "
    "the joint policy asks.",
    "plugin_step_us": "median time of the vLLM plugin's own work in a step, by requests: "
    "take in a token each, look up, decide jointly by cost. Drafts are judged by the predictor "
    "where it gives a survival curve, else by the cache's own chances.",
    "observe_us": "median time to add one committed token to history and cache.",
    "label_positions_per_second_per_core": "positions labelled by replay, features included.",
    "replay_positions_per_second_per_core": "positions that decoding under the policy would visit, "
    "replayed; reading prompts counts as time.",
}


@dataclass(slots=True)
class _Clock:
    """Collects durations by name; the first `num_skipped` of each are warm-up."""

    num_skipped: int = 10
    times_ns: dict[str, list[int]] = field(default_factory=dict)

    def time(self, name: str, call: Callable[..., Result], *args: Any) -> Result:
        started = perf_counter_ns()
        result = call(*args)
        self.times_ns.setdefault(name, []).append(perf_counter_ns() - started)
        return result

    def us(self, name: str, percentile: float = 50) -> float:
        kept = self.times_ns[name][self.num_skipped :]
        return round(float(np.percentile(kept, percentile)) / 1000, 2)


def micro_figures(
    texts: Sequence[Sequence[int]],
    *,
    predictor: PayoffPredictor,
    extractor: FeatureExtractor,
    config: Config,
    num_decisions: int = 8000,
) -> dict[str, Any]:
    """The figures of `hvd bench --micro`.

    Args:
        texts: token ids of realistic texts; those under `MIN_TEXT_TOKENS` are left out.
        predictor: asked for every draft found.
        extractor: of the features, for the target's tokenizer.
        config: of cache and threshold.
        num_decisions: timed decisions for each batch size, at least.
    """
    traces = [_as_trace(text, i) for i, text in enumerate(_mixed(texts))]
    estimator = PredictorEstimator(predictor, extractor)
    policy = ThresholdPolicy(estimator, config.policy.tau)
    judge = estimator if estimator.has_survival else CacheOwnEstimator()
    clock = _Clock()
    gc.collect()
    gc.disable()
    try:
        for batch_size in BATCH_SIZES:
            _time_steps(traces, batch_size, policy, config, clock, num_decisions)
            _time_plugin(traces, batch_size, judge, config, clock)
        _time_parts(traces, predictor, extractor, config, clock, num_decisions)
    finally:
        gc.enable()
    rate = _label_rate(traces, extractor, config)
    return {
        **_summary(clock),
        "label_positions_per_second_per_core": round(rate),
        "replay_positions_per_second_per_core": round(_replay_rate(traces, policy, config)),
    }


def _summary(clock: _Clock) -> dict[str, Any]:
    decision = {str(size): clock.us(f"decision {size}") for size in BATCH_SIZES}
    figures: dict[str, Any] = {
        "decision_us": decision,
        "decision_p99_us": {str(size): clock.us(f"decision {size}", 99) for size in BATCH_SIZES},
        "decision_us_per_request": {n: round(us / int(n), 2) for n, us in decision.items()},
    }
    for name in ("lookup", "features", "predictor", "observe"):
        figures[f"{name}_us"] = clock.us(name)
        figures[f"{name}_p99_us"] = clock.us(name, 99)
    judged = {str(size): clock.us(f"predictor {size}") for size in BATCH_SIZES}
    steps = {str(size): clock.us(f"plugin step {size}") for size in BATCH_SIZES}
    return {**figures, "predictor_batch_us": judged, "plugin_step_us": steps}


def _time_steps(
    traces: Sequence[Trace],
    batch_size: int,
    policy: ThresholdPolicy,
    config: Config,
    clock: _Clock,
    num_decisions: int,
) -> None:
    """Walk `batch_size` traces at once and time the decisions of each step together."""
    walks = _Walks(traces, config)
    for _ in range(clock.num_skipped + max(MIN_STEPS, num_decisions // batch_size)):
        batch = walks.next_batch(batch_size)
        clock.time(f"decision {batch_size}", _decide, batch, policy)
        walks.advance(batch)


def _decide(batch: Sequence[Walk], policy: ThresholdPolicy) -> None:
    for walk in batch:
        policy.decide(Candidates(cache=walk.look_up()), walk.context)


def _time_plugin(
    traces: Sequence[Trace],
    batch_size: int,
    judge: BatchSurvivalEstimator,
    config: Config,
    clock: _Clock,
) -> None:
    steps = PluginSteps(traces, config, batch_size, judge)
    for _ in range(clock.num_skipped + MIN_STEPS):
        clock.time(f"plugin step {batch_size}", steps.step, steps.next_rows())


def _time_parts(
    traces: Sequence[Trace],
    predictor: PayoffPredictor,
    extractor: FeatureExtractor,
    config: Config,
    clock: _Clock,
    num_decisions: int,
) -> None:
    """Time the parts one by one, features and predictor where there is a draft; then batches."""
    walks = _Walks(traces, config)
    features_1F: Float32Array = np.zeros((1, NUM_FEATURES), dtype=np.float32)
    features: deque[Float32Array] = deque(maxlen=max(BATCH_SIZES))
    for _ in range(clock.num_skipped + num_decisions):
        (walk,) = walks.next_batch(1)
        draft = clock.time("lookup", walk.look_up)
        if draft.token_ids:
            clock.time("features", extractor.write, draft, walk.context, features_1F[0])
            clock.time("predictor", predictor.predict, features_1F)
            features.append(features_1F[0].copy())
        clock.time("observe", walks.advance, [walk])
    for size in BATCH_SIZES:
        features_BF = np.resize(np.array(features), (size, NUM_FEATURES))
        for _ in range(clock.num_skipped + MIN_STEPS):
            clock.time(f"predictor {size}", predictor.predict, features_BF)


class _Walks:
    """Traces walked as a replica would: their outputs enter the shared cache as they come."""

    def __init__(self, traces: Sequence[Trace], config: Config) -> None:
        self._drafter = SuffixDrafter(config.drafting.suffix)
        self._traces = traces
        self._num_started = 0
        self._running: list[Walk] = []

    def next_batch(self, size: int) -> list[Walk]:
        while len(self._running) < size:
            self._running.append(self._start())
        return self._running[:size]

    def advance(self, batch: Sequence[Walk]) -> None:
        """Commit each walk's next token; a finished one makes room for another trace."""
        for walk in batch:
            position = walk.context.num_generated
            walk.commit((walk.trace.output_token_ids[position],))
            if walk.context.num_generated == len(walk.trace.output_token_ids):
                self._drafter.stop(walk.trace.trace_id)
                self._running.remove(walk)

    def _start(self) -> Walk:
        number = self._num_started
        self._num_started += 1
        trace = self._traces[number % len(self._traces)]
        trace = replace(trace, trace_id=f"{trace.trace_id}/{number}")
        self._drafter.start(trace.request())
        return Walk(trace, self._drafter)


def _mixed(texts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The long enough texts, all workloads mixed, always in the same order."""
    long = [text for text in texts if len(text) >= MIN_TEXT_TOKENS]
    assert long, "no text is long enough to walk"
    Random(0).shuffle(long)
    return long


def _as_trace(text: Sequence[int], number: int) -> Trace:
    """First half the prompt, second half the output."""
    half = len(text) // 2
    return Trace(
        trace_id=f"text-{number:05d}",
        prompt_id=str(number),
        workload="micro",
        family="other",
        scope="default",
        session_id=str(number),
        created_at=datetime(2000, 1, 1, tzinfo=UTC) + timedelta(seconds=number),
        model="",
        tokenizer_sha="",
        prompt_token_ids=tuple(text[:half]),
        output_token_ids=tuple(text[half:]),
        finish_reason="length",
        sampling=SamplingParams(max_tokens=len(text) - half),
        context_length=len(text) + 1,
    )


def _label_rate(traces: Sequence[Trace], extractor: FeatureExtractor, config: Config) -> float:
    return label_rate(traces, drafter_config=config.drafting.suffix, extractor=extractor)


def _replay_rate(traces: Sequence[Trace], policy: Policy, config: Config) -> float:
    drafter = SuffixDrafter(config.drafting.suffix)
    started = process_time()
    num_visited = sum(len(replay(trace, policy, drafter=drafter).steps) for trace in traces)
    return num_visited / (process_time() - started)


def untrained_predictor(*, num_hidden: int = 256, num_layers: int = 2) -> MlpPredictor:
    """The usual shape with random weights: judging takes as long, and means nothing."""
    rng = np.random.default_rng(0)
    widths = [NUM_FEATURES, *[num_hidden] * num_layers, 1]
    layers = [
        (
            rng.normal(0, 0.05, (num_in, num_out)).astype(np.float32),
            np.zeros(num_out, dtype=np.float32),
        )
        for num_in, num_out in pairwise(widths)
    ]
    everywhere_F = np.full(NUM_FEATURES, 1e6, dtype=np.float32)
    network = Network(layers, low_F=-everywhere_F, high_F=everywhere_F)
    return MlpPredictor(network, PredictorCard(kind="mlp"))
