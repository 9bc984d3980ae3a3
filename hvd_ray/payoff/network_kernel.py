"""Compiled forward pass of a small ReLU network and the reading of its outputs.

One thread, no BLAS: a pool of threads would get in the way of the target's own. One call for all
of it: after a target pass nothing of ours is left in the core's caches, and then every separate
call costs 10-20 us, a fused one about 35 in all. A row's result does not depend, to the bit, on
the rows computed beside it, so replay in batches decides as live decoding does.

Import it lazily: it loads numba. Shapes: B batch, F features, I inputs and O outputs of a layer,
R rows computed together, K the longest draft a survival head knows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_ray.compiled import compiled

ROWS = 4
"""Rows computed together, so that a weight is loaded once for all of them."""


@compiled
def judge(
    features_BF: Any,
    low_F: Any,
    high_F: Any,
    params: Any,
    widths: Any,
    groups: Any,
    draft_len_index: int,
    survival_BK: Any,
    expected_B: Any,
) -> None:
    """Fill `expected_B` and, where it has columns, `survival_BK`.

    `params` holds weight_IO and bias_O of every group of every layer, one after the other;
    `widths` the number of features and of the outputs of each layer; `groups` into how many equal
    parts each layer falls, each part reading its own part of the inputs. Features are clipped to
    [low_F, high_F].
    """
    a_RI = np.empty((ROWS, widths.max()), dtype=np.float32)
    b_RI = np.empty((ROWS, widths.max()), dtype=np.float32)
    for start in range(0, features_BF.shape[0], ROWS):
        num_rows = min(ROWS, features_BF.shape[0] - start)
        for r in range(num_rows):
            for i in range(widths[0]):
                a_RI[r, i] = min(max(features_BF[start + r, i], low_F[i]), high_F[i])
        at = 0
        for layer in range(len(widths) - 1):
            num_in, num_out = widths[layer] // groups[layer], widths[layer + 1] // groups[layer]
            is_hidden = layer < len(widths) - 2
            for group in range(groups[layer]):
                weight_IO = params[at : at + num_in * num_out].reshape(num_in, num_out)
                bias_O = params[at + num_in * num_out : at + (num_in + 1) * num_out]
                at += (num_in + 1) * num_out
                start_in, start_out = group * num_in, group * num_out
                _dense(a_RI, start_in, num_rows, weight_IO, bias_O, is_hidden, b_RI, start_out)
            a_RI, b_RI = b_RI, a_RI
        for r in range(num_rows):
            draft_len = features_BF[start + r, draft_len_index]
            if survival_BK.shape[1] == 0:
                expected_B[start + r] = min(max(a_RI[r, 0], np.float32(0.0)), draft_len)
            else:
                expected_B[start + r] = _chain(a_RI[r], draft_len, survival_BK[start + r])


@compiled
def _chain(logits_K: Any, draft_len: float, survival_K: Any) -> float:
    """Chain conditional acceptances: S_k = prod_{j <= k} sigmoid(logit_j), 0 past the draft.

    Returns the sum of S: the expected accepted length.
    """
    survival, expected = 1.0, 0.0
    for k in range(len(survival_K)):
        if k < draft_len:
            survival /= 1.0 + np.exp(-logits_K[k])
            expected += survival
            survival_K[k] = survival
        else:
            survival_K[k] = 0.0
    return expected


@compiled
def _dense(
    x_RI: Any,
    start_in: int,
    num_rows: int,
    weight_IO: Any,
    bias_O: Any,
    is_hidden: bool,
    y_RO: Any,
    start_out: int,
) -> None:
    """`x @ weight + bias` from and to a stretch of each row, with a ReLU behind hidden layers."""
    end_in, end_out = start_in + weight_IO.shape[0], start_out + weight_IO.shape[1]
    if weight_IO.shape[1] == 1:
        for r in range(num_rows):
            y_RO[r, start_out] = _dot(x_RI[r, start_in:end_in], weight_IO[:, 0]) + bias_O[0]
    elif num_rows == ROWS:
        _four_rows(
            x_RI[0, start_in:end_in],
            x_RI[1, start_in:end_in],
            x_RI[2, start_in:end_in],
            x_RI[3, start_in:end_in],
            weight_IO,
            bias_O,
            y_RO[0, start_out:end_out],
            y_RO[1, start_out:end_out],
            y_RO[2, start_out:end_out],
            y_RO[3, start_out:end_out],
        )
    else:
        for r in range(num_rows):
            _one_row(x_RI[r, start_in:end_in], weight_IO, bias_O, y_RO[r, start_out:end_out])
    if is_hidden:
        for r in range(num_rows):
            for o in range(start_out, end_out):
                y_RO[r, o] = max(y_RO[r, o], np.float32(0.0))


@compiled
def _one_row(x_I: Any, weight_IO: Any, bias_O: Any, y_O: Any) -> None:
    num_in, num_out = weight_IO.shape
    for o in range(num_out):
        y_O[o] = bias_O[o]
    i = 0
    while i + 4 <= num_in:
        w0, w1, w2, w3 = weight_IO[i], weight_IO[i + 1], weight_IO[i + 2], weight_IO[i + 3]
        a0, a1, a2, a3 = x_I[i], x_I[i + 1], x_I[i + 2], x_I[i + 3]
        for o in range(num_out):
            y_O[o] = y_O[o] + a0 * w0[o] + a1 * w1[o] + a2 * w2[o] + a3 * w3[o]
        i += 4
    while i < num_in:
        w0, a0 = weight_IO[i], x_I[i]
        for o in range(num_out):
            y_O[o] = y_O[o] + a0 * w0[o]
        i += 1


@compiled
def _four_rows(
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    weight_IO: Any,
    bias_O: Any,
    y: Any,
    z: Any,
    u: Any,
    v: Any,
) -> None:
    """`_one_row` from four rows a to d into y to v, in the same order of additions."""
    num_in, num_out = weight_IO.shape
    for o in range(num_out):
        y[o], z[o], u[o], v[o] = bias_O[o], bias_O[o], bias_O[o], bias_O[o]
    i = 0
    while i + 4 <= num_in:
        w0, w1, w2, w3 = weight_IO[i], weight_IO[i + 1], weight_IO[i + 2], weight_IO[i + 3]
        a0, a1, a2, a3 = a[i], a[i + 1], a[i + 2], a[i + 3]
        b0, b1, b2, b3 = b[i], b[i + 1], b[i + 2], b[i + 3]
        c0, c1, c2, c3 = c[i], c[i + 1], c[i + 2], c[i + 3]
        d0, d1, d2, d3 = d[i], d[i + 1], d[i + 2], d[i + 3]
        for o in range(num_out):
            y[o] = y[o] + a0 * w0[o] + a1 * w1[o] + a2 * w2[o] + a3 * w3[o]
            z[o] = z[o] + b0 * w0[o] + b1 * w1[o] + b2 * w2[o] + b3 * w3[o]
            u[o] = u[o] + c0 * w0[o] + c1 * w1[o] + c2 * w2[o] + c3 * w3[o]
            v[o] = v[o] + d0 * w0[o] + d1 * w1[o] + d2 * w2[o] + d3 * w3[o]
        i += 4
    while i < num_in:
        w0 = weight_IO[i]
        for o in range(num_out):
            y[o] = y[o] + a[i] * w0[o]
            z[o] = z[o] + b[i] * w0[o]
            u[o] = u[o] + c[i] * w0[o]
            v[o] = v[o] + d[i] * w0[o]
        i += 1


@compiled
def _dot(x_I: Any, weight_I: Any) -> Any:
    """Four partial sums: a single one would wait for each addition to finish."""
    num_in = len(weight_I)
    s0, s1, s2, s3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
    i = 0
    while i + 4 <= num_in:
        s0 += x_I[i] * weight_I[i]
        s1 += x_I[i + 1] * weight_I[i + 1]
        s2 += x_I[i + 2] * weight_I[i + 2]
        s3 += x_I[i + 3] * weight_I[i + 3]
        i += 4
    while i < num_in:
        s0 += x_I[i] * weight_I[i]
        i += 1
    return (s0 + s1) + (s2 + s3)
