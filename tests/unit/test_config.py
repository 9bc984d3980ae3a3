from __future__ import annotations

from pathlib import Path

import pytest

from hvd_ray.config import load_config
from hvd_ray.errors import UserError


def test_file_then_overrides(tmp_path: Path) -> None:
    path = tmp_path / "hvd.yaml"
    path.write_text("dtype: float32\npolicy:\n  tau: 4\n")
    config = load_config(path, ["policy.tau=5.5", "drafting.suffix.max_tree_depth=24"])
    assert (config.dtype, config.policy.tau) == ("float32", 5.5)
    assert config.drafting.suffix.max_tree_depth == 24


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.tua=5", "policy.tua: unknown"),
        ("policy.tau=abc", "policy.tau: .*got 'abc'"),
        ("policy.tau=.nan", "policy.tau: .*finite"),
        ("policy.tau=-1", "policy.tau: .*greater than or equal to 0"),
        ("policy.name=hvd_tua", "policy.name: .*'greedy'"),
        ("drafting.suffix.max_tree_depth=0", "max_tree_depth"),
        ("model.x=1", "model"),
        ("nonsense", "expected key=value"),
        ("=3", "expected key=value"),
        ("policy=[", "not a value"),
        ("seed=2026-13-45", "not a value"),
        ("seed=!!int foo", "not a value"),
        ("seed=" + "[" * 5000, "not a value"),
        ("seed=99999999999999999999", "seed"),
        ("num_threads=99999999999", "num_threads"),
        ("drafting.eagle3.num_tokens=65", "num_tokens"),
        ("tiers.theta_accept=0.4", "^setting tiers: theta_accept must exceed .* got 0.4 and 0.5$"),
    ],
)
def test_bad_settings_are_named(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_config(None, [override])
    assert "\n" not in str(caught.value)
    assert "Value error" not in str(caught.value), "pydantic's words, not ours"


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "a: [", "\x00"])
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hvd.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"hvd\.yaml"):
        load_config(path)
    with pytest.raises(UserError, match="cannot be read"):
        load_config(tmp_path / "absent.yaml")


def test_a_setting_without_effect_warns() -> None:
    with pytest.warns(UserWarning, match=r"policy\.tau has no effect with policy\.name=suffix"):
        load_config(None, ["policy.name=suffix", "policy.tau=3"])


def test_a_setting_of_any_policy_that_runs_has_its_effect(recwarn: pytest.WarningsRecorder) -> None:
    load_config(None, ["policy.tau=3", "policy.min_match=4"], policies=["hvd_tau", "rule_match"])
    assert not recwarn.list


def test_a_policy_name_warns_where_the_command_chooses_the_policies() -> None:
    with pytest.warns(UserWarning, match=r"policy\.name has no effect with greedy, suffix"):
        load_config(None, ["policy.name=ngram"], policies=["greedy", "suffix"])


def test_a_tree_warns_where_only_chains_run() -> None:
    with pytest.warns(UserWarning, match=r"drafting\.eagle3\.tree has no effect with eagle3"):
        load_config(None, ["drafting.eagle3.tree.depth=3"], policies=["eagle3"])
    with pytest.warns(UserWarning, match=r"drafting\.eagle3\.is_sampled has no effect"):
        load_config(None, ["drafting.eagle3.is_sampled=true"], policies=["eagle3_tree"])
