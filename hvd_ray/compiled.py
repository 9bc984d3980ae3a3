"""The decorator of functions that numba compiles on their first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compile at the first call and keep the machine code beside the module or in the user cache.

    Only multiply-add is fused beyond IEEE rules: sums keep their order, so a row's value does not
    depend on the rows computed with it.
    """
    options = {"nogil": True, "fastmath": {"contract"}}
    try:
        return cast(F, njit(cache=True, **options)(function))
    except RuntimeError:  # numba's word for "no folder is writable": compile in every process
        return cast(F, njit(cache=False, **options)(function))
