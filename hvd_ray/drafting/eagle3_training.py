"""Train an EAGLE-3 head on what the target says.

Training-time test (EAGLE-3, section 3): each position roots a chain of K steps on the head's own
features, step i weighing 0.8^i; after a short regression onto the target's last hidden state, soft
cross-entropy against the target's distribution over the draft vocabulary.

A run lives in a folder. Killed and started again it goes on from its last checkpoint; weights and
optimiser state are safetensors, the rest JSON.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from hvd_ray.drafting.eagle3 import Eagle3Config, Eagle3Head, Eagle3Weights
from hvd_ray.drafting.eagle3_chain import PackedRows, chain_steps, pack
from hvd_ray.drafting.eagle3_eval import DraftQuality, evaluate
from hvd_ray.drafting.eagle3_loss import sample_classes, soft_cross_entropy, target_probs
from hvd_ray.drafting.eagle3_states import ResponseStates, StateCache
from hvd_ray.errors import UserError

LogMetrics = Callable[[Mapping[str, float], int], None]
FROZEN = ("embed_UH", "draft_to_target_V")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long and how; the defaults made the shipped head."""

    num_steps: int = 2000
    rows_per_step: int = 1024
    """Response positions in one optimiser step, each the root of a chain."""
    chain_steps: int = 4
    step_decay: float = 0.8
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-3
    lm_head_learning_rate: float = 0.0
    """0 keeps the output projection at the target's rows, which saves a third of the time."""
    num_likely_classes: int = 4096
    num_random_classes: int = 1024
    """The loss looks at these classes of each batch; as many as the vocabulary for all."""
    warmup_steps: int = 50
    final_learning_rate_share: float = 0.05
    grad_clip: float = 0.5
    weight_decay: float = 0.0
    regression_steps: int = 150
    checkpoint_every: int = 100
    evaluate_every: int = 200
    num_held_out: int = 150
    shards_in_pool: int = 6
    dtype: str = "bfloat16"
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class World:
    """This worker among those that train one head together (torch.distributed, if several)."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """The worker that saves, measures and logs."""
        return self.rank == 0

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its mean over the workers."""
        if self.size > 1:
            for tensor in tensors:
                torch.distributed.all_reduce(tensor)
                tensor /= self.size

    def share(self, shards: Sequence[Path]) -> list[Path]:
        """This worker's shards.

        Raises:
            UserError: there are fewer shards than workers.
        """
        if len(shards) < self.size:
            raise UserError(f"{len(shards)} shards cannot feed {self.size} workers: use fewer")
        return list(shards[self.rank :: self.size])


