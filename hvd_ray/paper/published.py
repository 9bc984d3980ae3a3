"""What the papers report, each figure with where it was read; never mixed with what we measured.

Tags: [A] the paper's abstract; [N] a third party's notes on its full text, unchecked; [D] worked
out from the others.
"""

from __future__ import annotations

from dataclasses import dataclass

HVD = "HVD, arXiv 2606.01019"
SUFFIX = "SuffixDecoding, arXiv 2411.04975"


@dataclass(frozen=True, slots=True)
class Published:
    """One figure of a paper."""

    key: str
    """Which of our own figures stands beside it."""
    words: str
    value: str
    tag: str
    paper: str = HVD


PUBLISHED: tuple[Published, ...] = (
    Published("speedup", "over greedy, mean of 48 model-dataset pairs", "2.97x", "[N]"),
    Published("over_suffix", "over SuffixDecoding, mean of 48", "2.64x", "[N]"),
    Published("over_eagle3", "over EAGLE-3, mean of the agentic workflows", "2.73x", "[A]"),
    Published("wins_greedy", "faster than greedy", "47 of 48", "[N]"),
    Published("wins_suffix", "faster than SuffixDecoding", "46 of 48", "[N]"),
    Published("cycles_eagle3", "EAGLE-3: cycles per 1,000 tokens, Llama-3.1-8B", "571", "[N]"),
    Published("cycles_hybrid", "hybrid: cycles per 1,000 tokens, Llama-3.1-8B", "200", "[N]"),
    Published("cycle_ms_hybrid", "hybrid: cost of a cycle, H100", "39.6 ms", "[N]"),
    Published("cycle_ms_cache", "cache only: cost of a cycle, H100", "48.4 ms", "[N]"),
    Published("cycle_ms_rule", "rule-based hybrid: cost of a cycle, H100", "43.3 ms", "[N]"),
    Published("precision", "predictor at accepted >= 6, precision", "0.782-0.876", "[N]"),
    Published("recall", "predictor at accepted >= 6, recall", "0.614-0.798", "[N]"),
    Published("tau", "threshold, fixed for all models and data sets", "6", "[N]"),
    Published("speedup_suffix", "over EAGLE-2/3 on agentic sets", "2.8x", "[A]", SUFFIX),
    Published(
        "accepted_suffix", "mean accepted on Spec-Bench (EAGLE-3: 4.65)", "1.77", "[N]", SUFFIX
    ),
)
