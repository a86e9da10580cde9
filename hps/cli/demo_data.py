"""The demo's model, and requests with the trainer's scores for them.

``demo_model/`` is a model repository of one model, next to it ``requests.json``: ``{"model", "features":
{name: keys per sample}, "dense": {name: values per sample}, "scores": {output: one per sample}}``.
The folder is inside the package, so a checkout and an installed wheel have it at the same place. The
trainer in ``examples/`` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import ConfigError

FOLDER = Path(__file__).with_name("demo_model")
REQUESTS = "requests.json"


@dataclass(frozen=True, slots=True)
class DemoData:
    """The demo's requests and scores, one entry per sample.

    ``keys[f] (n, hotness) int64``, ``dense[name] (n, …) float32``, ``scores[output] (n,) float32``."""

    model: str
    keys: dict[str, NDArray[np.int64]]
    dense: dict[str, NDArray[np.float32]]
    scores: dict[str, NDArray[np.float32]]

    @property
    def samples(self) -> int:
        return len(next(iter(self.scores.values())))

    def batches(self, size: int) -> Iterator[tuple[slice, dict[str, NDArray[Any]]]]:
        """Split the samples into batches in order: their slice, and the tensors of one request."""
        for start in range(0, self.samples, size):
            part = slice(start, start + size)
            yield part, self.tensors(part)

    def tensors(self, part: slice) -> dict[str, NDArray[Any]]:
        return {name: array[part] for name, array in (self.keys | self.dense).items()}


def load_demo(folder: Path = FOLDER) -> DemoData:
    """Read the demo's model and requests. Raises ConfigError if they are missing."""
    path = folder / REQUESTS
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        missing = (
            "the demo's model is missing in this installation"
            if folder == FOLDER
            else "no demo's model"
        )
        raise ConfigError(
            f"{missing}: there is no {path}; in a checkout of hps, examples/README.md says how to "
            "train and export it"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
    keys = {
        name: np.array([[k & (2**64 - 1) for k in row] for row in rows], np.uint64).view(np.int64)
        for name, rows in data["features"].items()
    }
    dense = {name: np.array(rows, np.float32) for name, rows in data["dense"].items()}
    scores = {name: np.array(row, np.float32) for name, row in data["scores"].items()}
    return DemoData(data["model"], keys, dense, scores)
