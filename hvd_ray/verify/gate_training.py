"""Teaches a gate, from recordings, how likely the target is to choose a token.

Each row that a block's walk may reach gives two examples, its draft token and the slim model's own;
the label is whether it is the target's choice. Rows behind the first departure from the recording
are not known and left out.

Shapes: N examples, F features, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hvd_ray.errors import UserError
from hvd_ray.payoff.network import Network, folded
from hvd_ray.types import Float32Array
from hvd_ray.verify.gate import gate_features, own_draft_probs
from hvd_ray.verify.slim_window import SlimView

HIDDEN_WIDTH = 32
NUM_STEPS = 600
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 1e-3
MIN_EXAMPLES = 50


@dataclass(frozen=True, slots=True)
class GateExamples:
    """Tokens as a gate sees them, and whether the target chose them."""

    features_NF: Float32Array
    is_chosen_N: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.is_chosen_N)


def examples_of(views: Iterable[SlimView]) -> GateExamples:
    """All examples of some recordings.

    Raises:
        UserError: there are none.
    """
    features: list[Float32Array] = []
    labels: list[bool] = []
    for view in views:
        for block in view.recorded.blocks:
            rows = view.gate_rows(block)
            if not rows.draft.token_ids:
                continue
            wanted = view.target_R[block.position : block.position + len(rows.own_ids)].tolist()
            drafted = rows.draft.token_ids
            known = next(
                (i + 1 for i, token in enumerate(drafted) if token != wanted[i]), len(drafted)
            )
            own = rows.own_ids[:known]
            of_draft = gate_features(drafted, rows.draft.probs, rows.probs_TV)[:known]
            of_own = gate_features(rows.own_ids, own_draft_probs(rows), rows.probs_TV)[:known]
            features += [of_draft, of_own]
            labels += [token == want for token, want in zip(drafted[:known], wanted, strict=False)]
            labels += [token == want for token, want in zip(own, wanted, strict=False)]
    if not features:
        raise UserError("the recordings hold no draft to learn from")
    return GateExamples(np.concatenate(features), np.array(labels))


def train_gate(examples: GateExamples, *, seed: int = 0) -> Network:
    """Fit two hidden layers by cross-entropy; small and deterministic.

    Raises:
        UserError: too few examples, or all of one kind.
    """
    chosen = examples.is_chosen_N
    if len(examples) < MIN_EXAMPLES or chosen.all() or not chosen.any():
        raise UserError(
            f"{len(examples)} examples, {int(chosen.sum())} of them the target's choice: too few "
            "or too much alike to learn from; record more traces"
        )
    features_NF = examples.features_NF.astype(np.float64)
    mean_F, scale_F = features_NF.mean(axis=0), features_NF.std(axis=0)
    scale_F[scale_F < 1e-6] = 1.0
    model = _fit((features_NF - mean_F) / scale_F, chosen, seed)
    layers = [module for module in model if isinstance(module, torch.nn.Linear)]
    weights = [
        (layer.weight.detach().double().numpy().T, layer.bias.detach().double().numpy())
        for layer in layers
    ]
    first = folded(*weights[0], mean_F=mean_F, scale_F=scale_F)
    rest = [(weight.astype(np.float32), bias.astype(np.float32)) for weight, bias in weights[1:]]
    low_F, high_F = examples.features_NF.min(axis=0), examples.features_NF.max(axis=0)
    arrays = [tuple(map(np.ascontiguousarray, layer)) for layer in (first, *rest)]
    return Network(arrays, low_F=low_F, high_F=high_F)  # type: ignore[arg-type]


def _fit(
    inputs_NF: NDArray[np.float64], chosen_N: NDArray[np.bool_], seed: int
) -> torch.nn.Sequential:
    x_NF = torch.from_numpy(inputs_NF).float()
    y_N = torch.from_numpy(chosen_N).float()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        width = x_NF.shape[1]
        model = torch.nn.Sequential(
            torch.nn.Linear(width, HIDDEN_WIDTH),
            torch.nn.ReLU(),
            torch.nn.Linear(HIDDEN_WIDTH, HIDDEN_WIDTH),
            torch.nn.ReLU(),
            torch.nn.Linear(HIDDEN_WIDTH, 1),
        )
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    with torch.enable_grad():
        for _ in range(NUM_STEPS):
            optimiser.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x_NF)[:, 0], y_N)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return model
