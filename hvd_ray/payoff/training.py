"""Learns a payoff predictor from labelled positions.

`mlp` minimises the squared error of the accepted length, `survival` the cross-entropy of the
conditional acceptances P(accepted >= k | accepted >= k-1).
Shapes: N positions, B batch, F features, K longest draft of a survival head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hvd_ray.payoff.dataset import Labels, LabelSet
from hvd_ray.payoff.features import NUM_FEATURES, hidden_features
from hvd_ray.payoff.network import Layer, Network, folded, joined
from hvd_ray.payoff.predictor import MlpPredictor, PredictorCard
from hvd_ray.payoff.quality import QualityRow, judged
from hvd_ray.payoff.training_settings import TrainingSettings
from hvd_ray.types import Float32Array

if TYPE_CHECKING:
    import torch

NUM_SURVIVAL = 64
"""The longest draft that a survival head knows, in tokens (papers: drafts of at most 64)."""

ONE_THREAD_BATCH = 4096
"""Up to this batch a step is too short to share: on busy cores two threads took 12 times as long
as one, waiting for each other; and the weights do not depend on how many there are."""

CLIP = 6.0
"""Spreads from the mean beyond which a feature says no more."""

LogMetrics = Callable[[Mapping[str, float], int], None]
"""Takes named figures and the epoch (from 1) they belong to."""

OnEpoch = Callable[[int, Callable[[], MlpPredictor]], None]
"""Takes the epoch (from 1) that is over, and what makes the predictor as it stands then."""


@dataclass(frozen=True, slots=True)
class TrainedPredictor:
    """A predictor and how well it foretells held-out sessions."""

    predictor: MlpPredictor
    rows: tuple[QualityRow, ...]
    """Predictor and score rule, over all test positions first, then by workload."""

    def quality_of(self, workload: str, judge: str) -> dict[str, Any]:
        """The figures of one row."""
        return next(
            row.quality.as_dict()
            for row in self.rows
            if (row.workload, row.judge) == (workload, judge)
        )


def train_predictor(
    labels: Labels,
    settings: TrainingSettings,
    *,
    model: str = "",
    tokenizer_sha: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    log_metrics: LogMetrics | None = None,
    on_epoch: OnEpoch | None = None,
) -> TrainedPredictor:
    """Train on the train split, judge on the test split.

    The same labels, settings and number of torch threads give the same weights.

    Args:
        labels: from `dataset.read_labels_table`.
        settings: architecture, schedule, seed.
        model: the target whose traces these are; goes on the card.
        tokenizer_sha: of that target; a predictor is refused under another tokenizer.
        provenance: goes on the card.
        log_metrics: hears the training loss after every epoch.
        on_epoch: called after every epoch, for judges that stop early; it may end the training
            by raising.
    """
    card = PredictorCard(kind=settings.kind, model=model, tokenizer_sha=tokenizer_sha)

    def over(epoch: int, loss: float, export: Callable[[], Network]) -> None:
        if log_metrics is not None:
            log_metrics({"train_loss": loss}, epoch)
        if on_epoch is not None:
            on_epoch(epoch, lambda: MlpPredictor(export(), card))

    network = _fit(labels.train.without(hidden_features(settings.without)), settings, over)
    rows = judged(MlpPredictor(network, card), labels.test, tau=settings.tau)
    training = {
        **asdict(settings),
        "hidden": list(settings.hidden),
        "effective_batch_size": settings.batch_for(len(labels.train)),
        "num_train_positions": len(labels.train),
        "num_test_positions": len(labels.test),
        "num_unsplit": labels.num_unsplit,
        "provenance": dict(provenance or {}),
    }
    metrics = {f"{row.judge}/{row.workload}": row.quality.as_dict() for row in rows}
    card = card.model_copy(update={"training": training, "metrics": metrics})
    return TrainedPredictor(MlpPredictor(network, card), rows)


_EpochOver = Callable[[int, float, Callable[[], Network]], None]
"""Takes epoch, mean loss, and what exports the network."""


def _fit(train: LabelSet, settings: TrainingSettings, over: _EpochOver) -> Network:
    import torch

    mean_F, scale_F = _moments(train.features_NF)
    scaled_NF = ((train.features_NF - mean_F) / scale_F).clip(-CLIP, CLIP).astype(np.float32)
    features_NF = torch.from_numpy(scaled_NF)
    with torch.random.fork_rng(devices=[]), _threads_for(settings.batch_for(len(train))):
        torch.manual_seed(settings.seed)
        model = torch.nn.ModuleList(_new_model(settings, train) for _ in range(settings.members))
        export = partial(_exported, model, train.features_NF, mean_F=mean_F, scale_F=scale_F)
        for epoch, loss in _descend(model, features_NF, _Truth.of(train), settings):
            over(epoch, loss, export)
    return export()


@dataclass(frozen=True, slots=True)
class _Truth:
    """What a batch is scored against."""

    accepted_N: torch.Tensor
    draft_len_N: torch.Tensor

    @classmethod
    def of(cls, labels: LabelSet) -> _Truth:
        import torch

        accepted_N = torch.from_numpy(labels.accepted_N.astype(np.float32))
        return cls(accepted_N, torch.from_numpy(labels.draft_len_N.astype(np.float32)))

    def __getitem__(self, rows_B: torch.Tensor) -> _Truth:
        return _Truth(self.accepted_N[rows_B], self.draft_len_N[rows_B])


def _moments(features_NF: Float32Array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and spread of every feature; a constant one keeps its unit."""
    mean_F = features_NF.mean(axis=0, dtype=np.float64)
    scale_F = features_NF.std(axis=0, dtype=np.float64)
    return mean_F, np.where(scale_F > 1e-6, scale_F, 1.0)


