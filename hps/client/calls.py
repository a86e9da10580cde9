"""What is asked of a server, whatever carries it: calls, answers, another attempt."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hps.client.errors import retry_after_s
from hps.client.wire import Answer, Keys, numpy_type, tensors_of
from hps.errors import BadRequest, DeadlineExceeded, HpsError, Unavailable
from hps.types import LookupResult, PredictResult

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class Call(NamedTuple):
    """A request of the Open Inference Protocol. ``outputs`` None: all there are. ``timeout_s``: what its
    caller gives it, None when nothing was said."""

    model: str
    inputs: Mapping[str, NDArray[Any]]
    outputs: Sequence[str] | None = None
    parameters: Mapping[str, Any] = {}
    request_id: str = ""
    timeout_s: float | None = None


class Tensors(NamedTuple):
    """What has to be known of a model: NumPy's types of its inputs, and the names of its outputs. So it is in
    ``versions``, of which a server serves others later on."""

    inputs: Mapping[str, Any]
    outputs: tuple[str, ...]
    versions: tuple[str, ...] = ()

    def of_version(self, version: str) -> bool:
        """Whether this may be of ``version``, the one that answered; it is not always told."""
        return not version or not self.versions or version in self.versions

    def same(self, other: Tensors) -> bool:
        """Whether a request by ``other`` would be the same."""
        return (self.inputs, self.outputs) == (other.inputs, other.outputs)

    @staticmethod
    def of(metadata: Mapping[str, Any]) -> Tensors:
        """By the protocol's description of the model."""
        types = {t["name"]: numpy_type(t["datatype"]) for t in metadata["inputs"]}
        outputs = tuple(t["name"] for t in metadata["outputs"])
        return Tensors(types, outputs, tuple(metadata.get("versions", ())))


UNKNOWN = Tensors({}, ())


def predict_call(
    model: str,
    features: Mapping[str, Keys],
    dense: Mapping[str, ArrayLike] | None,
    about: Tensors,
    top_k: int | None,
    want_source: bool,
    request_id: str,
    timeout_s: float | None,
) -> Call:
    """Dense values are sent in the model's types. Raises ``BadRequest``."""
    inputs = tensors_of(features)
    for name, value in (dense or {}).items():
        inputs[name] = np.ascontiguousarray(value, about.inputs.get(name))
    outputs = None
    if want_source:
        best = ["top_k_index"] if top_k else []
        outputs = [*about.outputs, *best, *_sources(features)]
    try:
        parameters = {"top_k": index(top_k)} if top_k else {}
    except TypeError:
        raise BadRequest(f"top_k must be a whole number, got {top_k!r}") from None
    return Call(model, inputs, outputs, parameters, request_id, timeout_s)


def predict_result(answer: Answer) -> PredictResult:
    outputs, sources = _split(answer)
    return PredictResult(outputs, sources, answer.defaulted, answer.degraded, answer.stale_s)


def lookup_call(
    model: str,
    features: Mapping[str, Keys],
    want_source: bool,
    request_id: str,
    timeout_s: float | None,
) -> Call:
    wanted = [*features, *(_sources(features) if want_source else ())]
    inputs = tensors_of(features)
    return Call(f"{model}.lookup", inputs, wanted, {}, request_id, timeout_s)


def lookup_result(answer: Answer) -> LookupResult:
    vectors, sources = _split(answer)
    return LookupResult(
        vectors,
        sources,
        defaulted=answer.defaulted,
        degraded=answer.degraded,
        stale_s=answer.stale_s,
    )


def _sources(features: Mapping[str, Keys]) -> list[str]:
    return [f"{name}.source" for name in features]


def _split(answer: Answer) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[np.uint8]]]:
    values, sources = {}, {}
    for name, array in answer.outputs.items():
        if name.endswith(".source"):
            sources[name.removesuffix(".source")] = array
        else:
            values[name] = array
    return values, sources


class Patience:
    """The time that one call and its repetitions have. ``until``: when it is over, by
    ``time.monotonic``."""

    def __init__(self, timeout_s: float, retries: int) -> None:
        self.until = time.monotonic() + timeout_s
        self._retries = retries
        self._pause_s = _FIRST_PAUSE_S

    def pause_s(self, error: HpsError) -> float:
        """How long to wait before the next attempt; raises ``error`` when there is none: only a server that
        was not available is asked again, and not before it says."""
        pause = max(self._pause_s * random.uniform(0.5, 1.5), retry_after_s(error))
        over = pause >= self.until - time.monotonic()
        if not isinstance(error, Unavailable) or not self._retries or over:
            raise error
        self._retries -= 1
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause


def left_s(until: float) -> float:
    """The time until the instant ``until``; DeadlineExceeded when it has passed."""
    left = until - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("no answer within the request's time")
    return left
