"""Operations of both clients, independent of protocol and transport.

They are coroutines; all that waits is passed to them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from operator import index
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hps.backoff import Backoff
from hps.client.errors import ServerUnreachable, retry_after_s
from hps.client.wire import Answer, Keys, numpy_type, tensors_of
from hps.errors import BadRequest, HpsError, Unavailable
from hps.types import LookupResult, PredictResult

_BACKOFF = Backoff(0.05, 2.0)
T = TypeVar("T")


class InferCall(NamedTuple):
    """A request of the Open Inference Protocol. ``outputs`` None: all.

    ``timeout_s``: the caller's, None if not given."""

    model: str
    inputs: Mapping[str, NDArray[Any]]
    outputs: Sequence[str] | None = None
    parameters: Mapping[str, Any] = {}
    request_id: str = ""
    timeout_s: float | None = None


class _ModelTensors(NamedTuple):
    """NumPy types of a model's inputs, and names of its outputs.

    Valid for ``versions``; a server may serve others later."""

    inputs: Mapping[str, Any] = {}
    outputs: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()

    def of_version(self, version: str) -> bool:
        """True if this may describe ``version``, which answered, or if a version is unknown."""
        return not version or not self.versions or version in self.versions

    def same(self, other: _ModelTensors) -> bool:
        """True if a request built from ``other`` would be the same."""
        return (self.inputs, self.outputs) == (other.inputs, other.outputs)


