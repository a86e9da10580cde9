"""Requests of a load generator: made from a model's metadata or rows, or read from a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.config.repository_uri import Location
from hps.errors import ConfigError
from hps.tools.bench.hot_key_pools import HotKeyPools, HotKeys, hot_pools
from hps.tools.generate.keys import Draw, distribution
from hps.tools.signature import NUMPY_TYPES, ModelSignature
from hps.types import KeyArray

Tensors = Mapping[str, NDArray[Any]]
NO_POOLS: Mapping[str, KeyArray] = {}
_ROWS = 100_000


@dataclass(frozen=True, slots=True)
class LoadRecipe:
    """``count`` requests of ``batch`` samples.

    ``hotness``: keys per sample of features without a fixed number. Keys are from 0 to ``rows`` - 1;
    None: the server's hot keys, if it has them."""

    count: int = 256
    batch: int = 1
    keys: str = "zipf:1.2"
    rows: int | None = None
    hotness: int = 1
    seed: int = 1

    @property
    def asks_for_hot_keys(self) -> bool:
        return self.rows is None and not self.keys.startswith("trace:")


@dataclass(frozen=True, slots=True)
class RequestSource:
    """Source of requests: a ``file`` of them, the rows of a model in a ``repository``, or neither."""

    file: Path | None = None
    repository: Location | None = None
    version: int | None = None


def made_requests(
    model: str,
    recipe: LoadRecipe,
    source: RequestSource,
    metadata: Callable[[str], Mapping[str, Any]],
    hot_keys: HotKeys,
) -> tuple[list[Tensors], str]:
    """The requests, and a phrase that describes their keys. Raises ConfigError, ModelError."""
    if source.repository is not None:
        made = from_repository(source.repository, model, source.version, recipe)
        return made, f"{recipe.keys} of the model's rows"
    described = metadata(model)
    if source.file is not None:
        return from_file(source.file, described, recipe.batch), f"of {source.file.name}"
    if any(tensor["name"] == "NUMKEYS" for tensor in described["inputs"]):
        # The metadata of a model without a network has HPS's format; `<model>.lookup` names the features.
        described = {**metadata(f"{model}.lookup"), "name": model}
    pools = hot_pools(model, hot_keys) if recipe.asks_for_hot_keys else HotKeyPools()
    return from_metadata(described, recipe, pools.keys), _said(recipe, pools)


def _said(recipe: LoadRecipe, pools: HotKeyPools) -> str:
    if pools.keys:
        return f"{recipe.keys} of the server's hottest keys"
    made_up = f"{recipe.keys} of 0 … {(recipe.rows or _ROWS) - 1:,}"
    return f"{made_up} (no hot keys: {pools.why})" if pools.why else made_up


def from_metadata(
    metadata: Mapping[str, Any], recipe: LoadRecipe, pools: Mapping[str, KeyArray] = NO_POOLS
) -> list[Tensors]:
    """Requests to the model with this ``metadata``, with keys of ``pools`` by feature; others are random.

    Raises ConfigError."""
    signature = ModelSignature.of_metadata(metadata)
    shapes = {tensor["name"]: tensor["shape"] for tensor in metadata["inputs"]}
    types = {tensor["name"]: tensor["datatype"] for tensor in metadata["inputs"]}
    made_up = distribution(recipe.keys, recipe.rows or _ROWS)
    drawn_of = {
        name: partial(_drawn, distribution(recipe.keys, len(pools[name])), pools[name])
        if name in pools
        else made_up
        for name in signature.features
    }
    random = np.random.default_rng(recipe.seed)

    def one() -> Tensors:
        tensors: dict[str, NDArray[Any]] = {}
        for name in signature.features:
            inner = [recipe.hotness if size < 0 else int(size) for size in shapes[name][1:]]
            wanted = (recipe.batch, *(inner or [recipe.hotness]))
            drawn = drawn_of[name](random, int(np.prod(wanted))).astype(NUMPY_TYPES[types[name]])
            tensors[name] = drawn.reshape(wanted)
        for name, dense in signature.dense.items():
            shape = (recipe.batch, *(abs(size) for size in dense.shape[1:]))
            if dense.dtype.kind == "f":
                tensors[name] = random.standard_normal(shape).astype(dense.dtype)
            else:
                tensors[name] = random.integers(0, 2, shape).astype(dense.dtype)
        return tensors

    return [one() for _ in range(recipe.count)]


def _drawn(draw: Draw, pool: KeyArray, random: np.random.Generator, n: int) -> KeyArray:
    return pool[draw(random, n)]


def from_repository(
    repository: Location, model: str, version: int | None, recipe: LoadRecipe
) -> list[Tensors]:
    """Requests for keys that the model's rows have. Raises ConfigError, ModelError."""
    from hps.models.remote import open_repository
    from hps.tools.generate import requests

    name = model.removesuffix(".lookup")
    hotness = None if recipe.hotness == 1 else recipe.hotness
    made = requests.RequestRecipe("features", recipe.batch, recipe.keys, hotness)
    opened = open_repository(repository).open(name, version)
    found = requests.GeneratedRequests(opened, made, recipe.seed)
    dense = opened.spec.dense
    if name == model or dense is None:
        return [*found.many(recipe.count)]
    others = {tensor.name for tensor in dense.inputs}  # unknown to its lookups
    return [{n: t for n, t in each.items() if n not in others} for each in found.many(recipe.count)]


def from_file(path: Path, metadata: Mapping[str, Any], batch: int) -> list[Tensors]:
    """Requests that `hps generate requests` wrote.

    An ``.npz`` holds whole requests; samples of a ``.json`` are joined to batches of ``batch``. Raises
    ConfigError."""
    try:
        if path.suffix == ".npz":
            return _npz(path)
        if path.suffix == ".json":
            return _json(path, metadata, batch)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--requests {path}: {error}; hps generate requests writes such files"
        ) from None
    raise ConfigError(f"--requests {path}: expected the .npz or .json of hps generate requests")


def _npz(path: Path) -> list[Tensors]:
    with np.load(path) as arrays:
        named = [(name.partition("/"), name) for name in arrays.files]
        numbered = sorted((int(number), tensor, name) for (number, _, tensor), name in named)
        made: list[Tensors] = [
            {tensor: arrays[name] for _, tensor, name in mine}
            for _, mine in groupby(numbered, key=lambda each: each[0])
        ]
    if not made:
        raise ValueError("there are no requests in it")
    return made


def _json(path: Path, metadata: Mapping[str, Any], batch: int) -> list[Tensors]:
    types = {t["name"]: NUMPY_TYPES[t["datatype"]] for t in metadata["inputs"]}
    steps = json.loads(path.read_text())["data"]
    whole = len(steps) - len(steps) % batch
    if not whole:
        raise ValueError(f"there are {len(steps)} samples in it, --batch asks for {batch}")
    return [
        {name: _stacked(steps[at : at + batch], name, types[name]) for name in steps[at]}
        for at in range(0, whole, batch)
    ]


def _stacked(steps: Iterable[Mapping[str, Any]], name: str, dtype: str) -> NDArray[Any]:
    return np.stack([np.array(s[name]["content"], dtype).reshape(s[name]["shape"]) for s in steps])


def samples(tensors: Tensors) -> int:
    """The batch of a request: from offsets, else the longest tensor."""
    ends = [len(array) - 1 for name, array in tensors.items() if name.endswith(".offsets")]
    return ends[0] if ends else max((len(array) for array in tensors.values()), default=0)


def different_keys(requests: Sequence[Tensors]) -> int:
    """Number of different keys in all ``requests``, counted for each tensor."""
    keys = [
        name
        for name, array in requests[0].items()
        if array.dtype.kind in "iu" and not name.endswith(".offsets") and name != "NUMKEYS"
    ]
    return sum(
        len(np.unique(np.concatenate([each[name].ravel() for each in requests if name in each])))
        for name in keys
    )