class Trainer:
    """float32 master weights, their optimiser, and one step of the loss."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        head_config: Eagle3Config,
        weights: Eagle3Weights,
        aux_std_A: Tensor,
        world: World | None = None,
    ) -> None:
        self.config = config
        self.world = world or World()
        self._dtype = getattr(torch, config.dtype)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        weights = weights.on(self.device)
        self._aux_std_A = aux_std_A = aux_std_A.to(self.device)
        self._frozen = weights
        self._target_head_VH = weights.lm_head_VH.to(self._dtype)
        # `fc` is trained for states of unit scale: the target's channels differ by orders of
        # magnitude and one learning rate would not suit them all.
        scaled = replace(weights, fc_HA=weights.fc_HA * aux_std_A)
        names = [name for name in weights.named() if name not in FROZEN]
        if config.lm_head_learning_rate == 0:
            names.remove("lm_head_VH")
        self.masters = {
            name: getattr(scaled, name).float().clone().requires_grad_() for name in names
        }
        self._base = Eagle3Head(head_config, weights.to(self._dtype))
        self.optimizers = self._optimizers()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """AdamW for all, or Muon for the matrices and AdamW for the rest."""
        groups = {
            name: {"params": [tensor], "peak_lr": self._peak_learning_rate(name)}
            for name, tensor in self.masters.items()
        }
        decay = self.config.weight_decay
        if self.config.optimizer == "adamw":
            return [torch.optim.AdamW(groups.values(), betas=(0.9, 0.95), weight_decay=decay)]
        is_matrix = {
            name: tensor.ndim == 2 and name != "lm_head_VH" for name, tensor in self.masters.items()
        }
        matrices = [group for name, group in groups.items() if is_matrix[name]]
        others = [group for name, group in groups.items() if not is_matrix[name]]
        return [
            torch.optim.Muon(matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=decay),
        ]

    def state_of(self, name: str) -> dict[str, Tensor]:
        """The optimiser's tensors of one master, to be saved or filled in."""
        master = self.masters[name]
        owner = next(each for each in self.optimizers if _owns(each, master))
        state: dict[str, Tensor] = owner.state[master]
        return state

    def _peak_learning_rate(self, name: str) -> float:
        is_projection = name == "lm_head_VH"
        return self.config.lm_head_learning_rate if is_projection else self.config.learning_rate

    def head(self) -> Eagle3Head:
        """The head under training in the compute dtype; gradients flow to the masters."""
        cast = {name: tensor.to(self._dtype) for name, tensor in self.masters.items()}
        cast["fc_HA"] = (self.masters["fc_HA"] / self._aux_std_A).to(self._dtype)
        return self._base.with_weights(replace(self._base.weights, **cast))

    @torch.no_grad()
    def export(self) -> Eagle3Weights:
        """float32 weights as they would be saved."""
        trained = {name: tensor.detach().clone() for name, tensor in self.masters.items()}
        trained["fc_HA"] = trained["fc_HA"] / self._aux_std_A
        return replace(self._frozen, **trained).on(torch.device("cpu"))

    def step(self, rows: PackedRows, *, step: int) -> dict[str, float]:
        """One optimiser step; returns the metrics to log."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * learning_rate_share(step, self.config)
        head, rows = self.head(), rows.on(self.device)
        is_regression = step < self.config.regression_steps
        loss_of = self._regression_losses if is_regression else self._cross_entropy_losses
        losses = loss_of(head, rows)
        total = sum(
            (self.config.step_decay**i * loss for i, loss in enumerate(losses)),
            torch.zeros((), device=self.device),
        )
        torch.autograd.backward(total)
        grads = (master.grad for master in self.masters.values())
        self.world.average(grad for grad in grads if grad is not None)
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self.config.grad_clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        kind = "regression" if is_regression else "cross_entropy"
        metrics = {f"{kind}_{i}": float(loss.detach()) for i, loss in enumerate(losses)}
        return metrics | {"loss": float(total.detach()), "grad_norm": float(norm)}

    def _regression_losses(self, head: Eagle3Head, rows: PackedRows) -> list[Tensor]:
        final_RH = rows.final_RH.float()
        scale = final_RH.square().mean()
        losses = []
        for i, normed_RH in enumerate(self._chain(head, rows)):
            valid = rows.is_valid_RK[:, i]
            error = normed_RH[valid].float() - final_RH[rows.label_row_RK[valid, i]]
            losses.append(error.square().mean() / scale)
        return losses

    def _cross_entropy_losses(self, head: Eagle3Head, rows: PackedRows) -> list[Tensor]:
        probs_RV = target_probs(rows.final_RH.to(self._dtype), self._target_head_VH)
        classes = sample_classes(
            probs_RV,
            num_likely=self.config.num_likely_classes,
            num_random=self.config.num_random_classes,
        )
        probs_RC, head_CH = classes.take(probs_RV), head.weights.lm_head_VH[classes.index_C]
        is_drafted_R = torch.isin(rows.label_R, head.weights.draft_to_target_V)
        losses = []
        for i, normed_RH in enumerate(self._chain(head, rows)):
            row_R = rows.label_row_RK[:, i]
            keep = rows.is_valid_RK[:, i] & is_drafted_R[row_R]
            num_kept = int(keep.sum())
            weight_N = torch.full((num_kept,), 1.0 / max(1, num_kept), device=self.device)
            losses.append(
                soft_cross_entropy(
                    normed_RH[keep],
                    head_CH,
                    probs_RC,
                    row_R[keep],
                    weight_N,
                    bias_V=classes.bias_C,
                )
            )
        return losses

    def _chain(self, head: Eagle3Head, rows: PackedRows) -> Iterator[Tensor]:
        return chain_steps(
            head,
            rows,
            num_steps=self.config.chain_steps,
            feed=lambda step: rows.forced_RK[:, step],
        )


def _owns(optimizer: torch.optim.Optimizer, master: Tensor) -> bool:
    return any(each is master for group in optimizer.param_groups for each in group["params"])


def learning_rate_share(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine down to `final_learning_rate_share`."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.num_steps - config.warmup_steps)
    floor = config.final_learning_rate_share
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def training_batches(
    cache: StateCache, shards: Sequence[Path], config: TrainConfig, *, seed: int
) -> Iterator[PackedRows]:
    """Endless batches of about `rows_per_step` roots; a few shards at a time are mixed."""
    rng = random.Random(seed)
    while True:
        order = list(shards)
        rng.shuffle(order)
        for start in range(0, len(order), config.shards_in_pool):
            pool = [
                states
                for shard in order[start : start + config.shards_in_pool]
                for states in cache.load(shard)
                if not states.response.is_held_out and states.num_rows > 3
            ]
            rng.shuffle(pool)
            yield from _batches(pool, config)


def _batches(pool: Sequence[ResponseStates], config: TrainConfig) -> Iterator[PackedRows]:
    batch: list[ResponseStates] = []
    for states in pool:
        batch.append(states)
        if sum(each.num_rows for each in batch) >= config.rows_per_step:
            yield pack(batch, num_steps=config.chain_steps)
            batch = []


def held_out_states(
    cache: StateCache, shards: Sequence[Path], *, limit: int
) -> list[ResponseStates]:
    """Greedy responses to held-out prompts, `limit` at the most."""
    found = []
    for shard in shards:
        for states in cache.load(shard):
            if states.response.is_held_out and states.response.temperature == 0:
                found.append(states)
        if len(found) >= limit:
            break
    return found[:limit]


@torch.no_grad()
def aux_std(cache: StateCache, shard: Path, *, num_responses: int = 64) -> Tensor:
    """Root mean square of every channel of the target's states, A."""
    total, count = torch.zeros(()), 0
    for index, states in enumerate(cache.load(shard)):
        if index < num_responses:
            total = total + states.aux_TA[1:].float().square().sum(0)
            count += len(states.aux_TA) - 1
    return (total / max(1, count)).sqrt().clamp_min(1e-4)


