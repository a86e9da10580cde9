"""The fastest gather of rows by known numbers, which no fetch can beat: ``gpu_gather.cu``.

It is sought among shapes (threads a row, rows a thread, threads a block) and cache policies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hps.cuda.loader import KernelStruct, cupy

SOURCE = Path(__file__).with_suffix(".cu")
OPTIONS = ("-std=c++17",)
UNIT = 16
ARGS = np.dtype(
    [
        *((name, np.uint64) for name in ("rows", "numbers", "out")),
        *((name, np.uint32) for name in ("n", "unused")),
    ]
)
BLOCKS = (128, 256, 512)
LOADS, STORES = range(5), range(3)
MOST_UNITS = 8
"""A thread has at most so many units of 16 bytes in flight."""


@dataclass(frozen=True, slots=True)
class Gather:
    """A shape: ``threads`` a row, ``rows`` a thread, ``block`` threads a block; and the policies of loads and
    stores, numbered as in the source."""

    threads: int
    rows: int
    block: int
    loads: int = 0
    stores: int = 0

    def expression(self, units: int) -> str:
        return (
            f"gather<{units}, {self.threads}, {self.rows}, {self.loads}, {self.stores}, "
            f"{self.block}>"
        )

    def blocks(self, n: int) -> int:
        return -(-n // (self.block // self.threads * self.rows))


def shapes(units: int) -> Iterator[Gather]:
    """Shapes for rows of ``units`` units, a power of two."""
    for threads in (1, 2, 4, 8, 16, 32):
        for rows in (1, 2, 4, 8):
            if threads <= units and rows * (units // threads) <= MOST_UNITS:
                yield from (Gather(threads, rows, block) for block in BLOCKS)


def policies(shape: Gather) -> Iterator[Gather]:
    """``shape`` with every pair of policies."""
    for loads in LOADS:
        for stores in STORES:
            yield Gather(shape.threads, shape.rows, shape.block, loads, stores)


class Gathers:
    """Gathers from the rows of ``held`` in device memory to ``out (n, dim)``."""

    def __init__(self, held: Any, out: Any) -> None:
        self._args = KernelStruct(ARGS)
        self._args["rows"], self._args["out"] = held.pointers[1], out.data.ptr
        self._units = held.shape.stride // UNIT
        self._kernels: dict[Gather, Any] = {}

    def fastest(self, time: Callable[[Callable[[Any], None]], float]) -> tuple[float, Gather]:
        """The least seconds and their gather: the best shape, with the best policies for it.

        ``time(gather)`` returns the seconds of ``gather(numbers)``."""
        _, shape = self._best(time, list(shapes(self._units)))
        return self._best(time, list(policies(shape)))

    def launch(self, gather: Gather, numbers: Any) -> None:
        """Copy the rows ``numbers (n,) uint32`` on the current stream."""
        self._args["numbers"], self._args["n"] = numbers.data.ptr, len(numbers)
        cp, blocks = cupy(), gather.blocks(len(numbers))
        stream, function = cp.cuda.get_current_stream(), self._kernels[gather]
        cp.cuda.driver.launchKernel(
            *(function.kernel.ptr, blocks, 1, 1, gather.block, 1, 1, 0),
            *(stream.ptr, self._args.at, 0),
        )

    def compile(self, gathers: list[Gather]) -> None:
        """Compile ``gathers`` together."""
        names = tuple(gather.expression(self._units) for gather in gathers)
        module = cupy().RawModule(
            code=SOURCE.read_text(), options=OPTIONS, name_expressions=names, backend="nvrtc"
        )
        for gather, name in zip(gathers, names, strict=True):
            self._kernels[gather] = module.get_function(name)

    def _best(
        self, time: Callable[[Callable[[Any], None]], float], gathers: list[Gather]
    ) -> tuple[float, Gather]:
        self.compile(gathers)
        taken = [(time(partial(self.launch, gather)), gather) for gather in gathers]
        return min(taken, key=lambda each: each[0])
