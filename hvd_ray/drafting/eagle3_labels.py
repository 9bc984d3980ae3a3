"""What an EAGLE-3 head's chain would have been worth at every position of a recorded output.

Teacher-forced: one target pass over prompt and output gives the states that decoding would have
had, and every position's chain is drafted from those at once. A position's label is what the live
drafter would get there, and nothing where it would not draft (see `Eagle3Drafter.room`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hvd_ray.drafting.eagle3 import Eagle3Head
from hvd_ray.drafting.eagle3_chain import accepted_lengths
from hvd_ray.engines.base import Engine
from hvd_ray.types import Int32Array


@dataclass(frozen=True, slots=True)
class ChainLabeller:
    """Labels outputs with one target and one head; it keeps nothing between outputs."""

    engine: Engine
    """Hands out the hidden states that the head reads."""
    head: Eagle3Head
    num_tokens: int
    """K, the length of a chain."""

    def __call__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Int32Array:
        """Accepted length of the head's arg-max chain at every output position, shape [T].

        0 at the first position, where no states are there yet, and past the head's own context.
        """
        accepted_T = np.zeros(len(output_ids), np.int32)
        context_length = self.head.config.max_position_embeddings
        last = min(len(output_ids), context_length - len(prompt_ids)) - 1
        if last < 1:
            return accepted_T
        token_ids = np.array([*prompt_ids, *output_ids], np.int32)
        num_rows = len(prompt_ids) + last - 1  # states decide what follows two tokens later
        hidden_TD = self.engine.forward(
            token_ids[:num_rows], self.engine.new_cache(), num_logits=1
        ).hidden_TD
        assert hidden_TD is not None, "the engine must hand out hidden states"
        accepted_T[1 : last + 1] = accepted_lengths(
            self.head,
            torch.from_numpy(token_ids.astype(np.int64)),
            hidden_TD,
            first_root=len(prompt_ids) - 1,
            num_roots=last,
            num_steps=self.num_tokens,
        )
        room_T = context_length - len(prompt_ids) - np.arange(len(output_ids))
        np.minimum(accepted_T, np.maximum(room_T, 0), out=accepted_T, casting="same_kind")
        return accepted_T
