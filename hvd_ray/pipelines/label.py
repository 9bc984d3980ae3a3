"""`hvd traces label`: traces to labels, one shard after the other on each actor, on Ray Data."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.fetch import resolve_tokenizer, tokenizer_sha, vocab_size_of
from hvd_ray.payoff.features import FEATURE_VERSION, FeatureExtractor
from hvd_ray.payoff.token_classes import TokenClasses, cached_token_classes
from hvd_ray.pipelines.collect import default_num_workers
from hvd_ray.pipelines.label_model import ModelFacts, find_model, load_labeller
from hvd_ray.pipelines.labelling import (
    NUM_SHARDS,
    LabelPlan,
    LabelShard,
    label_one,
    plan_labels,
    summarise,
)
from hvd_ray.pipelines.output import claimed, read_manifest
from hvd_ray.pipelines.shards import Counts, Report, RunProgress, run_shards
from hvd_ray.provenance import provenance
from hvd_ray.text import HFTextCodec
from hvd_ray.traces.label import ModelLabeller
from hvd_ray.traces.schema import SCHEMA_VERSION
from hvd_ray.traces.store import finished_parts, folders_of, refuse_unknown_tokens

MOST_PADDING = 1024


@dataclass(frozen=True, slots=True)
class LabelOptions:
    """What labelling is asked for; each field is a flag of `hvd traces label`.

    Raises:
        UserError: a value is out of range, or the labels would be written among the traces.
    """

    traces: Path
    out: Path
    num_shards: int = NUM_SHARDS
    num_workers: int | None = None
    """Shards labelled side by side; None: one a core."""
    cut_loops: bool = True
    model: str | None = None
    """Where the tokenizer is, and the target if it is needed; None: the model of the traces."""
    with_eagle3: bool = False
    """Label the chains of an EAGLE-3 head too, which takes passes of the target."""

    def __post_init__(self) -> None:
        for flag, value in (("--shards", self.num_shards), ("--workers", self.num_workers)):
            if value is not None and value < 1:
                raise UserError(f"{flag} must be 1 or more, got {value}")
        if self.out.absolute() == self.traces.absolute():
            raise UserError("--out must be another folder than that of the traces")


def label(options: LabelOptions, config: Config, *, progress: RunProgress) -> dict[str, Any]:
    """Label the traces and write `labels/` under `options.out`.

    The labels do not depend on the number of workers. A run that was killed is taken up again by
    the same call and ends with the same rows.

    Returns:
        What the folder holds now, as JSON values.

    Raises:
        UserError: bad traces, another tokenizer, another run or other settings in the folder;
            nothing has been written then.
    """
    progress.stage(f"reading the traces in {options.traces}")
    plan = plan_labels(options.traces, num_shards=options.num_shards)
    model = options.model or _noted_model(options, plan)
    classes = token_classes_of(model, plan.tokenizer_sha)
    refuse_unknown_tokens(options.traces, num_token_ids=_num_token_ids(model, classes))
    facts = None
    if options.with_eagle3:
        config = config.model_copy(update={"model": model})
        facts = find_model(config, traces=options.traces)
    with claimed(options.out, _settings(options, config, plan, facts)) as folder:
        try:
            _run(plan, classes, options, config, progress)
        except UserError:
            if not any(finished_parts(options.out / "labels")):
                folder.withdraw()
            raise
        result = {**summarise(options.out, plan).as_json(), "shards": len(plan.shards)}
        folder.finish(result, about=provenance(config=config, traces_hash=plan.traces_hash))
    return {"out": str(options.out), "resumed": folder.is_resumed, **result}


def is_unfinished(traces: Path) -> bool:
    """Whether a collection into this folder, or one in it, has begun and not come to its end."""
    manifests = (read_manifest(folder) for folder in folders_of(traces, "traces"))
    return any(found is not None and not found.get("complete", False) for found in manifests)


class LabelWorker:
    """Labels shards with one feature extractor and, if asked for, one target and head."""

    def __init__(
        self,
        classes: TokenClasses,
        config: Config,
        *,
        cut_loops: bool,
        out: Path,
        make_labeller: Callable[[], ModelLabeller] | None = None,
    ) -> None:
        self._label = partial(
            label_one,
            drafter_config=config.drafting.suffix,
            extractor=FeatureExtractor(classes),
            cut_loops=cut_loops,
            out=out,
            model_labeller=make_labeller() if make_labeller else None,
        )
        self._out = out

    def run(self, shard: LabelShard, report: Report) -> None:
        if not shard.labels_file(self._out).exists():
            self._label(shard, report=report)


def _run(
    plan: LabelPlan,
    classes: TokenClasses,
    options: LabelOptions,
    config: Config,
    progress: RunProgress,
) -> None:
    todo = [shard for shard in plan.shards if not shard.labels_file(options.out).exists()]
    if not todo:
        return
    progress.stage("starting Ray")
    progress.expect(sum(shard.num_positions for shard in todo))

    def on_counts(counts: Counts) -> None:
        progress.advance(counts.get("done", 0), "labelling")

    worker = partial(
        LabelWorker,
        classes,
        config,
        cut_loops=options.cut_loops,
        out=options.out.absolute(),
        make_labeller=partial(load_labeller, config) if options.with_eagle3 else None,
    )
    run_shards(todo, worker, num_workers=_num_workers(options, config), on_counts=on_counts)


def _num_workers(options: LabelOptions, config: Config) -> int:
    """As asked; else one a core, as far as the memory goes where each holds a target."""
    if options.num_workers is not None:
        return options.num_workers
    if options.with_eagle3:
        return default_num_workers(config.model)
    return len(os.sched_getaffinity(0))


def _noted_model(options: LabelOptions, plan: LabelPlan) -> str:
    """The model as the collection was told it, which may be a folder; else as the traces say."""
    manifest = read_manifest(folders_of(options.traces, "traces")[0]) or {}
    return str(manifest.get("model", plan.model))


def _num_token_ids(model_name: str, classes: TokenClasses) -> int:
    """One more than the largest token id that the model can read or say.

    Models pad the vocabulary of their tokenizer; their configuration says how far. Where only the
    tokenizer is known, this allows for as much as models are known to add.
    """
    folder = Path(resolve_tokenizer(model_name).path_or_id)
    padded = vocab_size_of(folder) or len(classes.flags_V) + MOST_PADDING
    return max(padded, len(classes.flags_V))


def token_classes_of(model_name: str, sha: str) -> TokenClasses:
    """The token classes of the traces' tokenizer.

    Raises:
        UserError: the model cannot be found, or its tokenizer is another one.
    """
    model = resolve_tokenizer(model_name)
    if model.is_local and sha and tokenizer_sha(model.path_or_id) != sha:
        raise UserError(
            f"the traces were made with another tokenizer than that of {model_name}; "
            "say where theirs is with --model"
        )
    codec = HFTextCodec(model.path_or_id)
    vocab_size = len(codec.tokenizer)
    if not sha:
        return TokenClasses.from_codec(codec, vocab_size)
    return cached_token_classes(codec, vocab_size=vocab_size, tokenizer_sha=sha)


def _settings(
    options: LabelOptions, config: Config, plan: LabelPlan, facts: ModelFacts | None
) -> Mapping[str, Any]:
    """What decides the rows; how many workers there are does not."""
    return {
        "command": "traces label",
        "schema_version": SCHEMA_VERSION,
        "feature_version": FEATURE_VERSION,
        "traces_hash": plan.traces_hash,
        "tokenizer_sha": plan.tokenizer_sha,
        "shards": options.num_shards,
        "cut_loops": options.cut_loops,
        "suffix": config.drafting.suffix.model_dump(mode="json"),
        "eagle3": asdict(facts) if facts else None,
    }
