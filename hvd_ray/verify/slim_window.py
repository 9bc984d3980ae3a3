"""The text on which slim models are judged: target outputs, the drafts a cache makes for them.

Everything is read in single passes over recorded text. What a slim model says after a prefix of the
recording is what it would say when decoding, so a block's walk under a gate can be followed up to
the first token that departs from the recording, and ends there. Decoding goes on behind an accepted
wrong token, and may yet escalate the block for a later one: `escalated` is a little too low here,
and `wrong_rate` counts a token that the target would have been asked about.

Shapes: T tokens of a sequence, R output rows, K draft tokens, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hvd_ray.engines.slim import SlimLayers
from hvd_ray.engines.torch_engine import TorchEngine
from hvd_ray.engines.torch_tiers import LayerWalk
from hvd_ray.types import Draft, Int32Array
from hvd_ray.verify.gate import Gate, GateRows, Judgement, Tier


@dataclass(frozen=True, slots=True)
class Block:
    """A cache draft at a visited position of a recorded output."""

    position: int
    """Output tokens before it."""
    draft: Draft


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded request."""

    token_ids: Int32Array
    """Prompt and output."""
    prompt_len: int
    blocks: tuple[Block, ...] = ()

    @property
    def output(self) -> Int32Array:
        return self.token_ids[self.prompt_len :]

    @property
    def num_rows(self) -> int:
        """R: rows that predict an output token."""
        return len(self.token_ids) - self.prompt_len


def target_logits(engine: TorchEngine, recorded: Recorded) -> torch.Tensor:
    """float32 [R, V]: the target's view of each output token."""
    rows = recorded.token_ids[:-1]
    cache = engine.new_cache()
    return engine.forward(rows, cache, num_logits=recorded.num_rows).logits_TV


@torch.inference_mode()
def slim_logits(engine: TorchEngine, slim: SlimLayers, recorded: Recorded) -> torch.Tensor:
    """float32 [R, V]: the same by a slim model."""
    walk = LayerWalk(engine.model)
    hidden_BTD, _ = walk.run(
        walk.embed(recorded.token_ids[:-1]),
        engine.new_cache(),
        past=0,
        layers=range(slim.num_layers),
        skipped=slim,
    )
    return walk.logits(hidden_BTD[:, -recorded.num_rows :])


@dataclass(slots=True)
class Tally:
    """How blocks fared under a gate."""

    num_blocks: int = 0
    num_escalated: int = 0
    num_committed: int = 0
    """Tokens committed without the target."""
    num_wrong: int = 0
    """Of them, those that the target would not have chosen."""
    num_full_tokens: int = 0
    """Tokens of the same blocks, had the target verified each: accepted and bonus."""
    num_tiered_tokens: int = 0
    """Tokens that came of the blocks: those committed, and an escalated block's full ones."""
    num_rows: int = 0
    num_agreeing: int = 0
    """Rows at which the slim model's own token is the target's."""
    log_margin: float = 0.0
    """Sum over rows of max log q' - log q'(target's token): 0 where they agree. DIMR's cost."""

    @property
    def escalated(self) -> float:
        """Share of the blocks that needed the target."""
        return self.num_escalated / max(1, self.num_blocks)

    @property
    def wrong_rate(self) -> float:
        return self.num_wrong / max(1, self.num_committed)

    @property
    def agreement(self) -> float:
        return self.num_agreeing / max(1, self.num_rows)

    @property
    def mean_log_margin(self) -> float:
        return self.log_margin / max(1, self.num_rows)

    def speed_vs_full(self, cost_ratio: float) -> float:
        """Tokens per cost, over those of verifying every block in full; passes alone count.

        Args:
            cost_ratio: of a slim pass to a full one.
        """
        if not self.num_full_tokens:
            return 1.0
        return self.num_tiered_tokens / self.num_full_tokens / (cost_ratio + self.escalated)

    def add_block(self, *, num_full: int, num_committed: int, is_wrong: bool) -> None:
        """Count a block; one of which nothing was committed was escalated.

        Args:
            num_full: tokens that full verification would give.
            num_committed: tokens without the target.
            is_wrong: whether the last of them is not the target's choice.
        """
        self.num_blocks += 1
        self.num_escalated += num_committed == 0
        self.num_committed += num_committed
        self.num_wrong += is_wrong
        self.num_full_tokens += num_full
        self.num_tiered_tokens += num_committed or num_full


