"""What the section `hvd` may say."""

from __future__ import annotations

import pytest

from hvd_ray.errors import UserError
from hvd_ray.systems import SYSTEMS
from hvd_ray.vllm_plugin.options import (
    POLICIES,
    Control,
    HvdOptions,
    check_head,
    read_control,
    read_options,
)


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
        ({"polcy": "cost"}, r"setting hvd\.polcy: unknown; is 'policy' meant\?"),
        ({"nothing": 1}, r"setting hvd\.nothing: unknown; choose from policy, eagle3_tokens, "),
        ({"policy": "best"}, "policy"),
        ({"eagle3_tokens": 0}, "eagle3_tokens"),
        ({"cache": {"max_cached_token": 1}}, r"hvd\.cache\.max_cached_token: .*_tokens' meant"),
        ({"cache": {"max_tree_depth": 0}}, r"setting hvd\.cache\.max_tree_depth: "),
        ({"traces": "/tmp/x"}, r"hvd\.traces: must be a mapping of settings \(folder, share, "),
        ({"traces": {"share": 0.5}}, r"setting hvd\.traces\.folder: must be given"),
        ({"traces": {"folder": ""}}, r"setting hvd\.traces\.folder: "),
        ({"payoff": ""}, r"setting hvd\.payoff: "),
        ({"costs": ""}, r"setting hvd\.costs: "),
        ({"policy": "cache", "tau": 3}, "tau"),
        ({"policy": "tau", "costs": "c.json"}, "costs"),
        ([], "setting hvd: must be a mapping of settings"),
    ],
)
def test_what_is_unknown_or_idle_is_refused_by_name(section: object, culprit: str) -> None:
    with pytest.raises(UserError, match=culprit):
        read_options({"hvd": section})


@pytest.mark.parametrize(
    ("section", "num_tokens", "culprit"),
    [
        ({"eagle3_tokens": 4}, None, r"setting hvd\.eagle3_tokens: has no effect without a head"),
        ({"eagle3_tokens": 5}, 4, r"setting hvd\.eagle3_tokens: 5 is more than .*, 4"),
        ({"policy": "eagle3"}, None, r"setting hvd\.policy: 'eagle3' needs a head"),
    ],
)
def test_more_of_a_head_than_there_is_is_refused(
    section: dict[str, object], num_tokens: int | None, culprit: str
) -> None:
    options = read_options({"hvd": section})
    assert options is not None
    with pytest.raises(UserError, match=culprit):
        check_head(options, has_head=bool(num_tokens), num_speculative_tokens=num_tokens or 32)


def test_what_nobody_asked_of_the_head_is_no_mistake() -> None:
    check_head(HvdOptions(), has_head=False, num_speculative_tokens=2)
    check_head(HvdOptions(eagle3_tokens=2), has_head=True, num_speculative_tokens=2)


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
    with pytest.raises(UserError, match="unknown value 0 or false;"):
        read_control(0)  # what vLLM's front end makes of false
