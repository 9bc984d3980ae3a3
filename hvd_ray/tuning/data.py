"""What a sweep learns from and is judged by: labels, traces and who belongs where.

Trials learn from labels of some train sessions and are judged by replaying others, the validation
sessions. Test sessions are left alone until the best trial is known. Sessions are dealt by hash,
within each workload, so that every workload with two sessions or more stands on both sides.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from hvd_ray.config import DEFAULT_MODEL, Config, SuffixConfig
from hvd_ray.drafting.suffix import SuffixDrafter
from hvd_ray.errors import UserError
from hvd_ray.payoff.dataset import TEST, TRAIN, Labels, read_labels_table
from hvd_ray.payoff.features import FEATURE_NAMES, FEATURE_VERSION
from hvd_ray.pipelines.labelling import LabelPlan, plan_labels
from hvd_ray.pipelines.output import MANIFEST, read_manifest
from hvd_ray.traces.label import shard_of
from hvd_ray.traces.replay import ModelDrafts
from hvd_ray.traces.schema import Trace, cut_at_loop
from hvd_ray.traces.store import folders_of, read_labels, read_trace_part
from hvd_ray.traces.walk import in_time_order
from hvd_ray.tuning.recorded import LookedUp, ReplaySet, look_up
from hvd_ray.tuning.space import Validation
from hvd_ray.types import Int32Array, Source


@dataclass(frozen=True, slots=True)
class ModelNote:
    """The model drafter whose drafts were labelled too."""

    num_tokens: int
    """Length of its chains."""
    context_length: int
    """Tokens past which it drafts no more."""


@dataclass(frozen=True, slots=True)
class LabelNote:
    """How labels were made, as their manifest says."""

    traces_hash: str
    num_shards: int
    cut_loops: bool
    suffix: SuffixConfig
    model: str | None
    eagle3: ModelNote | None = None

    @classmethod
    def read(cls, labels: Path) -> LabelNote:
        """
        Raises:
            UserError: the folder was not written by `hvd traces label`.
        """
        manifest = read_manifest(labels)
        settings = (manifest or {}).get("settings", {})
        if manifest is None and len(inside := folders_of(labels, "labels")) > 1:
            raise UserError(
                f"{labels}: holds {len(inside)} labellings, each with caches of its own; name one "
                "of them and its traces, or label all traces at once: `hvd traces label` takes a "
                "folder of collections, too"
            )
        if manifest is None or settings.get("command") != "traces label":
            raise UserError(
                f"{labels}: no labels ({MANIFEST} of `hvd traces label` is missing); "
                "make them with `hvd traces label TRACES_DIR`"
            )
        eagle3 = settings.get("eagle3")
        return cls(
            settings["traces_hash"],
            settings["shards"],
            settings["cut_loops"],
            SuffixConfig.model_validate(settings["suffix"]),
            manifest.get("model"),
            ModelNote(eagle3["num_tokens"], eagle3["context_length"]) if eagle3 else None,
        )


@dataclass(frozen=True, slots=True)
class Material:
    """Labels and the traces they were made from, known to belong together."""

    labels: Path
    traces: Path
    note: LabelNote
    plan: LabelPlan
    model: str
    """The target whose traces these are."""
    model_drafter: ModelNote | None = None
    """The model drafter to replay with, if its drafts were labelled."""

    @property
    def tokenizer_sha(self) -> str:
        return self.plan.tokenizer_sha

    def shards(self) -> list[list[Trace]]:
        """The traces that share a cache, in time order, as they were labelled."""
        num_shards = self.note.num_shards
        files = dict.fromkeys(file for shard in self.plan.shards for file in shard.files)
        dealt: dict[int, list[Trace]] = defaultdict(list)
        for file in files:
            for trace in read_trace_part(file):
                dealt[shard_of(trace.scope, trace.session_id, num_shards=num_shards)].append(trace)
        return [self._usable(dealt[number]) for number in sorted(dealt)]

    def _usable(self, traces: Iterable[Trace]) -> list[Trace]:
        whole = [trace for trace in traces if trace.error is None and trace.output_token_ids]
        cut = [cut_at_loop(trace) for trace in whole] if self.note.cut_loops else whole
        return in_time_order([trace for trace in cut if trace.output_token_ids])

    def replay_set(
        self,
        shards: Iterable[Iterable[Trace]],
        is_judged: Callable[[Trace], bool],
        *,
        on_tokens: Callable[[int], None] = lambda _num: None,
    ) -> ReplaySet:
        """Look up the judged traces in caches that all traces of their shard fill.

        Args:
            shards: traces that share a cache, in time order.
            is_judged: which traces policies will be judged on.
            on_tokens: hears of output tokens that are done.
        """
        found = []
        for shard in shards:
            found += look_up(
                shard,
                is_judged,
                drafter=SuffixDrafter(self.note.suffix),
                on_trace=lambda trace: on_tokens(len(trace.output_token_ids)),
            )
        return self.with_models(found)

    def with_models(self, found: Sequence[LookedUp]) -> ReplaySet:
        """Looked-up traces, and what the model drafter would have drafted, from the labels."""
        models = {}
        if self.model_drafter is not None:
            names = {each.trace.trace_id for each in found}
            models = model_drafts(label_table(self.labels), names, self.model_drafter)
        return ReplaySet(
            tuple(each.trace for each in found),
            tuple(each.record for each in found),
            tuple(each.rule_record for each in found),
            tuple(models.get(each.trace.trace_id) for each in found),
        )


def open_material(labels: Path, traces: Path, config: Config) -> Material:
    """Find labels and traces and check that they belong together.

    Raises:
        UserError: there are none, the labels are of other traces, or they were made with another
            suffix cache than the configuration's.
    """
    note = LabelNote.read(labels)
    plan = plan_labels(traces, num_shards=note.num_shards)
    if plan.traces_hash != note.traces_hash:
        raise UserError(
            f"{labels}: not labelled from the traces in {traces}; label those first with "
            f"`hvd traces label {traces}`"
        )
    _refuse_other_cache(labels, note.suffix, config.drafting.suffix)
    drafter = _model_drafter(labels, note.eagle3, config.drafting.eagle3.num_tokens)
    return Material(labels, traces, note, plan, _model_of(note, traces, plan, config), drafter)


def label_table(labels: Path) -> Any:
    """All labels under a folder, a pyarrow.Table."""
    return read_labels(labels, feature_names=FEATURE_NAMES, feature_version=FEATURE_VERSION)


def validation_sessions(
    tokens: Mapping[str, Mapping[str, int]], *, settings: Validation, seed: int
) -> frozenset[str]:
    """The sessions to judge by, from the output tokens of each workload's train sessions.

    Raises:
        UserError: no workload has two sessions.
    """
    chosen: set[str] = set()
    for sessions in tokens.values():
        if len(sessions) < 2:
            continue  # a single one is worth more to learn from
        order = sorted(sessions, key=lambda session: _hash(seed, session))
        wanted = min(ceil(settings.fraction * len(order)), len(order) - 1)
        taken = 0
        for session in order[:wanted]:
            if taken and taken + sessions[session] > settings.max_tokens_per_workload:
                break
            taken += sessions[session]
            chosen.add(session)
    if not chosen:
        raise UserError(
            "the train split needs two sessions of a workload at least, one to learn from and one "
            "to judge by; collect more and label them again"
        )
    return frozenset(chosen)


def train_sessions(shards: Iterable[Iterable[Trace]]) -> dict[str, dict[str, int]]:
    """Output tokens by workload and session of the train split."""
    tokens: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for shard in shards:
        for trace in shard:
            if trace.split == TRAIN:
                tokens[trace.workload][trace.session_id] += len(trace.output_token_ids)
    return tokens


def num_output_tokens(shards: Iterable[Iterable[Trace]]) -> int:
    return sum(len(trace.output_token_ids) for shard in shards for trace in shard)


def fit_labels(table: Any, validation: frozenset[str]) -> Labels:
    """Labels to learn from (`train`) and those of the validation sessions (`test`).

    Raises:
        UserError: one of the two has no position with a cache draft.
    """
    import pyarrow as pa

    split_N = np.asarray(table.column("split").to_pylist(), dtype=object)
    session_N = table.column("session_id").to_pylist()
    is_validation_N = np.array([session in validation for session in session_N], dtype=np.bool_)
    side_N = np.where(is_validation_N, TEST, TRAIN)
    side_N = np.where(split_N == TRAIN, side_N, "")
    index = table.schema.get_field_index("split")
    field = table.schema.field(index)
    return read_labels_table(table.set_column(index, field, pa.array(side_N, pa.string())))


def model_drafts(table: Any, trace_ids: set[str], note: ModelNote) -> dict[str, ModelDrafts]:
    """What the labels say of a model drafter, for the traces where they say it everywhere."""
    import pyarrow as pa
    import pyarrow.compute as pc

    part = table.filter(pc.is_in(table.column("trace_id"), pa.array(sorted(trace_ids))))
    part = part.sort_by([("trace_id", "ascending"), ("position", "ascending")])
    names, first = np.unique(part.column("trace_id").to_numpy(), return_index=True)
    accepted_N: Int32Array = (
        part.column("eagle3_accepted_len").fill_null(-1).to_numpy().astype(np.int32)
    )
    pieces = np.split(accepted_N, first[1:])
    return {
        str(name): ModelDrafts(Source.EAGLE3, piece, note.num_tokens, note.context_length)
        for name, piece in zip(names, pieces, strict=True)
        if (piece >= 0).all()
    }


def _hash(seed: int, session: str) -> bytes:
    return hashlib.sha256(f"{seed}\0{session}".encode()).digest()


def _model_of(note: LabelNote, traces: Path, plan: LabelPlan, config: Config) -> str:
    """The model that was named, else the one that the labels or the traces were made with."""
    if config.model != DEFAULT_MODEL:
        return config.model
    return str(note.model or (read_manifest(traces) or {}).get("model") or plan.model)


def _model_drafter(labels: Path, theirs: ModelNote | None, num_tokens: int) -> ModelNote | None:
    """The labelled drafter with chains of the configuration's length, which labels bound."""
    if theirs is None:
        return None
    if num_tokens > theirs.num_tokens:
        raise UserError(
            f"{labels}: labelled with drafting.eagle3.num_tokens={theirs.num_tokens}, and this run "
            f"has {num_tokens}; label the traces again, or add "
            f"drafting.eagle3.num_tokens={theirs.num_tokens}"
        )
    return replace(theirs, num_tokens=num_tokens)


def _refuse_other_cache(labels: Path, theirs: SuffixConfig, ours: SuffixConfig) -> None:
    for name in SuffixConfig.model_fields:
        made_with, given = getattr(theirs, name), getattr(ours, name)
        if made_with != given:
            raise UserError(
                f"{labels}: labelled with drafting.suffix.{name}={made_with}, and this run has "
                f"{given}; label the traces again, or add drafting.suffix.{name}={made_with}"
            )
