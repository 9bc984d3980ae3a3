"""The target's hidden states on recorded responses, recomputed and optionally kept on disk.

The states are what an EAGLE-3 head reads (`aux`) and learns from (`final`). They are a thousand
times larger than the tokens, so they are recomputed shard by shard; a folder given as a cache
keeps them in memory-mapped files as long as its budget lasts.

Shapes: T rows of a sequence, R rows from the last prompt token on, A concatenated states, H width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvd_ray.drafting.eagle3_responses import CutAt, Response, read_responses, uncut


@dataclass(frozen=True, kw_only=True)
class ResponseStates:
    """A response with the target's states; R counts the outputs plus the last prompt token."""

    response: Response
    token_ids_T: Tensor  # int64; the prompt may have lost its head
    aux_TA: Tensor
    final_RH: Tensor  # after the target's last norm, at positions T-R .. T-1
    greedy_R: Tensor  # the target's own next token at those positions

    @property
    def num_rows(self) -> int:
        return self.final_RH.shape[0]


class TargetStates:
    """Runs a transformers model over responses; a prompt shared by neighbours is read once."""

    def __init__(self, model: Any, *, aux_layer_ids: Sequence[int], max_prompt: int = 1024) -> None:
        self._model = model
        self._aux_layer_ids = tuple(aux_layer_ids)
        self._max_prompt = max_prompt
        self._prompt: tuple[int, ...] = ()
        self._cache: Any = None
        self._prompt_aux: Tensor | None = None
        self._prompt_last: Tensor | None = None

    @torch.inference_mode()
    def states(self, response: Response) -> ResponseStates:
        """The states of one response, in the model's dtype."""
        self._read_prompt(response.prompt_token_ids)
        assert self._prompt_aux is not None
        assert self._prompt_last is not None
        aux, final = self._run(response.output_token_ids)
        self._cache.crop(-len(response.output_token_ids))
        final_RH = torch.cat((self._prompt_last, final))
        kept = response.prompt_token_ids[-self._max_prompt :]
        return ResponseStates(
            response=response,
            token_ids_T=torch.tensor(kept + response.output_token_ids),
            aux_TA=torch.cat((self._prompt_aux, aux)).cpu(),
            final_RH=final_RH.cpu(),
            greedy_R=self._model.lm_head(final_RH).argmax(-1).cpu(),
        )

    def _read_prompt(self, prompt: tuple[int, ...]) -> None:
        if prompt == self._prompt:
            return
        from transformers.cache_utils import DynamicCache

        self._cache = DynamicCache(config=self._model.config)
        aux, final = self._run(prompt)
        self._prompt, self._prompt_aux = prompt, aux[-self._max_prompt :].clone()
        self._prompt_last = final[-1:].clone()

    def _run(self, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        output = self._model.model(
            torch.tensor([token_ids], device=self._model.device),
            past_key_values=self._cache,
            use_cache=True,
            output_hidden_states=True,
        )
        states = output.hidden_states
        aux = torch.cat([states[layer][0] for layer in self._aux_layer_ids], dim=-1)
        return aux, output.last_hidden_state[0]


class StateCache:
    """Shard states on disk up to a budget; beyond it they are recomputed each time."""

    def __init__(
        self,
        folder: Path | None,
        *,
        target: TargetStates,
        budget_gb: float,
        max_prompt_tokens: int = 1200,
        cut_at: CutAt = uncut,
    ) -> None:
        self.max_prompt_tokens = max_prompt_tokens
        self._cut_at = cut_at
        self._folder = folder
        self._target = target
        self._budget_bytes = int(budget_gb * 1e9)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def is_stored(self, shard: Path) -> bool:
        path = self._path(shard)
        return path is not None and path.exists()

    def load(self, shard: Path) -> Iterator[ResponseStates]:
        """The shard's responses with states, in a fixed order."""
        responses = read_responses(
            shard, max_prompt_tokens=self.max_prompt_tokens, cut_at=self._cut_at
        )
        path = self._path(shard)
        if path is None:
            yield from map(self._target.states, responses)
            return
        if not path.exists():
            yield from self._compute(responses, path)
            return
        yield from _read_states(path, responses)

    def _compute(self, responses: Sequence[Response], path: Path) -> Iterator[ResponseStates]:
        states = []
        for response in responses:
            states.append(self._target.states(response))
            yield states[-1]
        if self._used_bytes() < self._budget_bytes:
            _write_states(path, states)

    def _path(self, shard: Path) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"{shard.parent.name}-{shard.stem}.safetensors"

    def _used_bytes(self) -> int:
        assert self._folder is not None
        return sum(path.stat().st_size for path in self._folder.glob("*.safetensors"))


def _write_states(path: Path, states: Sequence[ResponseStates]) -> None:
    from safetensors.torch import save_file

    tensors = {
        "aux": torch.cat([each.aux_TA for each in states]).to(torch.bfloat16),
        "final": torch.cat([each.final_RH for each in states]).to(torch.bfloat16),
        "greedy": torch.cat([each.greedy_R for each in states]).to(torch.int32),
        "tokens": torch.cat([each.token_ids_T for each in states]).to(torch.int32),
        "num_tokens": torch.tensor([len(each.token_ids_T) for each in states]),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.rename(path)


def _read_states(path: Path, responses: Sequence[Response]) -> Iterator[ResponseStates]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        aux, final = file.get_tensor("aux"), file.get_tensor("final")
        greedy, tokens = file.get_tensor("greedy").long(), file.get_tensor("tokens").long()
        lengths = file.get_tensor("num_tokens").tolist()
    token_start = row_start = 0
    for response, num_tokens in zip(responses, lengths, strict=True):
        num_rows = len(response.output_token_ids) + 1
        token_end, row_end = token_start + num_tokens, row_start + num_rows
        yield ResponseStates(
            response=response,
            token_ids_T=tokens[token_start:token_end],
            aux_TA=aux[token_start:token_end],
            final_RH=final[row_start:row_end],
            greedy_R=greedy[row_start:row_end],
        )
        token_start, row_start = token_end, row_end
