"""Requests for a server that nobody has described: made up from what it tells of its models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.utils import triton_to_np_dtype

from hps.conformance.http_wire import Http, path_of
from hps.conformance.target import Sample, Target

BATCH, WIDTH = 2, 3


def samples_of(http: str, headers: Mapping[str, str], seed: int = 1) -> tuple[Sample, ...]:
    """A request for each ready model of the server at ``http`` that answers a made-up one; those with most
    tensors first. Raises OSError, and Deviation where the server cannot say what it has."""
    target = Target(http, "", (), headers)
    with Http(target) as ask:
        rows = ask.ask("POST", "/v2/repository/index").json()
        ready = [row["name"] for row in rows if row.get("state", "READY") == "READY"]
        found = list(_answered(ask, ready, np.random.default_rng(seed)))
    return tuple(sorted(found, key=lambda sample: -len(sample.inputs) - len(sample.outputs)))


def _answered(ask: Http, models: list[str], random: np.random.Generator) -> Iterator[Sample]:
    for model in models:
        about = ask.ask("GET", path_of(model)).json()
        inputs = {
            tensor["name"]: _tensor(random, tensor["datatype"], tensor["shape"])
            for tensor in about["inputs"]
        }
        sample = Sample(model, inputs, tuple(tensor["name"] for tensor in about["outputs"]))
        if ask.send(sample).status == 200:
            yield sample


def _tensor(random: np.random.Generator, datatype: str, shape: list[int]) -> NDArray[Any]:
    """Elements of any tensor ``shape``, whose first dimension is the batch when it is variable."""
    sizes = [size if size >= 0 else WIDTH if i else BATCH for i, size in enumerate(map(int, shape))]
    if datatype == "BYTES":
        return np.full(sizes, b"text", np.object_)
    dtype = np.dtype(triton_to_np_dtype(datatype))
    if dtype.kind == "f":
        return random.standard_normal(sizes).astype(dtype)
    return random.integers(0, 2 if dtype.kind == "b" else 100, sizes).astype(dtype)
