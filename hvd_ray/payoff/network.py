"""The small network behind a predictor: its weights and their checks.

Shapes: F features, I inputs and O outputs of a layer, G groups that a layer falls into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hvd_ray.errors import UserError
from hvd_ray.types import Float32Array

Layer = tuple[Float32Array, Float32Array]
"""`weight_IO` and `bias_O`; the standardisation of the features is folded into the first.

A layer behind the first whose weight has I / G rows falls into G groups: the g-th part of its
outputs reads the g-th part of its inputs alone, as in networks that stand side by side.
"""


class Network:
    """ReLU layers over features clipped to the range that training saw.

    Clipping keeps a feature that was constant in training from acting through weights that were
    never trained. Safe to share between threads.
    """

    def __init__(
        self, layers: Sequence[Layer], *, low_F: Float32Array, high_F: Float32Array
    ) -> None:
        """Take float32 arrays.

        Raises:
            UserError: shapes that do not chain, or values that are not finite.
        """
        self.layers = tuple(layers)
        self.low_F = np.ascontiguousarray(low_F)
        self.high_F = np.ascontiguousarray(high_F)
        self._check()
        widths = [len(low_F), *(len(bias_O) for _, bias_O in self.layers)]
        self.widths = np.array(widths, dtype=np.int64)
        """Number of features, then of each layer's outputs."""
        num_inputs = [len(weight_IO) for weight_IO, _ in self.layers]
        self.groups = self.widths[:-1] // np.array(num_inputs, dtype=np.int64)
        """Into how many groups each layer falls."""
        self.params = np.concatenate(
            [
                part.ravel()
                for layer, num_groups in zip(self.layers, self.groups.tolist(), strict=True)
                for part in _by_group(layer, num_groups)
            ]
        )
        """All weights in one piece of memory, as the compiled pass reads them."""

    @property
    def num_outputs(self) -> int:
        return len(self.layers[-1][1])

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """The weights by the names they have in a file."""
        named = {"low_F": self.low_F, "high_F": self.high_F}
        for index, (weight_IO, bias_O) in enumerate(self.layers):
            named[f"layers.{index}.weight_IO"] = weight_IO
            named[f"layers.{index}.bias_O"] = bias_O
        return named

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[np.float32]]) -> Network:
        """The inverse of `tensors`.

        Raises:
            UserError: a tensor is missing, unknown, of a wrong shape or not finite.
        """
        num_layers = sum(name.endswith(".weight_IO") for name in tensors)
        names = [
            f"layers.{i}.{part}" for i in range(num_layers) for part in ("weight_IO", "bias_O")
        ]
        expected = {"low_F", "high_F", *names}
        if num_layers == 0 or expected != set(tensors):
            odd = sorted(expected ^ set(tensors)) or ["layers.0.weight_IO"]
            raise UserError(f"tensor {odd[0]} is missing or unexpected")
        layers = [
            (tensors[f"layers.{i}.weight_IO"], tensors[f"layers.{i}.bias_O"])
            for i in range(num_layers)
        ]
        return cls(layers, low_F=tensors["low_F"], high_F=tensors["high_F"])

    def _check(self) -> None:
        width = len(self.low_F)
        _require_shape("low_F", self.low_F, (width,))
        _require_shape("high_F", self.high_F, (width,))
        for index, (weight_IO, bias_O) in enumerate(self.layers):
            num_in, num_out = weight_IO.shape if weight_IO.ndim == 2 else (width, -1)
            if index == 0 or num_in == 0 or width % num_in or num_out % (width // num_in):
                num_in = width
            _require_shape(f"layers.{index}.weight_IO", weight_IO, (num_in, num_out))
            _require_shape(f"layers.{index}.bias_O", bias_O, (num_out,))
            width = num_out
        for name, values in self.tensors().items():
            if values.dtype != np.float32:
                raise UserError(f"tensor {name} is {values.dtype}, expected float32")
            if not np.isfinite(values).all():
                raise UserError(f"tensor {name} holds values that are not finite")
        self._check_sums()

    def _check_sums(self) -> None:
        """No features within their bounds may drive a sum beyond float32: it would answer NaN."""
        most_I = np.maximum(np.abs(self.low_F), np.abs(self.high_F)).astype(np.float64)
        for index, (weight_IO, bias_O) in enumerate(self.layers):
            size_IO = np.abs(weight_IO, dtype=np.float64)
            num_groups = len(most_I) // len(weight_IO)
            groups = zip(
                np.split(most_I, num_groups), np.split(size_IO, num_groups, 1), strict=True
            )
            most_I = np.concatenate([part_I @ part_IO for part_I, part_IO in groups])
            most_I += np.abs(bias_O)
            if most_I.max(initial=0.0) > np.finfo(np.float32).max:
                raise UserError(f"layer {index} has weights so large that its sums overflow")


def folded(
    weight_IO: NDArray[np.float64],
    bias_O: NDArray[np.float64],
    *,
    mean_F: NDArray[np.float64],
    scale_F: NDArray[np.float64],
) -> Layer:
    """A first layer that takes raw features instead of `(features - mean) / scale`."""
    raw_weight_IO = weight_IO / scale_F[:, None]
    raw_bias_O = bias_O - mean_F @ raw_weight_IO
    return raw_weight_IO.astype(np.float32), raw_bias_O.astype(np.float32)


def joined(members: Sequence[Sequence[Layer]]) -> list[Layer]:
    """One network whose outputs are the mean of its members', which have the same shapes.

    Hidden layers stand side by side, in groups behind the first.
    """
    if len(members) == 1:
        return list(members[0])
    layers = list(zip(*members, strict=True))
    first, *hidden, last = layers
    share = np.float32(1 / len(members))
    side_by_side = [
        (np.concatenate([w for w, _ in h], axis=1), np.concatenate([b for _, b in h]))
        for h in (first, *hidden)
    ]
    mean = (np.concatenate([w for w, _ in last]) * share, sum(b for _, b in last) * share)
    return [*side_by_side, mean]


def _by_group(layer: Layer, num_groups: int) -> list[Float32Array]:
    """Weight and bias of each group in turn."""
    weights, biases = (np.split(part, num_groups, axis=-1) for part in layer)
    return [part for group in zip(weights, biases, strict=True) for part in group]


def _require_shape(name: str, values: Float32Array, shape: tuple[int, ...]) -> None:
    if values.shape != shape or 0 in shape:
        raise UserError(f"tensor {name} has shape {values.shape}, expected {shape}")
