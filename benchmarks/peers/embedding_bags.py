"""FBGEMM's and PyTorch's embedding bags on dense row numbers, without a search for keys.

The interpreter of ``.peers/fbgemm`` runs it. `EmbeddingBags` sends it lines of JSON over its standard input
and reads its output; row numbers are in files. Both bags read the same memory, in pages as PyTorch allocates
them by default, or in huge pages if THP_MEM_ALLOC_ENABLE is set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
_COMPARED = 100_000


class EmbeddingBags:
    """The running program. Not thread-safe; raises RuntimeError when it has ended."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._numbers = folder / "numbers.npy"

    def ask(self, what: str, **options: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"what": what, **options}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the embedding bags' process ended")
        return json.loads(line)

    def table(self, rows: int, dim: int) -> None:
        """Make a table whose row ``i`` is ``i % 1000 + arange(dim)``."""
        self.ask("table", rows=rows, dim=dim)

    def formats(self, vectors: Path, dim: int) -> Sequence[str]:
        """Make tables of the float32 ``vectors`` in a file, one for each format; returns the new sides.

        Rows of 8 and 4 bits, and their values, are left in the folder: ``int8.npy``, ``int8.values.npy``."""
        found: Sequence[str] = self.ask("formats", file=str(vectors), dim=dim)
        return found

    def keys(self, numbers: NDArray[np.int64], hotness: int) -> Mapping[str, float]:
        """Set the row ``numbers (batches, n)``; returns each side's sum over the result of the first
        batch."""
        np.save(self._numbers, numbers)
        found: Mapping[str, float] = self.ask("keys", file=str(self._numbers), hotness=hotness)
        return found

    def time(self, side: str, threads: int = 1) -> float:
        """Time per key over all batches, ns: CPU time of the thread, or wall time with several threads."""
        return float(self.ask("time", side=side, threads=threads))


@contextmanager
def running(python: Path, folder: Path, *, huge_pages: bool) -> Iterator[EmbeddingBags]:
    """Run the program until the block ends; ``folder`` is for files."""
    pages = {"THP_MEM_ALLOC_ENABLE": "1" if huge_pages else "0"}
    process = subprocess.Popen(
        [str(python), "-m", "benchmarks.peers.embedding_bags"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **pages, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    try:
        yield EmbeddingBags(process, folder)
    finally:
        process.stdin.close()
        process.wait()


class _Sides:
    """State of the program: both bags, row numbers and offsets."""

    def __init__(self) -> None:
        import torch
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
            IntNBitTableBatchedEmbeddingBagsCodegen,
        )

        self.torch = torch
        torch.set_grad_enabled(False)
        self._make = lambda rows, dim, kind=SparseType.FP32: (
            IntNBitTableBatchedEmbeddingBagsCodegen(
                [("t", rows, dim, kind, EmbeddingLocation.HOST)],
                output_dtype=SparseType.FP32,
                device="cpu",
                feature_table_map=[0],
            )
        )

    def table(self, rows: int, dim: int) -> None:
        fbgemm = self._make(rows, dim)
        fbgemm.initialize_weights()
        weights = fbgemm.split_embedding_weights()[0][0].view(self.torch.float32)
        assert weights.shape == (rows, dim)
        columns = self.torch.arange(dim)
        for start in range(0, rows, 1 << 16):
            numbers = self.torch.arange(start, min(rows, start + (1 << 16)))
            weights[start : start + len(numbers)] = (numbers % 1000)[:, None] + columns
        bag = self.torch.nn.EmbeddingBag.from_pretrained(
            weights, mode="sum", include_last_offset=True
        )
        self.sides = {"fbgemm": fbgemm, "embedding_bag": bag}

    def formats(self, file: str, dim: int) -> list[str]:
        from fbgemm_gpu.split_embedding_configs import SparseType

        torch, folder = self.torch, Path(file).parent
        vectors = torch.from_numpy(np.fromfile(file, np.float32).reshape(-1, dim))
        bag = torch.nn.EmbeddingBag.from_pretrained(vectors, mode="sum", include_last_offset=True)
        self.sides = {"embedding_bag": bag}
        fused, back = (
            torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf,
            torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat,
        )
        for name, bits in (("int8", 8), ("int4", 4)):
            rows = fused(vectors, bits)
            some = rows[:_COMPARED]
            np.save(folder / f"{name}.npy", some.numpy())
            np.save(folder / f"{name}.values.npy", back(some, bits).numpy())
            fbgemm = self._make(len(vectors), dim, getattr(SparseType, name.upper()))
            fbgemm.initialize_weights()
            weights, scales = fbgemm.split_embedding_weights()[0]
            weights.copy_(rows[:, :-4])
            scales.copy_(rows[:, -4:])
            self.sides[f"fbgemm_{name}"] = fbgemm
        return [name for name in self.sides if name != "embedding_bag"]

    def keys(self, file: str, hotness: int) -> dict[str, float]:
        self.numbers = self.torch.from_numpy(np.load(file))
        n = self.numbers.shape[1]
        self.offsets = self.torch.arange(0, n + 1, hotness)
        first = self.numbers[0]
        return {
            name: float(side(first, self.offsets).double().sum())
            for name, side in self.sides.items()
        }

    def time(self, side: str, threads: int) -> float:
        self.torch.set_num_threads(threads)
        work, offsets = self.sides[side], self.offsets
        clock = time.thread_time_ns if threads == 1 else time.perf_counter_ns
        start = clock()
        for batch in self.numbers:
            work(batch, offsets)
        return (clock() - start) / self.numbers.numel()


def _serve(lines: Sequence[str] | Any) -> None:
    sides = _Sides()
    for line in lines:
        options = json.loads(line)
        answer = getattr(sides, options.pop("what"))(**options)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve(sys.stdin)
