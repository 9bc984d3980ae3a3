"""What a predictor is called in results and on the server's page."""

from pathlib import Path

from hvd_ray.config import Config
from hvd_ray.parts import payoff
from hvd_ray.shipped import shipped_folder
from hvd_ray.tracking import CHAMPION, register_predictor, resolve_predictor, tracked


def test_a_predictor_that_nobody_named_is_called_by_what_can_be_typed(
    tmp_path: Path, hvd_home: Path
) -> None:
    shipped = shipped_folder("smollm2-135m", "payoff")
    assert shipped is not None
    config = Config.model_validate({"tracking": {"uri": f"sqlite:///{hvd_home}/runs.db"}})
    assert payoff._unnamed(shipped, config) == "shipped for smollm2-135m"
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "predictor.json").write_text("{}")
    with tracked(config, run_name="train") as tracker:
        version = register_predictor(tracker, tmp_path / "own", config=config, alias=CHAMPION)
    folder = resolve_predictor(config=config)
    assert payoff._unnamed(folder, config) == f"champion {version.ref}"