class ClientOperations:
    """Operations of a client.

    ``codec`` writes messages and reads replies, as `HttpCodec` does. ``transport`` and ``sleep`` do all
    that waits: ``await transport.send(message, until)`` returns the reply, which is due at ``until``, an
    instant of ``time.monotonic``."""

    def __init__(
        self,
        codec: Any,
        transport: Any,
        sleep: Callable[[float], Awaitable[None]],
        *,
        timeout_s: float,
        retries: int,
    ) -> None:
        self._codec, self._transport, self._sleep = codec, transport, sleep
        self._timeout_s, self._retries = timeout_s, retries
        self._known: dict[str, _ModelTensors] = {}
        self._closed = False

    async def predict(
        self,
        model: str,
        features: Mapping[str, Keys],
        dense: Mapping[str, ArrayLike] | None = None,
        *,
        top_k: int | None = None,
        want_source: bool = False,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> PredictResult:
        """Score a batch: keys per feature and the named dense tensors in, named outputs out.

        ``top_k`` keeps the k best and adds ``top_k_index``; context features may then have batch 1.
        ``want_source`` adds the tier's code of every key. ``timeout_s`` limits this call, and is also sent
        to the server."""
        deadline = self._deadline(timeout_s)
        try:
            parameters = {"top_k": index(top_k)} if top_k else {}
        except TypeError:
            raise BadRequest(f"top_k must be a whole number, got {top_k!r}") from None
        tensors = tensors_of(features)

        def call(known: _ModelTensors) -> InferCall:
            inputs = dict(tensors)
            for name, value in (dense or {}).items():  # cast to the model's types
                inputs[name] = np.ascontiguousarray(value, known.inputs.get(name))
            best = ["top_k_index"] if top_k else []
            outputs = [*known.outputs, *best, *_sources(features)] if want_source else None
            return InferCall(model, inputs, outputs, parameters, request_id, timeout_s)

        if dense or want_source:
            answer = await self._infer_known(model, call, deadline)
        else:
            answer = await self._infer(call(_ModelTensors()), deadline)
        return PredictResult(*_split(answer), **answer.account)

    async def lookup(
        self,
        model: str,
        features: Mapping[str, Keys],
        *,
        want_source: bool = False,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> LookupResult:
        """Look up pooled vectors per feature; ``want_source`` adds the tier's code of every key."""
        wanted = [*features, *(_sources(features) if want_source else ())]
        inputs = tensors_of(features)
        call = InferCall(f"{model}.lookup", inputs, wanted, {}, request_id, timeout_s)
        answer = await self._infer(call, self._deadline(timeout_s))
        return LookupResult(*_split(answer), **answer.account)

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, NDArray[Any]],
        *,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Any] | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Answer:
        """Send one request of the Open Inference Protocol; tensors are binary and unchanged."""
        call = InferCall(model, inputs, outputs, parameters or {}, request_id, timeout_s)
        return await self._infer(call, self._deadline(timeout_s))

    async def metadata(self, model: str) -> dict[str, Any]:
        """A model's inputs and outputs, as the protocol describes them."""
        return await self._query("metadata", model, self._deadline())

    async def config(self, model: str) -> dict[str, Any]:
        """A model's configuration in Triton's form, ``max_batch_size`` for one."""
        return await self._query("config", model, self._deadline())

    async def about(self) -> dict[str, Any]:
        """The server's name, version and extensions, as the protocol describes them."""
        return await self._query("server", "", self._deadline())

    async def is_hps(self) -> bool:
        """True if the server is an hps server, by the name it reports."""
        reply = await self.about()
        return str(reply.get("name", "")).startswith("hps")

    async def models(self) -> list[str]:
        """The models that are ready, from the server's repository index."""
        reply = await self._query("models", "", self._deadline())
        ready = (m for m in reply.get("models", ()) if m.get("state", "READY") == "READY")
        return list(dict.fromkeys(str(model["name"]) for model in ready))

    async def ready(self) -> bool:
        """True if the server is ready. Raises Unavailable if it does not answer.

        Loads and connects what requests need."""
        try:
            reply = await self._query("ready", "", RetryDeadline(self._timeout_s, 0))
        except ServerUnreachable:
            raise
        except Unavailable:  # it responds, and is not ready
            return False
        return bool(reply["ready"])

    async def close(self) -> None:
        """Close the connections permanently; idempotent."""
        self._closed = True
        await self._transport.close()

    async def _infer_known(
        self, model: str, call: Callable[[_ModelTensors], InferCall], deadline: RetryDeadline
    ) -> Answer:
        """Send ``call``, which depends on the model's metadata; again if that was outdated."""
        known = self._known.get(model) or await self._model_tensors(model, deadline)
        try:
            answer = await self._infer(call(known), deadline)
        except BadRequest as error:
            newer = await self._model_tensors(model, deadline)
            if newer.same(known):
                raise error
        else:
            if known.of_version(answer.model_version):
                return answer
            newer = await self._model_tensors(model, deadline)
            if newer.same(known):
                return answer
        return await self._infer(call(newer), deadline)

    async def _model_tensors(self, model: str, deadline: RetryDeadline) -> _ModelTensors:
        """The server's current metadata of the model."""
        reply = await self._query("metadata", model, deadline)
        found = self._known[model] = _ModelTensors(
            {t["name"]: numpy_type(t["datatype"]) for t in reply["inputs"]},
            tuple(t["name"] for t in reply["outputs"]),
            tuple(reply.get("versions", ())),
        )
        return found

    async def _infer(self, call: InferCall, deadline: RetryDeadline) -> Answer:
        return await self._exchange(self._codec.request(call), self._codec.answer, deadline)

    async def _query(self, kind: str, model: str, deadline: RetryDeadline) -> dict[str, Any]:
        read = partial(self._codec.decode, kind)
        return await self._exchange(self._codec.query(kind, model), read, deadline)

    async def _exchange(self, message: Any, read: Callable[[Any], T], deadline: RetryDeadline) -> T:
        """Send until a reply can be ``read``; other errors than an unavailable server are raised."""
        while True:
            if self._closed:
                raise HpsError("this client was closed; make another one")
            try:
                return read(await self._transport.send(message, deadline.until))
            except HpsError as error:
                pause_s = deadline.pause_s(error)
            await self._sleep(pause_s)

    def _deadline(self, timeout_s: float | None = None) -> RetryDeadline:
        return RetryDeadline(self._timeout_s if timeout_s is None else timeout_s, self._retries)


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


class RetryDeadline:
    """Deadline of one call and its retries. ``until``: an instant of ``time.monotonic``."""

    def __init__(self, timeout_s: float, retries: int) -> None:
        self.until = time.monotonic() + timeout_s
        self._retries = retries
        self._failures = 0

    def pause_s(self, error: HpsError) -> float:
        """Seconds until the next attempt; raises ``error`` if there is none.

        Only unavailable servers are retried, and not before the time that they ask for."""
        self._failures += 1
        pause = max(_BACKOFF.pause_s(self._failures), retry_after_s(error))
        over = pause >= self.until - time.monotonic()
        if not isinstance(error, Unavailable) or not self._retries or over:
            raise error
        self._retries -= 1
        return pause
