"""Labels with a model drafter: which target and head, and a labeller of them in each worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hvd_ray.config import Config
from hvd_ray.errors import UserError
from hvd_ray.fetch import head_fingerprint, model_fingerprint, resolve_model
from hvd_ray.pipelines.output import read_manifest
from hvd_ray.systems import head_folder, load_engine, load_head
from hvd_ray.traces.label import ModelLabeller

LABEL_THREADS = 1
"""Sums are added up otherwise with other numbers of threads, and labels are the same for any
number of workers; one thread each is also the fastest way to fill the cores."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What decides the model's labels; it stands in the manifest under `eagle3`."""

    target: str
    """Fingerprint of the target whose hidden states were read."""
    head: str
    """Fingerprint of the head."""
    dtype: str
    num_threads: int
    num_tokens: int
    """Length of a chain."""
    context_length: int
    """Tokens past which the head drafts no more."""


def find_model(config: Config, *, traces: Path) -> ModelFacts:
    """Target and head of the configuration, not loaded yet.

    Raises:
        UserError: one of them is not on this machine, drafts would be sampled, or the traces were
            collected from another target.
    """
    from hvd_ray.drafting.eagle3_checkpoint import head_context_length

    if config.drafting.eagle3.is_sampled:
        raise UserError(
            "labels are those of a head's arg max, which has one answer: leave out "
            "drafting.eagle3.is_sampled"
        )
    model = resolve_model(config.model)
    if not model.is_local:
        raise UserError(f"{model.name} is not on this machine: run `hvd fetch {model.name}` first")
    target, head = model_fingerprint(model.path_or_id), head_folder(config)
    _refuse_other_target(traces, config.model, target)
    return ModelFacts(
        target=target,
        head=head_fingerprint(head),
        dtype=config.dtype,
        num_threads=_num_threads(config),
        num_tokens=config.drafting.eagle3.num_tokens,
        context_length=head_context_length(head),
    )


def load_labeller(config: Config) -> ModelLabeller:
    """The labeller of the configuration's target and head.

    Raises:
        UserError: the head does not fit the target.
    """
    from hvd_ray.drafting.eagle3_labels import ChainLabeller

    config = config.model_copy(update={"num_threads": _num_threads(config)})
    head, engine = load_head(config, load_engine(config)[0])
    return ChainLabeller(engine, head, config.drafting.eagle3.num_tokens)


def _num_threads(config: Config) -> int:
    return config.num_threads or LABEL_THREADS


def _refuse_other_target(traces: Path, name: str, fingerprint: str) -> None:
    noted = (read_manifest(traces) or {}).get("settings", {}).get("model_fingerprint")
    if noted is not None and noted != fingerprint:
        raise UserError(
            f"{traces}: collected from another model than {name}, so its hidden states would not "
            "be those that decoding had; say where the target is with --model"
        )
