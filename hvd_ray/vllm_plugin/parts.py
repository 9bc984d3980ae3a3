"""What a worker's router is made of: cache, policy, predictor, costs; found when it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hvd_ray.config import Config, SuffixConfig
from hvd_ray.context import DecodeContext
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.errors import UserError
from hvd_ray.payoff.estimator import CacheOwnEstimator, PredictorEstimator
from hvd_ray.payoff.joint_policy import BatchCosts, JointCostPolicy, TableCosts
from hvd_ray.payoff.policy import Candidates
from hvd_ray.systems import Parts, build_policy
from hvd_ray.types import Request, TokenBuffer
from hvd_ray.vllm_plugin.options import OWN_PAYOFF, HvdOptions, Target
from hvd_ray.vllm_plugin.production_traces import check_folder
from hvd_ray.vllm_plugin.requests import Profile, RequestTable
from hvd_ray.vllm_plugin.router import BatchPolicy, EachAlone, Limits, Router
from hvd_ray.vllm_plugin.step_costs import LearntAcceptance, LearntCosts

_JUDGED = ("cost", "tau")
"""Policies that ask a predictor."""


@dataclass(slots=True)
class Hybrid:
    """A worker's router, what it learns from steps, and what the start-up line says."""

    router: Router
    acceptance: LearntAcceptance
    learnt: LearntCosts | None = None
    """Costs that are measured as the engine runs; None: a table's, or no policy asks."""
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def start_line(self) -> str:
        """What runs, in one line."""
        return "hvd: " + ", ".join(f"{name}={value}" for name, value in self.facts.items())


def open_hybrid(
    options: HvdOptions, target: Target, *, profile_of: Callable[[object], Profile]
) -> Hybrid:
    """The router of one engine, with a cold cache.

    Raises:
        UserError: predictor or cost table cannot be found or do not fit.
    """
    config = options.config(target.model)
    estimator, predictor = _estimator(options, config, target)
    learnt, costs, acceptance = None, None, LearntAcceptance()
    if options.policy == "cost":
        costs, learnt = _costs(options, config)
        assert estimator is not None
        policy: BatchPolicy = JointCostPolicy(
            estimator, costs, options.eagle3_tokens, acceptance.by_position
        )
    else:
        policy = EachAlone(build_policy(options.system, config, Parts(estimator)))
    compile_ahead(options.cache, policy)
    limits = Limits(
        target.max_model_len,
        options.eagle3_tokens if target.has_head else 0,
        uses_cache=options.policy not in ("eagle3", "off"),
        lookup_ms=options.lookup_ms,
    )
    cache = options.cache if options.policy in _JUDGED else options.cache.for_rules()
    router = Router(RequestTable(SuffixDrafter(cache), profile_of), policy, limits)
    facts = {
        "policy": options.policy,
        "predictor": predictor,
        "costs": _name_of_costs(options),
        "eagle3_tokens": str(limits.eagle3_tokens),
        "scope": "cache_salt and adapter",
        "cache_cap_tokens": str(options.cache.max_cached_tokens),
        "lookup_ms": f"{options.lookup_ms:g}",
        "traces": options.traces.folder if options.traces else "off",
    }
    return Hybrid(router, acceptance, learnt, facts)


def check_parts(options: HvdOptions, target: Target) -> None:
    """Find what a worker will need, before any is started.

    No compiled code may be loaded here: vLLM's start looks into every module, and llvmlite's
    trips it (`register_kernels`, where engine and caller share a process).

    Raises:
        UserError: predictor or cost table cannot be found or do not fit, or traces cannot be
            written where they should be.
    """
    config = options.config(target.model)
    if options.policy in _JUDGED and options.payoff != OWN_PAYOFF:
        _check_payoff(options, config)
    if options.policy == "cost" and options.costs is not None:
        _table_costs(options.costs, config)
    if options.traces is not None:
        try:
            check_folder(Path(options.traces.folder))
        except UserError as error:
            raise UserError(f"setting hvd.traces.folder: {error}") from None


def compile_ahead(cache: SuffixConfig, policy: BatchPolicy) -> None:
    """Draft and decide once: functions are compiled at their first call, which takes seconds and
    must not fall into the first requests. Nothing of it is remembered."""
    drafter = SuffixDrafter(cache)
    text = (0, 1, 2, 3) * 4
    for name in ("compile", "compile again"):  # the second finds the first in its scope
        drafter.start(Request(name, text))
        drafter.observe(name, text)
    draft = drafter.propose(name, len(text))
    assert draft.token_ids
    context = DecodeContext(TokenBuffer(text), 8, max_tokens=32, room=len(text))
    context.history.note(draft, is_selected=False, predicted=1.0)
    context.history.advance(text)
    policy.decide_all([Candidates(draft)] * 2, [context] * 2)


def _estimator(
    options: HvdOptions, config: Config, target: Target
) -> tuple[PredictorEstimator | CacheOwnEstimator | None, str]:
    """What judges cache drafts, and its name; none where the policy asks nobody."""
    if options.policy not in _JUDGED:
        return None, "none"
    if options.payoff == OWN_PAYOFF:
        return CacheOwnEstimator(), "the cache's own estimate"
    from hvd_ray.parts.payoff import find_payoff
    from hvd_ray.text import HFTextCodec

    _check_payoff(options, config)  # again: not every front end runs the plugin
    source = find_payoff(config)
    extractor = source.extractor(HFTextCodec(target.tokenizer), vocab_size=target.vocab_size)
    estimator = PredictorEstimator(source.predictor, extractor)
    sha = source.predictor.card.weights_sha256[:12]
    return estimator, f"{source.reference} (sha256 {sha})"


def _check_payoff(options: HvdOptions, config: Config) -> None:
    from hvd_ray.parts.payoff import find_card

    try:
        card = find_card(config)
    except UserError as error:
        raise UserError(
            f"setting hvd.payoff: {error} (inside vLLM name it as hvd.payoff; "
            f"{OWN_PAYOFF!r} needs no training)"
        ) from None
    if options.policy == "cost" and card.kind != "survival":
        raise UserError(
            "setting hvd.payoff: the predictor gives no survival curve, which policy 'cost' "
            "needs; train one with `hvd train --kind survival`"
        )


def _costs(options: HvdOptions, config: Config) -> tuple[BatchCosts, LearntCosts | None]:
    if options.costs is None:
        learnt = LearntCosts()
        return learnt, learnt
    return _table_costs(options.costs, config), None


def _table_costs(file: str, config: Config) -> TableCosts:
    from hvd_ray.fetch import model_fingerprint, resolve_model
    from hvd_ray.payoff.cost_file import read_costs

    try:
        costs = read_costs(Path(file))
    except UserError as error:
        raise UserError(f"setting hvd.costs: {error}") from None
    if costs.key.model != model_fingerprint(resolve_model(config.model).path_or_id):
        raise UserError(
            f"setting hvd.costs: {file} was measured for another model than {config.model}"
        )
    return TableCosts(costs.table())


def _name_of_costs(options: HvdOptions) -> str:
    if options.policy != "cost":
        return "none"
    return options.costs or "learnt from steps"
