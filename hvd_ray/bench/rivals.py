"""Rivals measured in the same run: transformers' own speculative decoding, on the same weights.

`hf_prompt_lookup` is `generate(prompt_lookup_num_tokens=10)`, its documentation's value;
`hf_assisted` is assisted generation with the target's own first half as the assistant
(`assistant_early_exit`), since the default model has no smaller sibling. Everything else is left at
transformers' defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hvd_ray.errors import NotSupportedError
from hvd_ray.payoff.policy import NeverDraft, Policy
from hvd_ray.text import TextCodec
from hvd_ray.types import Completion, Request, SamplingParams, Source, Step

if TYPE_CHECKING:
    from hvd_ray.engines.torch_engine import TorchEngine

PROMPT_LOOKUP, ASSISTED = "hf_prompt_lookup", "hf_assisted"
RIVALS = (PROMPT_LOOKUP, ASSISTED)
LOOKUP_TOKENS = 10
_SOURCES = {PROMPT_LOOKUP: Source.NGRAM, ASSISTED: Source.SLIM}


@dataclass(frozen=True, slots=True)
class RivalDecoder:
    """A rival as the bench asks it: it remembers nothing from one request to the next."""

    name: str
    engine: TorchEngine
    codec: TextCodec
    policy: Policy = field(default_factory=NeverDraft)
    cache_drafter: None = None

    def generate(self, request: Request) -> Completion:
        """Run a request to its end.

        Raises:
            NotSupportedError: it asks for what cannot be told transformers alike.
        """
        import torch

        _refuse(request.sampling, self.name)
        record = _Record()
        prompt = torch.tensor([request.prompt_token_ids], device=self.engine.model.device)
        if request.sampling.seed is not None:
            torch.manual_seed(request.sampling.seed)
        with torch.inference_mode(), _counted_passes(self.engine.model, record):
            output = self.engine.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                streamer=record,
                **self._settings(request.sampling),
            )
        token_ids = tuple(output[0, prompt.shape[1] :].tolist())
        has_ended = bool(token_ids) and token_ids[-1] in self.engine.capabilities.eos_token_ids
        return Completion(
            request.request_id,
            token_ids,
            self.codec.decode(token_ids),
            "stop" if has_ended else "length",
            steps=tuple(record.steps(_SOURCES[self.name])),
        )

    def _settings(self, sampling: SamplingParams) -> dict[str, Any]:
        drafting: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        if self.name == ASSISTED:
            num_layers = self.engine.model.config.get_text_config().num_hidden_layers
            drafting = {"assistant_early_exit": max(1, num_layers // 2)}
        eos = self.engine.capabilities.eos_token_ids
        ending = {"eos_token_id": list(eos), "pad_token_id": eos[0]} if eos else {}
        return {**drafting, **ending, "max_new_tokens": sampling.max_tokens, **_sampled(sampling)}


def rival_facts() -> dict[str, str]:
    """For the provenance of a result: which rivals, at which version."""
    library = f"transformers {version('transformers')}"
    return {
        PROMPT_LOOKUP: f"{library}, prompt_lookup_num_tokens={LOOKUP_TOKENS}",
        ASSISTED: f"{library}, assistant_early_exit=half of the layers",
    }


@dataclass(slots=True)
class _Record:
    """A streamer that notes when how many tokens came, and what each target pass verified."""

    emitted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    verify_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    began_s: float = field(default_factory=perf_counter)
    _has_prompt: bool = False

    def put(self, token_ids: Any) -> None:
        """Called with the prompt first, then after each target pass."""
        if self._has_prompt:
            self.emitted.append(int(token_ids.numel()))
            self.ended_s.append(perf_counter())
        self._has_prompt = True

    def end(self) -> None: ...

    def steps(self, source: Source) -> Iterator[Step]:
        """One a target pass; what is not the pass itself counts as drafting."""
        position, before_s = 0, self.began_s
        for cycle, emitted in enumerate(self.emitted):
            drafted, verify_s = self.drafted[cycle], self.verify_s[cycle]
            spent_s, before_s = self.ended_s[cycle] - before_s, self.ended_s[cycle]
            yield Step(
                cycle=cycle,
                position=position,
                source=source if drafted else Source.NONE,
                drafted=drafted,
                accepted=min(emitted - 1, drafted),
                emitted=emitted,
                draft_us=1e6 * max(0.0, spent_s - verify_s),
                verify_us=1e6 * verify_s,
            )
            position += emitted


@contextmanager
def _counted_passes(model: Any, record: _Record) -> Iterator[None]:
    """Note the target's own passes; those of its first half, drafting, are none."""
    num_layers = model.config.get_text_config().num_hidden_layers
    started = [0.0]

    def before(module: Any, args: Sequence[Any], kwargs: Any) -> None:  # noqa: ARG001
        started[0] = perf_counter()

    def after(module: Any, args: Sequence[Any], kwargs: Any, output: Any) -> None:  # noqa: ARG001
        if model.config.get_text_config().num_hidden_layers == num_layers:
            record.verify_s.append(perf_counter() - started[0])
            record.drafted.append(max(0, int(kwargs.get("logits_to_keep") or 1) - 1))

    hooks = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _sampled(sampling: SamplingParams) -> dict[str, Any]:
    if sampling.is_greedy:
        # The values that sampling alone reads, so that a model's own are not warned about.
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    settings: dict[str, Any] = {"do_sample": True, "temperature": sampling.temperature}
    settings |= {"top_p": sampling.top_p, "top_k": max(0, sampling.top_k)}
    return settings | ({"min_p": sampling.min_p} if sampling.min_p else {})


def _refuse(sampling: SamplingParams, name: str) -> None:
    plain = SamplingParams()
    for setting in ("stop", "stop_token_ids", "min_tokens", "ignore_eos", "logprobs"):
        if getattr(sampling, setting) != getattr(plain, setting):
            raise NotSupportedError(f"{setting} in a prompt that {name} is measured on")
    if sampling.needs_history or sampling.logit_bias:
        raise NotSupportedError(f"penalties or logit_bias in a prompt that {name} is measured on")
