"""A decoder that has just given the same answer, so that its next drafts are long and right."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hvd_ray.config import Config
from hvd_ray.decode import Decoder
from hvd_ray.engines.toy import EOS, ToyEngine
from hvd_ray.types import Completion, Request, SamplingParams
from tests.property.toy_requests import decoder

PROMPT = (3, 1, 4, 1, 5, 2, 2, 4)
LONGEST_ANSWER = 60
HEAD_LEN = 8
"""Tokens of a cached output that the prompt ends in: a match from the first cycle on."""
EAGER = Config.model_validate(
    {
        "policy": {"tau": 1.5},
        "drafting": {"suffix": {"max_spec_factor": 64, "rule_spec_factor": 64}},
    }
)
"""Drafts as long as the cache knows the text."""


@dataclass(frozen=True)
class Warm:
    """One prompt whose whole answer the cache holds, past every stop."""

    decoder: Decoder
    engine: ToyEngine
    prompt: tuple[int, ...]
    answer: Completion
    """What was cached; `ignore_eos` and no stops unless asked for."""

    def ask(self, prompt: tuple[int, ...] | None = None, **sampling: object) -> Completion:
        """The same prompt again; `longest_draft` says whether the case was met."""
        return self.decoder.generate(Request("again", prompt or self.prompt, params(**sampling)))

    def ask_plainly(self, prompt: tuple[int, ...] | None = None, **sampling: object) -> Completion:
        request = Request("plain", prompt or self.prompt, params(**sampling))
        return decoder("greedy", self.engine).generate(request)


def params(**sampling: object) -> SamplingParams:
    given = {"max_tokens": LONGEST_ANSWER, "ignore_eos": True} | sampling
    return SamplingParams(**given)  # type: ignore[arg-type]


def warm(engine: ToyEngine | None = None, **sampling: object) -> Warm:
    """A `suffix` decoder that has answered the prompt once, with these parameters."""
    engine = engine or ToyEngine(vocab_size=24, order=3, seed=7, sharpness=6.0)
    warmed = decoder("suffix", engine, EAGER)
    whole = warmed.generate(Request("whole", PROMPT, params(max_tokens=LONGEST_ANSWER + HEAD_LEN)))
    prompt = PROMPT + whole.token_ids[:HEAD_LEN]
    return Warm(
        warmed, engine, prompt, warmed.generate(Request("first", prompt, params(**sampling)))
    )


def longest_draft(completion: Completion) -> int:
    """Of the verified drafts; a case about long accepted runs must have met one."""
    return max(step.drafted for step in completion.steps)


def with_an_eos() -> Warm:
    """An engine whose free-running answer has an EOS in its middle, cached past it."""
    for seed in range(300):
        cached = warm(ToyEngine(vocab_size=24, order=3, seed=seed, sharpness=6.0))
        tokens = cached.answer.token_ids
        if EOS in tokens and 6 <= tokens.index(EOS) <= 30:
            return cached
    raise AssertionError("no seed gives an answer with an EOS in its middle")


def same(one: Completion, other: Completion) -> bool:
    """Text, tokens and ends alike; who drafted may differ."""
    blank = {"request_id": "", "steps": ()}
    return replace(one, **blank) == replace(other, **blank)  # type: ignore[arg-type]
