"""Several replicas' figures as one exposition."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hvd_ray.serving.expositions import merged


def exposition(steps: int, running: int) -> str:
    registry = CollectorRegistry()
    Counter("hvd_steps", "Cycles", ["source"], registry=registry).labels("suffix").inc(steps)
    Gauge("vllm:num_requests_running", "Now", registry=registry).set(running)
    Histogram("vllm:e2e_seconds", "Whole", buckets=(1, 2), registry=registry).observe(1.5)
    return generate_latest(registry).decode()


def test_every_sample_says_whose_it_is_and_families_stay_together() -> None:
    text = merged({"a": exposition(3, 1), "b": exposition(5, 2)})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    steps = families["hvd_steps"]
    assert (steps.type, steps.documentation) == ("counter", "Cycles")
    values = {
        (sample.labels["replica"], sample.labels["source"]): sample.value
        for sample in steps.samples
        if sample.name == "hvd_steps_total"
    }
    assert values == {("a", "suffix"): 3, ("b", "suffix"): 5}
    lines = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(lines) == len(set(lines))
    buckets = [s for s in families["vllm:e2e_seconds"].samples if s.name.endswith("_bucket")]
    assert len(buckets) == 2 * 3
    assert families["vllm:num_requests_running"].type == "gauge"


def test_one_replica_keeps_all_its_figures() -> None:
    before = exposition(3, 1)
    after = merged({"a": before})
    assert (
        after.replace(',replica="a"', "").replace('{replica="a"}', "").replace('replica="a",', "")
        == before
    )


def test_nothing_is_nothing_and_nonsense_is_named() -> None:
    assert merged({}) == ""
    with pytest.raises(ValueError, match="nonsense"):
        merged({"a": "nonsense nonsense nonsense"})
