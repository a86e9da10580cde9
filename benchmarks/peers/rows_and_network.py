"""Models of KServe and MLServer: rows of a table by row number, and a network over some of them.

Both import it in separate environments, so it imports nothing of hps; ``onnxruntime`` comes from the folder
``BENCH_PACKAGES``. ``BENCH_FOLDER`` has the tables, ``NAME.npy``, and ``network.onnx``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(os.environ.get("BENCH_FOLDER", "."))
TABLES = ("rows", "wide")


class Rows:
    def __init__(self, name: str) -> None:
        self._table: NDArray[np.float32] = np.load(FOLDER / f"{name}.npy")

    def __call__(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._table[keys]


class Scores:
    def __init__(self) -> None:
        sys.path.append(os.environ["BENCH_PACKAGES"])
        import onnxruntime

        self._rows = Rows("rows")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            str(FOLDER / "network.onnx"), options, providers=["CPUExecutionProvider"]
        )

    def __call__(self, features: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
        """Each feature ``(batch, 1)``; the scores are ``(batch, 1)``."""
        vectors = self._rows(np.concatenate(features, axis=1))
        scores: NDArray[np.float32] = self._session.run(
            ["score"], {"x": vectors.reshape(len(vectors), -1)}
        )[0]
        return scores
