"""A front's figures in Ray's own metrics, so that Ray's endpoint and dashboards show them too.

`/metrics` of the front is the source; every few seconds its counters, gauges and the sums of its
histograms are copied into gauges of Ray, under the same names with `ray_` before them and `_` for
`:`. Counters stay counters to whoever reads them, since they only rise.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

_log = logging.getLogger(__name__)

SECONDS = 5.0
_LEFT_OUT = ("_bucket", "_created")
"""Of histograms, what makes up most lines and can be read at the front's own endpoint."""


class GaugeLike(Protocol):
    """What is used of `ray.util.metrics.Gauge`."""

    def set(self, value: float, tags: dict[str, str]) -> None: ...


def ray_gauge(name: str, about: str, keys: tuple[str, ...]) -> GaugeLike:
    from ray.util.metrics import Gauge

    gauge: GaugeLike = Gauge(name, description=about, tag_keys=keys)
    return gauge


@dataclass(slots=True)
class RayMirror:
    """Copies of a registry's samples."""

    make: Callable[[str, str, tuple[str, ...]], GaugeLike] = ray_gauge
    _gauges: dict[str, GaugeLike] = field(default_factory=dict, init=False)

    def update(self, registry: CollectorRegistry) -> None:
        """Bring the copies up to date."""
        for family in registry.collect():
            for sample in family.samples:
                if not sample.name.endswith(_LEFT_OUT):
                    self._set(sample, family.documentation)

    def _set(self, sample: Any, about: str) -> None:
        name = sample.name.replace(":", "_")
        if name not in self._gauges:
            self._gauges[name] = self.make(name, about, tuple(sample.labels))
        self._gauges[name].set(sample.value, tags=dict(sample.labels))


async def mirror_for_ever(front: Any, seconds: float = SECONDS) -> None:
    """Copy a front's figures into Ray's every few seconds, as long as the front lives."""
    from hvd_ray.serving.api_error import ApiError

    mirror = RayMirror()
    while True:
        await asyncio.sleep(seconds)
        try:
            front.metrics.exposition(await front.backend.state())
        except ApiError as error:
            _log.info("the state of the replicas is not known now: %s", error.message)
            front.metrics.exposition(None)
        mirror.update(front.metrics.registry)
