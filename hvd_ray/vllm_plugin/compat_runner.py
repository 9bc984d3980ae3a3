"""Every name of vLLM's model runner that the plugin reads: requests, rows, the head's arguments.

The other half of `compat.py`, for the same exact version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvd_ray.errors import UserError
from hvd_ray.types import SamplingParams, Step, scope_key
from hvd_ray.vllm_plugin.backlog import Rows, split_rows
from hvd_ray.vllm_plugin.compat import CONTROL_KEY, SCOPE_KEY
from hvd_ray.vllm_plugin.options import Control, read_control
from hvd_ray.vllm_plugin.requests import Profile, Row, Tracked


def profile_of(model: str, state: Any) -> Profile:
    """What a request brought along, from the runner's state of it.

    A request whose front end did not say whose it is (it runs no plugin) shares with nobody.
    One that samples with a seed of its own gets no draft unless it names a source: vLLM draws
    other numbers for a draft's rows, and drafts hang on what was said before, so that it would
    not repeat itself.
    """
    params = state.sampling_params
    extra = params.extra_args or {}
    salt = extra.get(SCOPE_KEY)
    tenant = f"salt:{salt}" if salt is not None else f"request:{state.req_id}"
    control = read_control(extra.get(CONTROL_KEY))
    is_seeded = control is Control.AUTO and params.sampling_type.name == "RANDOM_SEED"
    adapter = state.lora_request
    stops = {*(params.stop_token_ids or ()), params.eos_token_id} - {None}
    return Profile(
        scope=scope_key(
            tenant=tenant,
            model=model,
            adapter=f"{adapter.lora_int_id}:{adapter.lora_name}" if adapter else "",
        ),
        control=Control.OFF if is_seeded else control,
        max_tokens=params.max_tokens,
        stop_token_ids=frozenset(stops),
        is_readable=state.prompt_token_ids is not None and state.prompt_embeds is None,
        is_seeded=is_seeded,
    )


def sampling_of(state: Any) -> SamplingParams | None:
    """A request's parameters under our names, its stop strings left out; None where one of them
    is nothing that our traces can hold."""
    params = state.sampling_params
    try:
        return SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.logit_bias or {},
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=tuple(params.stop_token_ids or ()),
            ignore_eos=params.ignore_eos,
            seed=params.seed,
            logprobs=params.logprobs,
        )
    except UserError:
        return None


def rows_of(runner: Any, sampled_token_ids: Sequence[Sequence[int]]) -> list[Row]:
    """The requests of the step that the runner has just sampled for, in its order."""
    batch, drafted_B = runner.input_batch, runner.num_decode_draft_tokens.np
    rows = []
    for index, sampled in enumerate(sampled_token_ids):
        request_id = batch.req_ids[index]
        rows.append(
            Row(
                request_id,
                runner.requests[request_id],
                batch.token_ids_cpu[index, : batch.num_tokens_no_spec[index]],
                int(batch.num_prompt_tokens[index]),
                len(sampled),
                max(0, int(drafted_B[index])),
            )
        )
    return rows


def rows_for_head(step: dict[str, Any]) -> list[Rows] | None:
    """The rows of each request that `propose` was called for; None where they are not plain.

    Args:
        step: the arguments of `SpecDecodeBaseProposer.propose`.
    """
    positions, metadata = step["target_positions"], step["common_attn_metadata"]
    if step.get("mm_embed_inputs") is not None or positions.dim() != 1:
        return None
    return split_rows(
        metadata.query_start_loc_cpu.tolist(),
        ends=metadata.seq_lens_cpu_upper_bound.tolist(),  # exact where scheduling is synchronous
        token_ids_N=step["target_token_ids"],
        hidden_NA=step["target_hidden_states"],
        slots_N=metadata.slot_mapping,
    )


def step_of_rows(
    step: dict[str, Any], indices: Sequence[int], rows: Sequence[Rows]
) -> dict[str, Any]:
    """The arguments of `propose` for some of a step's requests, with all rows that they have."""
    from vllm.utils.torch_utils import async_tensor_h2d
    from vllm.v1.attention.backend import CommonAttentionMetadata

    whole = step["common_attn_metadata"]
    send = partial(async_tensor_h2d, device=whole.seq_lens.device)
    index_B = send(np.array(indices))
    lengths = [len(part) for part in rows]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    ends = torch.tensor([part.end for part in rows], dtype=torch.int32)
    positions_N = np.concatenate([np.arange(part.start, part.end) for part in rows])
    metadata = CommonAttentionMetadata(
        query_start_loc=send(starts),
        query_start_loc_cpu=starts,
        seq_lens=send(ends.clone()),
        seq_lens_cpu_upper_bound=ends,
        num_reqs=len(rows),
        num_actual_tokens=sum(lengths),
        max_query_len=max(lengths),
        max_seq_len=max(part.end for part in rows),
        block_table_tensor=whole.block_table_tensor[index_B],
        slot_mapping=torch.cat([part.slots_N for part in rows]),
    )
    return {
        **step,
        "target_token_ids": torch.cat([part.token_ids_N for part in rows]),
        "target_positions": send(positions_N),
        "target_hidden_states": torch.cat([part.hidden_NA for part in rows]),
        "next_token_ids": step["next_token_ids"][index_B],
        "common_attn_metadata": metadata,
    }


