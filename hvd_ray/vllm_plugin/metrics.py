"""What the plugin counts, and how the counts reach vLLM's `/metrics`.

The worker that drafts is often another process than the one that answers `/metrics`, so it leaves
its counts in a small file under HVD_HOME, about once a second, and the front end reads them when it
is scraped. Names end as Prometheus wants: `_total` for what only rises.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from hvd_ray.errors import UserError
from hvd_ray.home import ensure_dir, hvd_home
from hvd_ray.types import Source, Step

if TYPE_CHECKING:
    from hvd_ray.context import DraftOutcome

_log = logging.getLogger(__name__)
WRITE_EVERY_S = 1.0
STALE_S = 7 * 86_400.0
"""An engine that served nothing for so long loses its counts in `/metrics` until it does."""
HELP = {
    "hvd_steps_total": "Cycles of requests by the source of the draft they verified.",
    "hvd_draft_tokens_total": "Draft tokens verified, by source.",
    "hvd_accepted_tokens_total": "Draft tokens accepted, by source.",
    "hvd_emitted_tokens_total": "Tokens emitted, bonus tokens included, by source.",
    "hvd_skipped_total": "Cycles of requests without a draft, by reason.",
    "hvd_fallbacks_total": "Cycles in which the head drafted, the cache's draft being declined.",
    "hvd_predictions_total": "Cache drafts whose payoff was predicted and has come out.",
    "hvd_predicted_tokens_total": "Their predicted accepted length, summed.",
    "hvd_actual_tokens_total": "Their actual accepted length, summed.",
    "hvd_prediction_error_tokens_total": "Their distance between predicted and actual, summed.",
    "hvd_lookup_seconds_total": "Time spent on cache look-ups.",
    "hvd_decision_seconds_total": "Time spent on features, predictor and policy.",
    "hvd_head_seconds_total": "Time spent in the EAGLE-3 head.",
    "hvd_lookups_left_out_total": "Look-ups left out for want of time (option lookup_ms).",
    "hvd_cache_evictions_total": "Outputs that left the cache to make room.",
    "hvd_cache_tokens": "Output tokens in the cache, over all scopes.",
    "hvd_cache_scopes": "Scopes with outputs in the cache.",
    "hvd_requests": "Requests that the plugin keeps in view.",
    "hvd_traces": "Production traces written since the start.",
    "hvd_traces_dropped": "Sampled requests that have ended and gave no trace.",
}

Key = tuple[str, str, str]
"""Name, label's name, label's value; empty where there is no label."""


@dataclass(slots=True)
class Counters:
    """Plain numbers of one worker."""

    values: dict[Key, float] = field(default_factory=dict)

    def add(self, name: str, amount: float = 1.0, **label: str) -> None:
        """Raise a counter."""
        key = _key(name, label)
        self.values[key] = self.values.get(key, 0.0) + amount

    def put(self, name: str, value: float) -> None:
        """Set a gauge."""
        self.values[_key(name, {})] = value

    def get(self, name: str, **label: str) -> float:
        """A number; 0 before the first."""
        return self.values.get(_key(name, label), 0.0)

    def count_step(self, step: Step, *, skipped: str) -> None:
        """One cycle of one request; `skipped` says why it had no draft, where it had none."""
        source = str(step.source)
        self.add("hvd_steps_total", source=source)
        self.add("hvd_draft_tokens_total", step.drafted, source=source)
        self.add("hvd_accepted_tokens_total", step.accepted, source=source)
        self.add("hvd_emitted_tokens_total", step.emitted, source=source)
        if step.source == Source.NONE:
            self.add("hvd_skipped_total", reason=skipped)
        if step.source == Source.EAGLE3 and step.cache_draft_len:
            self.add("hvd_fallbacks_total")

    def count_outcome(self, outcome: DraftOutcome) -> None:
        """A cache draft has come out, verified or not."""
        if outcome.predicted is not None:
            self.add("hvd_predictions_total")
            self.add("hvd_predicted_tokens_total", outcome.predicted)
            self.add("hvd_actual_tokens_total", outcome.accepted_len)
            error = abs(outcome.predicted - outcome.accepted_len)
            self.add("hvd_prediction_error_tokens_total", error)


def _key(name: str, label: dict[str, str]) -> Key:
    assert name in HELP, name
    return (name, *next(iter(label.items()), ("", "")))


@dataclass(slots=True)
class CountFile:
    """The worker's side of the file."""

    path: Path
    _written_at: float = field(default=float("-inf"), init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _is_failing: bool = field(default=False, init=False)
    _later: threading.Timer | None = field(default=None, init=False)
    _is_removed: bool = field(default=False, init=False)

    def write(self, counters: Counters, *, now: bool = False) -> None:
        """Leave the counts for the front end, a little later if that was done just now.

        Later, because no step may follow for hours. Steps call it, and the writer of traces from
        its own thread; to neither does it matter that a disk is full.
        """
        with self._lock:
            wait_s = 0.0 if now else self._written_at + WRITE_EVERY_S - monotonic()
            if self._is_removed or (wait_s > 0 and self._later is not None):
                return
            if wait_s > 0:
                self._later = threading.Timer(wait_s, self.write, (counters,), {"now": True})
                self._later.daemon = True
                self._later.start()
                return
            self._forget_later()
            self._written_at = monotonic()
            self._try_to_replace(list(counters.values.items()))

    def _forget_later(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def _try_to_replace(self, items: list[tuple[Key, float]]) -> None:
        try:
            self._replace(items)
            self._is_failing = False
        except (OSError, UserError) as error:
            if not self._is_failing:
                _log.warning("hvd: the counts in /metrics stand still: %s", error)
            self._is_failing = True

    def _replace(self, items: list[tuple[Key, float]]) -> None:
        draft = self.path.with_suffix(f".{os.getpid()}.tmp")
        ensure_dir(self.path.parent)
        rows = [[*key, value] for key, value in items]
        draft.write_text(json.dumps(rows), encoding="utf-8")
        draft.replace(self.path)

    def remove(self) -> None:
        """The engine ends; nothing is written any more."""
        with self._lock:
            self._is_removed = True
            self._forget_later()
            self.path.unlink(missing_ok=True)

    def remove_stale(self) -> None:
        """Clear away what engines that were killed left behind."""
        for path in self.path.parent.glob("counts-*"):
            with suppress(FileNotFoundError):  # another engine clears up too
                if time() - path.stat().st_mtime > STALE_S:
                    path.unlink()


def count_file(instance_id: str) -> Path:
    """Where the worker of an engine leaves its counts."""
    return hvd_home() / "vllm" / f"counts-{instance_id}.json"


def read_counts(path: Path) -> dict[Key, float]:
    """The counts that a worker left; none before its first step."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return {(name, label, value): number for name, label, value, number in rows}


@dataclass(frozen=True, slots=True)
class CountCollector:
    """The front end's side, as a Prometheus collector: reads the file when it is scraped."""

    path: Path
    model: str

    def collect(self) -> Iterator[Any]:
        """The families of the file's numbers."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for (name, label, value), number in sorted(read_counts(self.path).items()):
            family = families.get(name)
            if family is None:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                labels = ["model_name", *([label] if label else [])]
                family = kind(name, HELP[name], labels=labels)
                families[name] = family
            family.add_metric([self.model, *([value] if label else [])], number)
        yield from families.values()

    def describe(self) -> list[Any]:
        """Nothing is known before the first step; several engines may register."""
        return []


def publish(path: Path, *, model: str) -> None:
    """Show a worker's counts in this process's `/metrics`."""
    from prometheus_client import REGISTRY

    REGISTRY.register(CountCollector(path, model))
