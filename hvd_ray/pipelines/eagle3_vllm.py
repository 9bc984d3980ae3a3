"""The same head in vLLM and in the torch engine: how much of its chains stands on the same prompts.

float32 on both sides, greedy, one request after the other: what differs then is an error in one of
the two, apart from the last cycles of a request, where the torch engine drafts no further than the
budget and vLLM does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_ray.config import Config
from hvd_ray.fetch import resolve_model
from hvd_ray.pipelines.eagle3_collect import set_fast_cpu_defaults
from hvd_ray.systems import Parts, build_decoder, head_folder, load_engine, load_head
from hvd_ray.types import Request, SamplingParams

_DRAFTS = "vllm:spec_decode_num_drafts"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"

Told = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What one engine made of the prompts."""

    outputs: tuple[tuple[int, ...], ...]
    """Output tokens of each prompt."""
    num_drafts: int
    """Target passes that verified a chain."""
    num_accepted: int
    """Draft tokens that stood."""

    @property
    def mean_length(self) -> float:
        """Tokens of a pass that verified a chain: 1 + accepted / drafts, as vLLM reports it."""
        return 1 + self.num_accepted / max(1, self.num_drafts)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same head, twice."""

    torch: Acceptance
    vllm: Acceptance

    @property
    def difference(self) -> float:
        """Of vLLM's mean length from the torch engine's, as a share of it."""
        return self.vllm.mean_length / self.torch.mean_length - 1

    @property
    def num_identical(self) -> int:
        """Prompts with the same output tokens."""
        pairs = zip(self.torch.outputs, self.vllm.outputs, strict=True)
        return sum(ours == theirs for ours, theirs in pairs)

    def as_json(self) -> dict[str, Any]:
        return {
            "prompts": len(self.torch.outputs),
            "identical_outputs": self.num_identical,
            "difference": round(self.difference, 4),
            **{
                name: {
                    "mean_acceptance_length": round(each.mean_length, 4),
                    "drafts": each.num_drafts,
                    "accepted": each.num_accepted,
                    "tokens": sum(map(len, each.outputs)),
                }
                for name, each in (("torch", self.torch), ("vllm", self.vllm))
            },
        }


def compare(
    prompts: Sequence[tuple[int, ...]], config: Config, *, max_tokens: int, told: Told
) -> Comparison:
    """Decode the prompts in both engines, torch first: vLLM binds the process's threads for good.

    Args:
        prompts: token ids.
        config: names target and head; its number format is not used.
        max_tokens: output tokens of each prompt.
        told: called after each prompt in either engine.

    Raises:
        UserError: the target or the head cannot be loaded, or they do not fit.
    """
    config = config.model_copy(update={"dtype": "float32"})
    return Comparison(
        _in_torch(prompts, config, max_tokens, told), _in_vllm(prompts, config, max_tokens, told)
    )


def _in_torch(
    prompts: Sequence[tuple[int, ...]], config: Config, max_tokens: int, told: Told
) -> Acceptance:
    engine, codec = load_engine(config)
    head, engine = load_head(config, engine)
    decoder = build_decoder(
        "eagle3", engine=engine, codec=codec, config=config, parts=Parts(head=head)
    )
    outputs, steps = [], []
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=max_tokens)
        completion = decoder.generate(Request(str(number), prompt, sampling))
        outputs.append(completion.token_ids)
        steps += [step for step in completion.steps if step.drafted]
        told()
    return Acceptance(tuple(outputs), len(steps), sum(step.accepted for step in steps))


def _in_vllm(
    prompts: Sequence[tuple[int, ...]], config: Config, max_tokens: int, told: Told
) -> Acceptance:
    engine = _vllm_engine(config, max(map(len, prompts)) + max_tokens)
    from vllm import SamplingParams as VllmSampling

    sampling = VllmSampling(temperature=0.0, max_tokens=max_tokens, detokenize=False)
    outputs: list[tuple[int, ...]] = []
    for prompt in prompts:
        (done,) = engine.generate([{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False)
        outputs.append(tuple(done.outputs[0].token_ids))
        told()
    counters = {metric.name: metric.value for metric in engine.get_metrics() if _counts(metric)}
    return Acceptance(tuple(outputs), int(counters[_DRAFTS]), int(counters[_ACCEPTED]))


def _counts(metric: Any) -> bool:
    return metric.name in (_DRAFTS, _ACCEPTED)


def _vllm_engine(config: Config, num_tokens: int) -> Any:
    """vLLM's offline engine in this process, one request at a time, with the head."""
    set_fast_cpu_defaults()
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # the answer is on stdout
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM

    num_drafted = config.drafting.eagle3.num_tokens
    return LLM(
        model=str(Path(resolve_model(config.model).path_or_id)),
        trust_remote_code=False,
        load_format="safetensors",
        dtype="float32",
        max_num_seqs=1,
        max_model_len=num_tokens + num_drafted + 1,
        enforce_eager=True,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        disable_log_stats=False,  # its counters are what is asked for
        speculative_config={
            "method": "eagle3",
            "model": str(head_folder(config).absolute()),
            "num_speculative_tokens": num_drafted,
        },
    )
