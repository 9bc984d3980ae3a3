"""Sweeps on Ray Tune over predictors and policies, judged by replay, and promotion of the best."""