def shared_block_size(vllm_config: Any) -> int:
    """Positions that the prefix cache shares as one block; 0 where it is off."""
    cache = vllm_config.cache_config
    return int(cache.block_size) if cache.enable_prefix_caching else 0


def lift_length_limit(runner: Any) -> None:
    """Have the runner ask for drafts also near the longest length.

    It would propose rows of zeros to all requests as soon as one of them comes within
    `num_speculative_tokens` of it; the router bounds each draft by its own request's room.
    """
    runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens


def time_steps(runner: Any, on_start: Callable[[int], None]) -> None:
    """Call `on_start(rows)` as each target pass starts, with the rows that it reads."""
    execute = runner.execute_model

    def timed(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        on_start(scheduler_output.total_num_scheduled_tokens)
        return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = timed


def watch_steps(runner: Any, on_step: Callable[[str, Step], None]) -> bool:
    """Have the plugin tell of each cycle, with the id that its request was given by its caller.

    False where the runner's proposer is not ours.
    """
    session = session_of(runner)
    if session is None:
        return False

    def told(tracked: Tracked, step: Step) -> None:
        on_step(tracked.request_id.rpartition("-")[0], step)  # vLLM adds a random end

    session.on_step = told
    return True


def session_of(runner: Any) -> Any:
    """The `HybridSession` of the runner's proposer; None where that is not ours."""
    return getattr(getattr(runner, "drafter", None), "_session", None)


def forget_outputs(runner: Any) -> None:
    """Empty the caches of earlier outputs, ours or that of vLLM's own suffix proposer."""
    drafter = getattr(runner, "drafter", None)
    if (session := session_of(runner)) is not None:
        session.hybrid.router.table.cache.clear()
    elif (cache := getattr(drafter, "suffix_cache", None)) is not None:
        for request_id in list(cache.cached_requests):
            if request_id not in cache.active_requests:
                cache.evict_cached_response(request_id)


def spread_over_rows(
    x: Tensor,
    cu_num_tokens: Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> Tensor:
    """Each request's value once for each of its draft rows, as `expand_batch_to_tokens` says.

    Args:
        x: one value a request.
        cu_num_tokens: draft rows of the requests up to and including each.
        num_tokens: draft rows in all.
        replace_from: a value that becomes `replace_to` on the way.
        replace_to: what stands in its place.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    spread = torch.repeat_interleave(x, counts.long())
    assert len(spread) == num_tokens
    return torch.where(spread == replace_from, replace_to, spread)
