"""Requests for a server that nobody has described: made up from what it tells of its models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.utils import triton_to_np_dtype

from hps.client import Tls
from hps.conformance.http_wire import Http, path_of
from hps.conformance.target import Deviation, Sample, Target, require

BATCH, WIDTH = 2, 3


def samples_of(
    http: str,
    headers: Mapping[str, str],
    models: Sequence[str] = (),
    seed: int = 1,
    tls: Tls | None = None,
) -> tuple[tuple[Sample, ...], dict[str, str]]:
    """A request for each of ``models``, by default all that the index of the server at ``http`` has ready;
    those with most tensors first. And, by name, why others are left out: they do not answer a made-up
    request. Raises OSError, HTTPException, and Deviation where the server has no index."""
    found, left_out = [], {}
    random = np.random.default_rng(seed)
    with Http(Target(http, "", (), headers, tls)) as ask:
        for model in models or _ready(ask):
            try:
                found.append(_answered(ask, model, random))
            except Deviation as error:
                left_out[model] = str(error)
            except (LookupError, TypeError, ValueError) as error:
                left_out[model] = f"its metadata cannot be read: {type(error).__name__}: {error}"
    found.sort(key=lambda sample: -len(sample.inputs) - len(sample.outputs))
    return tuple(found), left_out


def _ready(ask: Http) -> list[str]:
    rows = ask.ask("POST", "/v2/repository/index").json()
    return [row["name"] for row in rows if row.get("state", "READY") == "READY"]


def _answered(ask: Http, model: str, random: np.random.Generator) -> Sample:
    about = ask.ask("GET", path_of(model)).json()
    inputs = {
        tensor["name"]: _tensor(random, tensor["datatype"], tensor["shape"])
        for tensor in about["inputs"]
    }
    sample = Sample(model, inputs, tuple(tensor["name"] for tensor in about["outputs"]))
    answer = ask.send(sample)
    require(answer.status == 200, f"status {answer.status}: {answer.body[:300]!r}")
    return sample


def _tensor(random: np.random.Generator, datatype: str, shape: list[int]) -> NDArray[Any]:
    """Elements of any tensor ``shape``, whose first dimension is the batch when it is variable."""
    sizes = [size if size >= 0 else WIDTH if i else BATCH for i, size in enumerate(map(int, shape))]
    if datatype == "BYTES":
        return np.full(sizes, b"text", np.object_)
    dtype = np.dtype(triton_to_np_dtype(datatype))
    if dtype.kind == "f":
        return random.standard_normal(sizes).astype(dtype)
    return random.integers(0, 2 if dtype.kind == "b" else 100, sizes).astype(dtype)
