"""All chains at once equal one chain at a time, as decoding runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hvd_ray.drafting.eagle3 import Eagle3Config, Eagle3Head
from hvd_ray.drafting.eagle3_chain import chain_steps, pack
from hvd_ray.drafting.eagle3_eval import response_lengths, walk
from hvd_ray.drafting.eagle3_responses import Response
from hvd_ray.drafting.eagle3_states import ResponseStates

from .eagle3_heads import random_head, random_states

VARIANTS: dict[str, Callable[[Eagle3Config], Eagle3Config]] = {
    "plain": lambda config: config,
    "norm_before_residual": lambda config: replace(config, norm_before_residual=True),
    "norm_output": lambda config: replace(config, norm_output=True),
    "bias": lambda config: replace(config, attention_bias=True),
    "qk_norm": lambda config: replace(config, has_qk_norm=True),
    "norm_before_fc": lambda config: replace(config, norm_before_fc=True),
    "fc_norm": lambda config: replace(config, fc_norm=True),
}


def one_chain(
    head: Eagle3Head, states: ResponseStates, root: int, *, num_steps: int, is_forced: bool
) -> list[torch.Tensor]:
    """The chain as decoding runs it: catch up to the root in one pass, then row by row."""
    kv = head.new_kv(capacity=2)
    tokens = states.token_ids_T
    feature_TH = head.combine(states.aux_TA[: root + 1])
    normed_TH, feature_TH = head.extend(kv, tokens[1 : root + 2], feature_TH)
    results = [normed_TH[-1]]
    for step in range(1, num_steps):
        draft = head.target_ids(head.logits(results[-1][None]).argmax(-1))
        token = tokens[root + 1 + step : root + 2 + step] if is_forced else draft
        normed_1H, feature_TH = head.extend(kv, token, feature_TH[-1:])
        results.append(normed_1H[0])
    return results


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("is_forced", [True, False])
def test_packed_chains_equal_single_chains(variant: str, is_forced: bool) -> None:
    head = random_head(variant=VARIANTS[variant])
    sequences = [random_states(head, num_prompt=n, num_output=m) for n, m in ((5, 6), (3, 9))]
    rows = pack(sequences, num_steps=3)
    steps: list[torch.Tensor] = []

    def feed(step: int) -> torch.Tensor:
        if is_forced:
            return rows.forced_RK[:, step]
        return head.target_ids(head.logits(steps[-1]).argmax(-1))

    for normed_RH in chain_steps(head, rows, num_steps=3, feed=feed):
        steps.append(normed_RH)
    first = 0
    for states in sequences:
        num_roots = states.num_rows - 2
        for index in range(num_roots):
            root = len(states.token_ids_T) - states.num_rows + index
            reach = min(3, num_roots - index) if is_forced else 3
            single = one_chain(head, states, root, num_steps=reach, is_forced=is_forced)
            for step, expected_H in enumerate(single):
                torch.testing.assert_close(
                    steps[step][first + index], expected_H, atol=2e-5, rtol=1e-4
                )
        first += num_roots


def test_labels_are_the_target_states_two_tokens_after_the_root() -> None:
    head = random_head()
    states = random_states(head, num_prompt=4, num_output=5)
    rows = pack([states], num_steps=2)
    # Root r stands at position 3 + r; it is fed token 4 + r and predicts token 5 + r, whose
    # distribution is the target's state at position 4 + r: row 1 + r of `final_RH`.
    assert rows.root_R.tolist() == [3, 4, 5, 6]
    torch.testing.assert_close(rows.final_RH, states.final_RH[1:-1])
    assert rows.next_token_T[rows.root_R].tolist() == states.token_ids_T[4:8].tolist()
    assert rows.forced_RK[:, 1].tolist()[:3] == states.token_ids_T[5:8].tolist()
    assert rows.is_valid_RK.tolist() == [[True, True], [True, True], [True, True], [True, False]]
    assert rows.label_row_RK.tolist() == [[0, 1], [1, 2], [2, 3], [3, 3]]


def test_accepted_lengths_count_to_the_first_difference() -> None:
    head = random_head()
    states = random_states(head, num_prompt=4, num_output=8)
    root = len(states.token_ids_T) - states.num_rows
    drafts = [
        int(head.target_ids(head.logits(normed[None]).argmax(-1)))
        for normed in one_chain(head, states, root, num_steps=3, is_forced=False)
    ]
    tokens = states.token_ids_T.clone()
    tokens[root + 2 : root + 4] = torch.tensor(drafts[:2])
    tokens[root + 4] = (drafts[2] + 1) % head.config.vocab_size
    recorded = replace(states, token_ids_T=tokens)
    assert response_lengths(head, recorded, num_steps=3)[0] == 2


def test_walk_visits_as_decoding_would() -> None:
    quality = walk([2, 0, 0, 1, 0, 0], num_steps=4)
    # Seven tokens: one from the prompt's pass, then cycles at 0 (2 accepted), 3 (1) and 5 (0).
    assert (quality.tokens, quality.passes, quality.drafted) == (7, 4, 3)
    assert quality.reached == [2, 1, 0, 0]
    assert quality.emitted_per_pass == 7 / 4
    assert quality.accuracy_by_position[:2] == [2 / 6, 1 / 2]


def test_held_out_is_decided_by_the_prompt_alone() -> None:
    def response(token: int, temperature: float) -> Response:
        return Response(
            prompt_id=f"{token}@{temperature}",
            family="chat",
            workload="own_chat",
            temperature=temperature,
            prompt_token_ids=(1, token),
            output_token_ids=(2, 3),
        )

    flags = {token: response(token, 0.0).is_held_out for token in range(2000)}
    assert all(response(token, 0.7).is_held_out == flag for token, flag in flags.items())
    assert 0.02 < sum(flags.values()) / len(flags) < 0.06