def train(
    trainer: Trainer,
    *,
    cache: StateCache,
    shards: Sequence[Path],
    run: Path,
    log_metrics: LogMetrics,
) -> dict[str, DraftQuality]:
    """Run until `num_steps`, from the run folder's last checkpoint if it has one.

    Returns the quality on held-out prompts at the end (of the first worker; others measure
    nothing). Several workers share the folder, which the first one writes.
    """
    config, world = trainer.config, trainer.world
    run.mkdir(parents=True, exist_ok=True)
    first = load_checkpoint(trainer, run)
    held_out: list[ResponseStates] = []
    if world.is_first:
        held_out = held_out_states(cache, shards, limit=config.num_held_out)
    seed = config.seed + first
    batches = training_batches(cache, world.share(shards), config, seed=seed)
    for step in range(first, config.num_steps):
        started = time.perf_counter()
        rows = next(batches)
        loaded = time.perf_counter()
        metrics = trainer.step(rows, step=step)
        seconds = time.perf_counter() - loaded
        speed = {"rows_per_second": rows.num_roots / seconds, "load_seconds": loaded - started}
        if not world.is_first:
            continue
        log_metrics(metrics | speed, step)
        if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.num_steps:
            save_checkpoint(trainer, run, step=step + 1)
        if (step + 1) % config.evaluate_every == 0:
            log_metrics(quality_metrics(evaluate(trainer.head(), held_out)), step)
    return evaluate(trainer.head(), held_out)


def quality_metrics(quality: Mapping[str, DraftQuality]) -> dict[str, float]:
    """Flat names for a tracker: emitted per pass by workload, accuracy by position over all."""
    metrics = {f"emitted_per_pass/{name}": each.emitted_per_pass for name, each in quality.items()}
    overall = quality["all"].accuracy_by_position if quality else []
    for position, accuracy in enumerate(overall, start=1):
        metrics[f"accuracy/position_{position}"] = accuracy
    return metrics


def save_checkpoint(trainer: Trainer, run: Path, *, step: int) -> None:
    """Masters and optimiser state; the pointer moves last, so a kill leaves the old one whole."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach() for name, tensor in trainer.masters.items()}
    for name in trainer.masters:
        tensors |= {f"{name}.{key}": value for key, value in trainer.state_of(name).items()}
    path = run / f"checkpoint-{step:06d}.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    pointer = run / "checkpoint.json.partial"
    state = {"step": step, "file": path.name, "config": asdict(trainer.config)}
    pointer.write_text(json.dumps(state, indent=1))
    pointer.rename(run / "checkpoint.json")
    for old in sorted(run.glob("checkpoint-*.safetensors"))[:-2]:
        old.unlink()


def load_checkpoint(trainer: Trainer, run: Path) -> int:
    """Restore masters and optimiser; returns the step to go on from, 0 without a checkpoint."""
    from safetensors.torch import load_file

    pointer = run / "checkpoint.json"
    if not pointer.exists():
        return 0
    state = json.loads(pointer.read_text())
    tensors = load_file(run / state["file"])
    for name, master in trainer.masters.items():
        master.data.copy_(tensors[name])
        trainer.state_of(name).update(
            (key.removeprefix(f"{name}."), tensor.clone())
            for key, tensor in tensors.items()
            if key.startswith(f"{name}.")
        )
    return int(state["step"])
