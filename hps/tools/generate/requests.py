"""Synthetic requests to a model: for perf_analyzer, and as arrays for other load generators.

Format: perf_analyzer's input data, ``{"data": [{tensor: {"content": […], "shape": […]}}]}``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hps.config.model_schema import TensorSpec
from hps.dense.base import DATATYPES
from hps.errors import ConfigError
from hps.lookup.base import hps_keys_order
from hps.models.repository import ModelVersion
from hps.tools.generate.keys import Draw, distribution
from hps.types import KeyArray

Form = Literal["features", "tables"]
_UNKNOWN_FROM = 1 << 62  # above the keys of any trainer


@dataclass(frozen=True, slots=True)
class RequestRecipe:
    """Shape of requests.

    ``hotness``: keys per sample of features without a fixed number; None is 1. ``ragged``: from one key
    up to ``hotness``. ``unknown``: share of keys without a row."""

    form: Form = "features"
    batch: int = 1
    distribution: str = "zipf:1.2"
    hotness: int | None = None
    ragged: bool = False
    unknown: float = 0.0


class GeneratedRequests:
    """Requests to ``version`` by ``recipe``, determined by ``seed``. Raises ConfigError."""

    def __init__(self, version: ModelVersion, recipe: RequestRecipe, seed: int = 1) -> None:
        if not 0 <= recipe.unknown <= 1:
            raise ConfigError(f"--unknown {recipe.unknown:g}: a share lies between 0 and 1")
        if recipe.ragged and recipe.form == "tables":
            raise ConfigError(
                "--ragged is for requests by feature; KEYS and NUMKEYS are ragged anyway"
            )
        spec = version.spec
        self._features = spec.served_features
        if all(feature.hotness for feature in self._features):
            for option, value in (("--ragged", recipe.ragged), ("--hotness", recipe.hotness)):
                if value:
                    raise ConfigError(
                        f"{option} acts on features without a hotness, {spec.name} has none; leave it out, "
                        "or have a model written with hps generate model --ragged"
                    )
        self._hotness = recipe.hotness or 1
        self._version = version
        self._recipe = recipe
        self._random = np.random.default_rng(seed)
        self._draws: dict[str, Draw] = {
            name: distribution(recipe.distribution, files.rows)
            for name, files in version.tables.items()
        }

    def one(self) -> dict[str, NDArray[Any]]:
        """The tensors of a request, batch first."""
        spec, recipe = self._version.spec, self._recipe
        if recipe.form == "tables":
            return self._by_table()
        tensors: dict[str, NDArray[Any]] = {}
        for feature in self._features:
            hotness = feature.hotness or self._hotness
            if recipe.ragged and feature.hotness is None:
                counts = self._random.integers(1, hotness + 1, recipe.batch)
                tensors[feature.name] = self._keys(
                    feature.tables[0], int(counts.sum()), feature.key_offset
                )
                tensors[f"{feature.name}.offsets"] = np.concatenate([[0], np.cumsum(counts)])
            else:
                keys = self._keys(feature.tables[0], recipe.batch * hotness, feature.key_offset)
                tensors[feature.name] = keys.reshape(recipe.batch, hotness)
        for tensor in spec.dense.inputs if spec.dense else ():
            tensors[tensor.name] = self._dense(tensor)
        return tensors

    def many(self, count: int) -> Iterator[dict[str, NDArray[Any]]]:
        return (self.one() for _ in range(count))

    def _by_table(self) -> dict[str, NDArray[Any]]:
        """HPS's form: as many keys of each table as its features have."""
        pairs = [(f.name, table) for f in self._features for table in f.tables]
        order = hps_keys_order(list(self._version.tables), pairs)
        counts = dict.fromkeys(order, 0)
        for feature in self._features:
            for table in feature.tables:
                name = table if table in counts else feature.name
                counts[name] += self._recipe.batch * (feature.hotness or self._hotness)
        keys = [self._keys(order[name], count, 0) for name, count in counts.items()]
        numbers = np.array([list(counts.values())], np.int32)
        return {"KEYS": np.concatenate(keys)[None], "NUMKEYS": numbers}

    def _keys(self, table: str, count: int, offset: int) -> KeyArray:
        """A feature's keys: those of the table less its ``key_offset``."""
        rows = self._draws[table](self._random, count)
        keys = self._version.tables[table].keys_at(rows).copy()
        if self._recipe.unknown:
            strange = self._random.random(count) < self._recipe.unknown
            keys[strange] = _UNKNOWN_FROM + self._random.integers(0, 1 << 40, int(strange.sum()))
        if offset:
            keys = (keys.view(np.uint64) - np.uint64(offset % 2**64)).view(np.int64)
        return keys

    def _dense(self, tensor: TensorSpec) -> NDArray[Any]:
        shape = (1 if tensor.context else self._recipe.batch, *(abs(d) for d in tensor.shape[1:]))
        dtype = DATATYPES[tensor.datatype]
        if dtype.kind == "f":
            return self._random.standard_normal(shape).astype(dtype)
        return self._random.integers(0, 2, shape).astype(dtype)


def for_perf_analyzer(requests: Iterator[Mapping[str, NDArray[Any]]], form: Form) -> str:
    """The requests in perf_analyzer's format. Raises ConfigError for ragged ones, which it cannot send.

    It adds the batch itself, so requests by feature are written sample by sample: run it with ``-b``."""
    steps = []
    for request in requests:
        if form == "tables":
            steps.append({name: _step(array[0]) for name, array in request.items()})
            continue
        if any(name.endswith(".offsets") for name in request):
            raise ConfigError(
                "perf_analyzer cannot send ragged requests; write an .npz, or leave --ragged out"
            )
        batch = max(len(array) for array in request.values())
        steps += [
            {name: _step(array[min(i, len(array) - 1)]) for name, array in request.items()}
            for i in range(batch)
        ]
    return json.dumps({"data": steps})


def _step(array: NDArray[Any]) -> dict[str, Any]:
    return {"content": array.reshape(-1).tolist(), "shape": list(array.shape)}


def save(path: Path, requests: Iterator[Mapping[str, NDArray[Any]]], form: Form) -> None:
    """Write a ``.json`` for perf_analyzer, or an ``.npz`` with the arrays ``NUMBER/TENSOR``.

    Raises ConfigError for other suffixes."""
    if path.suffix == ".json":
        path.write_text(for_perf_analyzer(requests, form))
    elif path.suffix == ".npz":
        arrays: dict[str, Any] = {
            f"{number}/{name}": array
            for number, request in enumerate(requests)
            for name, array in request.items()
        }
        np.savez(path, **arrays)
    else:
        raise ConfigError(f"--out {path}: expected a .json (perf_analyzer) or an .npz (arrays)")
