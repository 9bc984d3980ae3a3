"""Several replicas' figures as one Prometheus exposition, each sample with its replica's name.

They are not added up: a replica that ends takes its counters with it, and a sum that falls would
look like a restart to whoever scrapes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "replica"


class _Merged(Collector):
    """Families of all replicas, each family once."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._families: dict[str, Metric] = {}
        for replica, text in texts.items():
            for family in text_string_to_metric_families(text):
                self._add(family, replica)

    def _add(self, family: Metric, replica: str) -> None:
        kept = self._families.setdefault(
            family.name, Metric(family.name, family.documentation, family.type)
        )
        for sample in family.samples:
            kept.add_sample(sample.name, {**sample.labels, LABEL: replica}, sample.value)

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()


def merged(texts: Mapping[str, str]) -> str:
    """One exposition of several, given by the names of their replicas.

    Raises:
        ValueError: a text is no exposition.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(texts))
    return generate_latest(registry).decode()
