"""Case M05: the front's figures in Ray's metrics."""

from hvd_ray.serving.metrics import FrontMetrics
from hvd_ray.serving.ray_metrics import RayMirror
from hvd_ray.types import Source, Step


class Gauges:
    """Stands in for Ray's."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float] = {}
        self.made: list[str] = []

    def make(self, name: str, about: str, keys: tuple[str, ...]) -> "Gauge":
        assert about
        self.made.append(name)
        return Gauge(self, name, keys)


class Gauge:
    def __init__(self, owner: Gauges, name: str, keys: tuple[str, ...]) -> None:
        self.owner, self.name, self.keys = owner, name, keys

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.keys)
        self.owner.values[self.name, tags.get("source", "")] = value


def test_every_figure_is_copied_under_its_own_name_and_kept_up_to_date() -> None:
    metrics, gauges = FrontMetrics("m"), Gauges()
    mirror = RayMirror(gauges.make)
    step = Step(0, 0, Source.SUFFIX, drafted=4, accepted=2, emitted=3)
    for times in (1, 2):
        metrics.cycles([step])
        metrics.whole(0.5)
        mirror.update(metrics.registry)
        assert gauges.values["hvd_emitted_tokens_total", "suffix"] == 3 * times
        assert gauges.values["vllm_generation_tokens_total", ""] == 3 * times
        assert gauges.values["vllm_e2e_request_latency_seconds_count", ""] == times
    assert len(gauges.made) == len(set(gauges.made))
    assert not any(name.endswith(("_bucket", "_created")) for name in gauges.made)