def _new_model(settings: TrainingSettings, train: LabelSet) -> torch.nn.Sequential:
    """The untrained network; its last bias is the best guess that looks at no feature."""
    import torch

    bias_O = {"mlp": _mean_accepted, "survival": _mean_logits}[settings.kind](train)
    widths = [NUM_FEATURES, *settings.hidden, len(bias_O)]
    layers: list[torch.nn.Module] = []
    for num_in, num_out in pairwise(widths):
        dropout = torch.nn.Dropout(settings.dropout_share)
        layers += [torch.nn.Linear(num_in, num_out), torch.nn.ReLU(), dropout]
    last = layers[-3]
    assert isinstance(last, torch.nn.Linear)
    with torch.no_grad():
        last.bias.copy_(torch.from_numpy(bias_O))
    return torch.nn.Sequential(*layers[:-2])


def _mean_accepted(train: LabelSet) -> Float32Array:
    return np.array([train.accepted_N.mean()], dtype=np.float32)


def _mean_logits(train: LabelSet) -> Float32Array:
    """Log-odds of the conditional acceptance at every k, with a prior of one hit and one miss."""
    k_K = np.arange(1, NUM_SURVIVAL + 1)
    at_risk_K = np.array(
        [((train.accepted_N >= k - 1) & (train.draft_len_N >= k)).sum() for k in k_K]
    )
    hits_K = np.array([(train.accepted_N >= k).sum() for k in k_K])
    logits_K: Float32Array = np.log((hits_K + 1) / (at_risk_K - hits_K + 1)).astype(np.float32)
    return logits_K


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch for a while: sums are the same wherever they are added up."""
    import torch

    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(num_threads)


def _threads_for(batch_size: int) -> AbstractContextManager[None]:
    return one_thread() if batch_size <= ONE_THREAD_BATCH else nullcontext()


def _descend(
    model: torch.nn.ModuleList,
    features_NF: torch.Tensor,
    truth: _Truth,
    settings: TrainingSettings,
) -> Iterator[tuple[int, float]]:
    """Train in place; gives each epoch (from 1) and its mean loss as it is over."""
    import torch

    loss_of = {"mlp": _squared_error, "survival": _conditional_cross_entropy}[settings.kind]
    num_positions = len(features_NF)
    batch_size = settings.batch_for(num_positions)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=settings.epochs, eta_min=0.02 * settings.learning_rate
    )
    for epoch in range(1, settings.epochs + 1):
        total = 0.0
        order_N = torch.randperm(num_positions)
        for rows_B in torch.split(order_N, batch_size):
            losses = [loss_of(member(features_NF[rows_B]), truth[rows_B]) for member in model]
            loss = torch.stack(losses).sum()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += float(loss.detach()) / len(losses) * len(rows_B)
        schedule.step()
        yield epoch, total / num_positions


def _squared_error(outputs_B1: torch.Tensor, truth: _Truth) -> torch.Tensor:
    return (outputs_B1[:, 0] - truth.accepted_N).square().mean()


def _conditional_cross_entropy(logits_BK: torch.Tensor, truth: _Truth) -> torch.Tensor:
    """Cross-entropy of each acceptance that was tried: k <= accepted + 1, within the draft."""
    import torch

    k_K = torch.arange(1, logits_BK.shape[1] + 1)
    num_tried_B = torch.minimum(truth.accepted_N + 1, truth.draft_len_N)
    is_tried_BK = k_K <= num_tried_B[:, None]
    is_accepted_BK = (k_K <= truth.accepted_N[:, None]).float()
    losses_BK = torch.nn.functional.binary_cross_entropy_with_logits(
        logits_BK, is_accepted_BK, reduction="none"
    )
    return (losses_BK * is_tried_BK).sum() / len(logits_BK)


def _exported(
    model: torch.nn.ModuleList,
    features_NF: Float32Array,
    *,
    mean_F: NDArray[np.float64],
    scale_F: NDArray[np.float64],
) -> Network:
    layers = joined([_layers_of(member) for member in model])
    first_weight_IO, first_bias_O = (part.astype(np.float64) for part in layers[0])
    layers[0] = folded(first_weight_IO, first_bias_O, mean_F=mean_F, scale_F=scale_F)
    low_F = np.maximum(features_NF.min(axis=0), mean_F - CLIP * scale_F).astype(np.float32)
    high_F = np.minimum(features_NF.max(axis=0), mean_F + CLIP * scale_F).astype(np.float32)
    return Network(layers, low_F=low_F, high_F=high_F)


def _layers_of(member: torch.nn.Module) -> list[Layer]:
    import torch

    return [
        (module.weight.detach().numpy().T.copy(), module.bias.detach().numpy().copy())
        for module in member.children()
        if isinstance(module, torch.nn.Linear)
    ]
