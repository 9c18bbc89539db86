"""Compile the loops over the few workers of a round: NumPy spends a microsecond on each operation, however few.

The loops say element by element what NumPy would, without `fastmath`, so their bits are NumPy's. Exponentials,
logarithms and products of matrices stay with NumPy, whose last bits would be others. They are compiled when first
called, which takes a while: whoever has loops calls each once, by `load`, before anybody waits.
"""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

MOST_NESTED = 8
"""Loops that one may contain, itself included: each that cannot be kept on disk costs another attempt."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Compile lazily, and keep the result on disk where that is possible.

    What a loop uses of its module is frozen into it, and found stale when that file changes: constants and
    functions of other modules must be arguments.
    """
    try:
        return cast(_Function, numba.njit(cache=True, nogil=True, error_model="numpy")(function))
    except RuntimeError:  # numba found no writeable folder for its cache
        return cast(_Function, numba.njit(nogil=True, error_model="numpy")(function))


def load(loop: Callable[..., Any], *arguments: Any) -> None:
    """Call a loop with arguments of the types to come, so that it is loaded from the cache, or compiled."""
    for _ in range(MOST_NESTED):
        with contextlib.suppress(OSError):  # compiled, but numba's cache on disk is full or not ours to write
            loop(*arguments)
            return
    loop(*arguments)
