"""What the clients have in common, whatever carries it: calls, answers, another attempt."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hps.client.wire import Answer, Keys, tensors_of
from hps.errors import HpsError, Unavailable
from hps.types import LookupResult, PredictResult

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class Call(NamedTuple):
    """A request of the Open Inference Protocol. ``outputs`` None: all there are."""

    model: str
    inputs: Mapping[str, NDArray[Any]]
    outputs: Sequence[str] | None = None
    parameters: Mapping[str, Any] | None = None


def _predict_call(
    model: str,
    features: Mapping[str, Keys],
    dense: Mapping[str, ArrayLike] | None,
    datatypes: Mapping[str, Any],
    top_k: int | None,
) -> Call:
    """``datatypes``: NumPy's types of the model's inputs, in which dense values are sent."""
    inputs = tensors_of(features)
    for name, value in (dense or {}).items():
        inputs[name] = np.ascontiguousarray(value, datatypes.get(name))
    return Call(model, inputs, None, {"top_k": top_k} if top_k else None)


def _predict_result(answer: Answer) -> PredictResult:
    return PredictResult(
        answer.outputs,
        defaulted=answer.defaulted,
        degraded=answer.degraded,
        stale_s=answer.stale_s,
    )


def _lookup_call(model: str, features: Mapping[str, Keys], want_source: bool) -> Call:
    names = list(features)
    wanted = names + [f"{name}.source" for name in names if want_source]
    return Call(f"{model}.lookup", tensors_of(features), wanted)


def _lookup_result(answer: Answer) -> LookupResult:
    sources = {
        n.removesuffix(".source"): a for n, a in answer.outputs.items() if n.endswith(".source")
    }
    return LookupResult(
        {name: a for name, a in answer.outputs.items() if not name.endswith(".source")},
        sources,
        defaulted=answer.defaulted,
        degraded=answer.degraded,
        stale_s=answer.stale_s,
    )


class Calls(ABC):
    """What can be asked of a server, for threads."""

    def predict(
        self,
        model: str,
        features: Mapping[str, Keys],
        dense: Mapping[str, ArrayLike] | None = None,
        *,
        top_k: int | None = None,
    ) -> PredictResult:
        """Score a batch: keys per feature and the named dense tensors in, named outputs out."""
        types = self._datatypes(model) if dense else {}
        return _predict_result(self._ask(_predict_call(model, features, dense, types, top_k)))

    def lookup(
        self, model: str, features: Mapping[str, Keys], *, want_source: bool = False
    ) -> LookupResult:
        """Pooled vectors per feature; ``want_source`` adds the tier's code of every key."""
        return _lookup_result(self._ask(_lookup_call(model, features, want_source)))

    def infer(
        self,
        model: str,
        inputs: Mapping[str, NDArray[Any]],
        *,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> Answer:
        """One request of the Open Inference Protocol with binary tensors, as they are."""
        return self._ask(Call(model, inputs, outputs, parameters))

    @abstractmethod
    def _ask(self, call: Call) -> Answer: ...

    @abstractmethod
    def _datatypes(self, model: str) -> Mapping[str, Any]:
        """NumPy's type of every input: dense values are sent in the model's types."""


class AsyncCalls(ABC):
    """The same for asyncio."""

    async def predict(
        self,
        model: str,
        features: Mapping[str, Keys],
        dense: Mapping[str, ArrayLike] | None = None,
        *,
        top_k: int | None = None,
    ) -> PredictResult:
        """See ``Calls.predict``."""
        types = await self._datatypes(model) if dense else {}
        return _predict_result(await self._ask(_predict_call(model, features, dense, types, top_k)))

    async def lookup(
        self, model: str, features: Mapping[str, Keys], *, want_source: bool = False
    ) -> LookupResult:
        """See ``Calls.lookup``."""
        return _lookup_result(await self._ask(_lookup_call(model, features, want_source)))

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, NDArray[Any]],
        *,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> Answer:
        """See ``Calls.infer``."""
        return await self._ask(Call(model, inputs, outputs, parameters))

    @abstractmethod
    async def _ask(self, call: Call) -> Answer: ...

    @abstractmethod
    async def _datatypes(self, model: str) -> Mapping[str, Any]: ...


class Patience:
    """The time that one call and its repetitions have."""

    def __init__(self, timeout_s: float, retries: int) -> None:
        self._until = time.monotonic() + timeout_s
        self._retries = retries
        self._pause_s = _FIRST_PAUSE_S

    @property
    def left_s(self) -> float:
        return max(0.001, self._until - time.monotonic())

    def pause_s(self, error: HpsError) -> float:
        """How long to wait before the next attempt; raises ``error`` when there is none: only a server that
        was not available is asked again."""
        pause = self._pause_s * random.uniform(0.5, 1.5)
        if not isinstance(error, Unavailable) or not self._retries or pause >= self.left_s:
            raise error
        self._retries -= 1
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause
