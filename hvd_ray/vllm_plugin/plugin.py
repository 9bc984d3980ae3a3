"""vLLM's entry point (`vllm.general_plugins`): called in every of its processes, at times twice."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from hvd_ray.errors import UserError
from hvd_ray.vllm_plugin import compat
from hvd_ray.vllm_plugin.options import HvdOptions, check_head
from hvd_ray.vllm_plugin.request_counts import COUNTS, shares

RUNNER_REASON = "hybrid verified decoding (hvd_ray)"


def register() -> None:
    """Set the hooks; without a section `hvd` in the additional configuration they do nothing.

    With another vLLM than the one supported, only the one hook is set that refuses the section.
    """
    compat.hook_engine_arguments(_prepare, _check)
    try:
        compat.check_version()
    except UserError:
        return
    compat.hook_model_runner_choice(RUNNER_REASON)
    compat.hook_requests()
    compat.hook_request_metrics(COUNTS.take, shares)
    compat.hook_engine_end()
    compat.hook_workers(_our_proposers, _bind, _close)


def _prepare(arguments: Any) -> HvdOptions | None:
    options = compat.options_of_arguments(arguments)
    if options is not None:
        compat.check_version()
        compat.request_unpadded_drafting(arguments)
    return options


def _check(vllm_config: Any, options: HvdOptions) -> None:
    """Refuse what a worker would refuse a minute later, below a long traceback."""
    from hvd_ray.vllm_plugin.parts import check_parts

    compat.check_engine(vllm_config)
    check_head(
        options,
        has_head=compat.has_head(vllm_config),
        num_speculative_tokens=compat.num_speculative_tokens(vllm_config),
    )
    check_parts(options, compat.target_of(vllm_config))
    compat.publish_counts(vllm_config)


def _our_proposers(vllm_config: Any) -> AbstractContextManager[None]:
    """While it lasts, the model runner makes our proposers instead of vLLM's."""
    compat.check_engine(vllm_config)  # again: not every front end runs the plugin
    from hvd_ray.vllm_plugin.proposer import HybridEagleProposer, HybridSuffixProposer

    if compat.has_head(vllm_config):
        return compat.replaced_proposers(EagleProposer=HybridEagleProposer)
    return compat.replaced_proposers(SuffixDecodingProposer=HybridSuffixProposer)


def _bind(runner: Any) -> None:
    compat.mend_cpu_sampling()
    runner.drafter.bind(runner)


def _close(runner: Any) -> None:
    from hvd_ray.vllm_plugin.compat_runner import session_of

    session = session_of(runner)
    if session is not None:
        session.close()
