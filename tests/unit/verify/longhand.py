"""The sampling parameters as their documentation states them, one token at a time."""

from __future__ import annotations

import numpy as np

from hvd_ray.types import SamplingParams


def longhand(
    logits: np.ndarray, sampling: SamplingParams, prompt: np.ndarray, output: np.ndarray
) -> np.ndarray:
    """The distribution of the next token; `logits` is float64 and is changed."""
    for token in range(len(logits)):
        logits[token] += sampling.logit_bias.get(token, 0.0)
        times = int((output == token).sum())
        if times or token in prompt:
            penalty = sampling.repetition_penalty
            logits[token] = (
                logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
            )
        logits[token] -= sampling.frequency_penalty * times
        logits[token] -= sampling.presence_penalty * (times > 0)
    probs = np.exp(logits / sampling.temperature)
    probs /= probs.sum()
    probs[probs < sampling.min_p * probs.max()] = 0
    order = np.argsort(-probs)
    if sampling.top_k > 0:
        probs[order[sampling.top_k :]] = 0
    probs /= probs.sum()
    if sampling.top_p < 1:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= sampling.top_p]] = 0
    result: np.ndarray = probs / probs.sum()
    return result
