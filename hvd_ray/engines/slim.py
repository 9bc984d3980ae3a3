"""Which layers of a target a slim model leaves out."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_ray.errors import UserError


@dataclass(frozen=True, slots=True)
class SlimLayers:
    """A sub-model of a target: embedding, final norm and output head stay, sublayers are skipped.

    Raises:
        UserError: a skipped layer does not exist, or nothing is skipped, or everything is.
    """

    num_layers: int
    """Of the target."""
    skipped_attention: frozenset[int] = frozenset()
    skipped_mlp: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        skipped = self.skipped_attention | self.skipped_mlp
        foreign = [layer for layer in skipped if not 0 <= layer < self.num_layers]
        if foreign:
            raise UserError(f"slim model: skips layer {min(foreign)} of {self.num_layers}")
        if not 0 < self.num_skipped < 2 * self.num_layers:
            raise UserError("slim model: must skip something and leave something")

    @classmethod
    def prefix(cls, exit_layer: int, *, num_layers: int) -> SlimLayers:
        """The first `exit_layer` layers."""
        tail = frozenset(range(exit_layer, num_layers))
        return cls(num_layers, tail, tail)

    @classmethod
    def without(cls, layers: frozenset[int], *, num_layers: int) -> SlimLayers:
        """Whole layers left out."""
        return cls(num_layers, layers, layers)

    @property
    def num_skipped(self) -> int:
        """Skipped sublayers; a layer has two."""
        return len(self.skipped_attention) + len(self.skipped_mlp)

    @property
    def skip_ratio(self) -> float:
        return self.num_skipped / (2 * self.num_layers)

    @property
    def exit_layer(self) -> int | None:
        """The number of layers kept where it is the first ones that are, whole; else None.

        Only then are the slim model's keys and values the target's own, and its last hidden
        states a place from which the target can go on.
        """
        exit_layer = self.num_layers - len(self.skipped_mlp)
        tail = frozenset(range(exit_layer, self.num_layers))
        is_prefix = exit_layer > 0 and self.skipped_attention == self.skipped_mlp == tail
        return exit_layer if is_prefix else None