@dataclass(frozen=True, slots=True)
class SlimView:
    """A slim model's view of a recording, beside what the target chose."""

    recorded: Recorded
    logits_RV: torch.Tensor
    target_R: Int32Array

    def gate_rows(self, block: Block) -> GateRows:
        """What a gate sees of a block; rows past the recording's end are left out."""
        draft = block.draft.cut(min(len(block.draft), len(self.target_R) - block.position - 1))
        rows_TV = self.logits_RV[block.position : block.position + len(draft) + 1]
        return GateRows(
            draft, torch.softmax(rows_TV, dim=-1), tuple(rows_TV.argmax(dim=-1).tolist())
        )

    def count(self, gate: Gate, tally: Tally) -> None:
        """Walk every block under a gate, as greedy decoding would."""
        for block in self.recorded.blocks:
            rows = self.gate_rows(block)
            if rows.draft.token_ids:
                self._walk(block, rows, gate, tally)

    def _walk(self, block: Block, rows: GateRows, gate: Gate, tally: Tally) -> None:
        wanted = self.target_R[block.position :].tolist()
        drafted = rows.draft.token_ids
        num_equal = next((i for i, t in enumerate(drafted) if t != wanted[i]), len(drafted))
        emitted = _emitted(rows, gate.judge(rows), wanted)
        is_wrong = bool(emitted) and emitted[-1] != wanted[len(emitted) - 1]
        tally.add_block(num_full=num_equal + 1, num_committed=len(emitted), is_wrong=is_wrong)

    def count_rows(self, tally: Tally) -> None:
        """Agreement and log margin over all output rows."""
        logprobs_RV = torch.log_softmax(self.logits_RV, dim=-1)
        index_R = torch.arange(len(self.target_R))
        chosen_R = logprobs_RV[index_R, torch.from_numpy(self.target_R.astype(np.int64))]
        best_R = logprobs_RV.max(dim=-1).values
        tally.num_rows += len(chosen_R)
        tally.num_agreeing += int((chosen_R >= best_R).sum())
        tally.log_margin += float((best_R - chosen_R).sum())


def _emitted(rows: GateRows, judged: Judgement, wanted: list[int]) -> list[int]:
    """Tokens that a block commits up to its first wrong one; none where it is escalated."""
    emitted: list[int] = []
    for row, (token, tier) in enumerate(zip(rows.draft.token_ids, judged.tiers, strict=True)):
        if tier is Tier.FULL:
            return []
        emitted.append(token if tier is Tier.ACCEPT else rows.own_ids[row])
        if tier is Tier.SLIM or emitted[-1] != wanted[row]:
            return emitted
    if judged.keeps_bonus:
        emitted.append(rows.own_ids[-1])
    return emitted


@dataclass(slots=True)
class Window:
    """Recordings, the engine that reads them and what the target chose in them."""

    engine: TorchEngine
    recordings: tuple[Recorded, ...]
    targets: list[Int32Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        for recorded in self.recordings:
            choice_R = target_logits(self.engine, recorded).argmax(dim=-1)
            self.targets.append(choice_R.cpu().numpy().astype(np.int32))

    @property
    def num_rows(self) -> int:
        return sum(recorded.num_rows for recorded in self.recordings)

    @property
    def num_layers(self) -> int:
        return int(self.engine.model.config.get_text_config().num_hidden_layers)

    def views(self, slim: SlimLayers) -> Iterator[SlimView]:
        for recorded, target_R in zip(self.recordings, self.targets, strict=True):
            yield SlimView(recorded, slim_logits(self.engine, slim, recorded), target_R)

    def tallies(self, slim: SlimLayers, gates: Sequence[Gate]) -> list[Tally]:
        """One tally for each gate, from one pass of the slim model over the window."""
        tallies = [Tally() for _ in gates]
        for view in self.views(slim):
            for gate, tally in zip(gates, tallies, strict=True):
                view.count(gate, tally)
                view.count_rows(tally)
        return tallies


def split_window(
    recordings: Sequence[Recorded], *, every: int = 4
) -> tuple[list[Recorded], list[Recorded]]:
    """`(search, held out)`: every `every`-th recording is not searched on."""
    kept = [recorded for at, recorded in enumerate(recordings) if at % every != every - 1]
    held = [recorded for at, recorded in enumerate(recordings) if at % every == every - 1]
    return kept, held


def within(recordings: Iterable[Recorded], num_tokens: int) -> list[Recorded]:
    """The first recordings that together have at most `num_tokens` tokens; one at least."""
    chosen: list[Recorded] = []
    total = 0
    for recorded in recordings:
        total += len(recorded.token_ids)
        if chosen and total > num_tokens:
            break
        chosen.append(recorded)
    return chosen
