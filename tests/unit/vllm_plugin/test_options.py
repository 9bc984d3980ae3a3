"""What the section `hvd` may say."""

from __future__ import annotations

import pytest

from hvd_ray.errors import UserError
from hvd_ray.systems import SYSTEMS
from hvd_ray.vllm_plugin.options import POLICIES, Control, HvdOptions, read_control, read_options


@pytest.mark.parametrize("additional", [None, {}, {"other": 1}, "text"])
def test_without_the_section_nothing_is_configured(additional: object) -> None:
    assert read_options(additional) is None


def test_an_empty_section_configures_the_default_policy() -> None:
    options = read_options({"hvd": {}})
    assert options == HvdOptions()
    assert options.system == "hvd_cost"


def test_every_policy_is_a_system() -> None:
    assert set(POLICIES.values()) <= set(SYSTEMS)


@pytest.mark.parametrize(
    ("section", "culprit"),
    [
        ({"polcy": "cost"}, "polcy"),
        ({"policy": "best"}, "policy"),
        ({"eagle3_tokens": 0}, "eagle3_tokens"),
        ({"cache": {"max_cached_token": 1}}, "max_cached_token"),
        ({"policy": "cache", "tau": 3}, "tau"),
        ({"policy": "tau", "costs": "c.json"}, "costs"),
        ([], "mapping"),
    ],
)
def test_what_is_unknown_or_idle_is_refused_by_name(section: object, culprit: str) -> None:
    with pytest.raises(UserError, match=culprit):
        read_options({"hvd": section})


def test_options_become_the_one_configuration_tree() -> None:
    options = HvdOptions(policy="tau", tau=3.5, payoff="models:/p@champion", eagle3_tokens=2)
    config = options.config("a-model")
    assert config.model == "a-model"
    assert (config.policy.name, config.policy.tau) == ("hvd_tau", 3.5)
    assert config.policy.predictor == "models:/p@champion"
    assert config.drafting.eagle3.num_tokens == config.policy.model_draft_tokens == 2


def test_a_request_says_one_of_four_words() -> None:
    assert read_control(None) is Control.AUTO
    assert [read_control(c.value) for c in Control] == list(Control)
    for wrong in ("on", "", 1, True, ["off"]):
        with pytest.raises(UserError, match="auto, cache, eagle3, off"):
            read_control(wrong)
