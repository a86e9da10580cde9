"""The kernels of a fetch by variant, and its packed arguments."""

from __future__ import annotations

import struct
from typing import Any

from hps.cuda import layout
from hps.cuda.launch import FETCH_ARGS, fetch_name, sweep_name
from hps.cuda.loader import CudaKernel, KernelStruct, kernel

# FETCH_PART, packed in one call.
PART = struct.Struct("<10Q10I")
PARTS_AT = FETCH_ARGS.fields["part"][1]  # type: ignore[index] # None for a plain dtype


class FetchKernels:
    """The kernels of one fetch variant, compiled on first use: one launch, or one per window of pinned
    memory."""

    def __init__(
        self,
        tile: int,
        unit: int,
        units: int,
        form: int,
        *,
        stamp: bool,
        defines: tuple[str, ...] = (),
    ) -> None:
        self._whole = fetch_name(tile, unit, units, form, stamp=stamp, sweep=False)
        self._first = fetch_name(tile, unit, units, form, stamp=stamp, sweep=True)
        self._other = sweep_name(tile, unit, units)
        self._defines = defines
        self._one: CudaKernel | None = None

    def one(self) -> CudaKernel:
        """Return the kernel that fetches in one launch."""
        self._one = self._one or kernel(self._whole, self._defines)
        return self._one

    def launch(
        self, blocks: int, args: KernelStruct, stream: Any, windows: int, later: Any
    ) -> None:
        """Fetch on ``stream``. ``later`` is device memory for as many row numbers as keys, if there is more
        than one window."""
        if windows == 1:
            self.one().launch(blocks, args, stream.ptr)
            return
        args["later"], args["window_shift"] = later.data.ptr, layout.WINDOW_SHIFT
        kernel(self._first, self._defines).launch(blocks, args, stream.ptr)
        other = kernel(self._other, self._defines)
        for window in range(1, windows):
            args["window"] = window
            other.launch(blocks, args, stream.ptr)
