"""One run of `hvd advise`, from the logs to the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvd_ray.advise.acceptance import HeadAcceptance
from hvd_ray.advise.contestants import Contestant, Field, contestants, cost_policy
from hvd_ray.advise.filling import LEAST_CACHE, Filling, filling_of
from hvd_ray.advise.judging import Row, judge
from hvd_ray.advise.loading import LoadPoint, load_points
from hvd_ray.advise.lookups import Walked
from hvd_ray.advise.material import Traffic
from hvd_ray.advise.options import TAUS, AdviceOptions
from hvd_ray.advise.recommend import (
    MAX_DRAFT,
    Recommendation,
    Setting,
    recommend,
    servable,
)
from hvd_ray.advise.result import Advice, TauPoint
from hvd_ray.advise.sources import (
    KnownPayoff,
    find_costs_for,
    find_head,
    find_payoff_for,
    predictor_folder,
    read_logs,
    roles_of,
    walk_through,
)
from hvd_ray.advise.verdict import Prices, Verdict, doubts_about, verdict_of
from hvd_ray.config import Config
from hvd_ray.payoff.cost import RowCosts
from hvd_ray.payoff.cost_by_hand import NamedCosts
from hvd_ray.payoff.cost_load import LoadedCosts
from hvd_ray.payoff.policy import ThresholdPolicy
from hvd_ray.pipelines.label import token_classes_of
from hvd_ray.pipelines.shards import RunProgress
from hvd_ray.provenance import provenance
from hvd_ray.traces.replay import Replay
from hvd_ray.traces.schema import Trace

EVERY_PASS = RowCosts((1,), (1.0,))
"""Without a table a pass costs one whatever it verifies, and drafting nothing."""


def advise(options: AdviceOptions, config: Config, *, progress: RunProgress) -> Advice:
    """Answer what speculative decoding would bring this traffic.

    Raises:
        UserError: the logs, the costs or the predictor cannot be used.
    """
    config = config.model_copy(update={"model": options.tokenizer})
    costs, lacking = find_costs_for(options, config)
    head = find_head(options)
    folder = predictor_folder(options, config)
    traffic = read_logs(options, progress)
    roles = roles_of(traffic, options)
    classes = token_classes_of(options.tokenizer, traffic.tokenizer_sha)
    walked = walk_through(traffic, roles, config, classes, progress)
    payoff = find_payoff_for(
        walked,
        options,
        config,
        folder=folder,
        classes=classes,
        traffic=traffic,
        progress=progress,
    )
    run = _Run(traffic, walked, payoff, costs, lacking, head, options, config, progress)
    return run.advice()


@dataclass(frozen=True, slots=True)
class _Run:
    """Everything at hand; what follows is replay."""

    traffic: Traffic
    walked: Walked
    payoff: KnownPayoff
    costs: NamedCosts | None
    lacking: str
    """Why there is no cost table."""
    head: HeadAcceptance | None
    options: AdviceOptions
    config: Config
    progress: RunProgress

    @property
    def table(self) -> RowCosts:
        return EVERY_PASS if self.costs is None else self.costs.table

    @property
    def loaded(self) -> LoadedCosts:
        return LoadedCosts(self.table, self.options.concurrency)

    @property
    def field(self) -> Field:
        return Field(self.walked.judged, self.head, self.config)

    @property
    def traces(self) -> list[Trace]:
        return [item.trace for item in self.walked.judged]

    def advice(self) -> Advice:
        replays = self._replay_all()
        rows = [row for contestant, runs in replays for row in self._rows(contestant, runs)]
        taus = self._taus(replays)
        filling = self._filling(replays)
        load = self._load(replays)
        verdict = verdict_of(
            rows,
            concurrency=self.options.concurrency,
            head_is_at_hand=self.head is not None and not self.head.is_assumed,
            prices=self._prices,
            doubts=self._doubts(),
        )
        return Advice(
            verdict=verdict,
            recommendation=self._recommendation(verdict, filling),
            traffic=self._facts(),
            rows=tuple(rows),
            taus=tuple(taus),
            quality=self.payoff.quality,
            filling=filling,
            load=tuple(load),
            rests_on=tuple(self._rests_on()),
            provenance=self._provenance(),
        )

    # -- replays ---------------------------------------------------------------------------

    def _replay_all(self) -> list[tuple[Contestant, list[Replay]]]:
        systems = contestants(
            self.config, estimator=self.payoff.estimator, costs=self.loaded, head=self.head
        )
        self.progress.expect(len(systems), unit="systems")
        found = []
        for number, system in enumerate(systems):
            self.progress.advance(number, f"replaying {system.name}")
            found.append((system, self.field.replays(system, self.loaded)))
        return found

    def _rows(self, contestant: Contestant, replays: Sequence[Replay]) -> list[Row]:
        return judge(
            contestant,
            replays,
            self.traces,
            costs=self.loaded,
            is_assumed=self._is_assumed(contestant),
            seed=self.config.seed,
        )

    def _is_assumed(self, contestant: Contestant) -> bool:
        head, costs = self.head if contestant.uses_head else None, self.costs
        return (head is not None and head.is_assumed) or (costs is not None and costs.is_assumed)

    def _taus(self, replays: Sequence[tuple[Contestant, list[Replay]]]) -> list[TauPoint]:
        if self.payoff.estimator is None:
            return []
        at_default = next((runs for c, runs in replays if c.name == "hvd_tau"), None)
        self.progress.expect(len(TAUS), unit="thresholds")
        points = []
        for number, tau in enumerate(TAUS):
            self.progress.advance(number, f"replaying tau = {tau:g}")
            policy = ThresholdPolicy(self.payoff.estimator, tau)
            contestant = Contestant("hvd_tau", policy)
            runs = at_default if tau == self.config.policy.tau else None
            runs = runs or self.field.replays(contestant, self.loaded)
            row = self._rows(contestant, runs)[0]
            points.append(TauPoint(tau, row.emitted_per_pass, row.speedup))
        return points

    def _filling(self, replays: Sequence[tuple[Contestant, list[Replay]]]) -> Filling:
        with_all = next(runs for contestant, runs in replays if contestant.name == "suffix")
        text = "replaying with caches of several sizes"
        self.progress.stage(text)
        return filling_of(
            self.traffic.traces,
            self.walked.judged,
            with_all=with_all,
            suffix=self.config.drafting.suffix,
            on_done=lambda done, total: self.progress.stage(f"{text}: {done} of {total}"),
        )

    def _load(self, replays: Sequence[tuple[Contestant, list[Replay]]]) -> list[LoadPoint]:
        if self.costs is None:
            return []
        names = {"suffix", "eagle3"} if self.head is not None else {"suffix", "ngram"}
        estimator = self.payoff.estimator
        adapts = [c for c, _ in replays if c.name.startswith("hvd_cost") and estimator is not None]

        def redecided(loaded: LoadedCosts) -> list[tuple[Contestant, list[Replay]]]:
            self.progress.stage(f"replaying at concurrency {loaded.num_requests}")
            return [self._at_load(contestant, loaded, replays) for contestant in adapts]

        return load_points(
            [(c, runs) for c, runs in replays if c.name in names],
            self.table,
            redecided=redecided,
            is_assumed=self._is_assumed,
        )

    def _at_load(
        self,
        contestant: Contestant,
        loaded: LoadedCosts,
        replays: Sequence[tuple[Contestant, list[Replay]]],
    ) -> tuple[Contestant, list[Replay]]:
        if loaded == self.loaded:
            return next((c, runs) for c, runs in replays if c is contestant)
        assert self.payoff.estimator is not None
        head = self.head if contestant.uses_head else None
        policy = cost_policy(self.payoff.estimator, loaded, head)
        again = replace(contestant, policy=policy)
        return again, self.field.replays(again, loaded)

    # -- what to say of it -----------------------------------------------------------------

    @property
    def _prices(self) -> Prices:
        if self.costs is None:
            return "none"
        return "assumed" if self.costs.is_assumed else "known"

    def _doubts(self) -> list[str]:
        doubts = doubts_about(self._judged_outputs())
        if self.costs is not None and self.costs.doubt is not None:
            doubts.append(self.costs.doubt)
        return doubts

    def _judged_outputs(self) -> list[list[tuple[int, ...]]]:
        """The answers of each judged session."""
        sessions: dict[str, list[tuple[int, ...]]] = {}
        for trace in self.traces:
            sessions.setdefault(trace.session_id, []).append(trace.output_token_ids)
        return list(sessions.values())

    def _recommendation(self, verdict: Verdict, filling: Filling) -> Recommendation:
        tokens = sum(len(trace.output_token_ids) for trace in self.traffic.traces)
        setting = Setting(
            config=self.config,
            model=servable(self.options.tokenizer),
            predictor=self.payoff.reference,
            costs=self.options.costs if self.costs and self.costs.measured else None,
            max_cached_tokens=_rounded_up(max(filling.enough_tokens, LEAST_CACHE)),
            mean_output_tokens=tokens / len(self.traffic.traces),
            head_tokens=len(self.head.chances) if self.head is not None else 0,
        )
        return recommend(verdict.overall, setting)

    def _facts(self) -> dict[str, Any]:
        return {
            **self.traffic.facts,
            "workloads": {
                name: sum(trace.workload == name for trace in self.traffic.traces)
                for name in sorted({trace.workload for trace in self.traffic.traces})
            },
            "judged_sessions": len({trace.session_id for trace in self.traces}),
            "judged_traces": len(self.traces),
            "judged_tokens": sum(len(trace.output_token_ids) for trace in self.traces),
            "concurrency": self.options.concurrency,
            "costs": None if self.costs is None else self.costs.name,
            "costs_are_assumed": self.costs is None or self.costs.is_assumed,
            "head": None if self.head is None else self.head.basis,
        }

    def _rests_on(self) -> list[str]:
        facts = self._facts()
        lines = [
            f"{facts['judged_traces']:,} of {facts['traces']:,} answers "
            f"({facts['judged_sessions']} sessions, {facts['judged_tokens']:,} tokens) were "
            "replayed; the others filled the cache in the order of the log, as one replica would "
            "have seen them",
            _costs_in_words(self.costs, self.options.concurrency, self.lacking),
            f"predictor: {self.payoff.basis}",
        ]
        if self.head is not None:
            chances = ", ".join(f"{chance:g}" for chance in self.head.chances)
            lines.append(
                f"EAGLE-3 head: {self.head.basis} ({chances} by position, "
                f"{self.head.emitted_per_pass:.2f} tokens a pass)"
            )
        if self.head is not None and (self.costs is None or not self.costs.has_eagle3):
            lines.append(
                "assumed: a head's drafts cost nothing, the cost table does not price them"
            )
        if facts["traces_looping"]:
            cut = "cut there" if facts["loops_are_cut"] else "left as they are"
            lines.append(f"{facts['traces_looping']} answers end in a loop and were {cut}")
        longest = self.config.drafting.suffix.max_draft_tokens
        if longest > MAX_DRAFT:
            lines.append(
                f"drafts of the cache have up to {longest} tokens here, and up to {MAX_DRAFT} in "
                "the configuration for vLLM, which keeps room for them in every step"
            )
        lines.append("decoding alone: the time to read prompts is the same under every system")
        lines.append("the model that answered is taken to answer the same: its tokens are replayed")
        return lines

    def _provenance(self) -> dict[str, Any]:
        return provenance(
            config=self.config,
            traffic=self._facts(),
            predictor=self.payoff.basis,
            costs=None if self.costs is None else self.costs.name,
        )


def _costs_in_words(costs: NamedCosts | None, concurrency: int, lacking: str) -> str:
    if costs is None:
        return (
            "assumed: every target pass costs the same and drafting nothing, so speed-ups are "
            f"passes saved, an upper bound; --costs names a table ({lacking})"
        )
    mark = "assumed costs" if costs.is_assumed else "costs"
    return f"{mark}: {costs.name} ({costs.basis}), at concurrency {concurrency}"


def _rounded_up(tokens: int) -> int:
    """To a round number: a cap is no measurement."""
    step = int(10 ** max(0, len(str(tokens)) - 2))
    return -(-tokens // step) * step
