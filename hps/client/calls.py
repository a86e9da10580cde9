"""Operations of both clients, independent of the transport.

Nothing here waits or connects: a `Flow` yields the next step, receives the reply or the error, and returns
the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
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


class SendStep(NamedTuple):
    """A message to send; its reply is due at ``until``, an instant of ``time.monotonic``."""

    message: Any
    until: float


Flow = Generator[SendStep | float, Any, T]
"""Messages to be sent and, as numbers, seconds to wait; ends with a result."""


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
        """Whether this may describe ``version``, which answered; True if a version is unknown."""
        return not version or not self.versions or version in self.versions

    def same(self, other: _ModelTensors) -> bool:
        """Whether a request built from ``other`` would be the same."""
        return (self.inputs, self.outputs) == (other.inputs, other.outputs)


class ClientOperations:
    """Operations of both clients. ``wire`` writes messages and reads replies, as `HttpCodec` does."""

    def __init__(self, wire: Any, timeout_s: float, retries: int) -> None:
        self._wire, self._timeout_s, self._retries = wire, timeout_s, retries
        self._known: dict[str, _ModelTensors] = {}
        self.closed = False

    def predict(
        self,
        model: str,
        features: Mapping[str, Keys],
        dense: Mapping[str, ArrayLike] | None = None,
        *,
        top_k: int | None = None,
        want_source: bool = False,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Flow[PredictResult]:
        """Score a batch: keys per feature and the named dense tensors in, named outputs out.

        ``top_k`` keeps the k best and adds ``top_k_index``; context features may then have batch 1.
        ``want_source`` adds the tier's code of every key. ``timeout_s`` limits this call, and is also sent
        to the server."""
        patience = self._patience(timeout_s)
        try:
            parameters = {"top_k": index(top_k)} if top_k else {}
        except TypeError:
            raise BadRequest(f"top_k must be a whole number, got {top_k!r}") from None

        def ask(about: _ModelTensors) -> Flow[Answer]:
            inputs = tensors_of(features)
            for name, value in (dense or {}).items():  # cast to the model's types
                inputs[name] = np.ascontiguousarray(value, about.inputs.get(name))
            best = ["top_k_index"] if top_k else []
            outputs = [*about.outputs, *best, *_sources(features)] if want_source else None
            call = InferCall(model, inputs, outputs, parameters, request_id, timeout_s)
            return self._infer(call, patience)

        if not dense and not want_source:
            answer = yield from ask(_ModelTensors())
            return PredictResult(*_split(answer), **answer.account)
        about = self._known.get(model) or (yield from self._about(model, patience))
        try:
            answer = yield from ask(about)
        except BadRequest as error:
            newer = yield from self._about(model, patience)
            if newer.same(about):
                raise error
            answer = yield from ask(newer)
        else:
            if not about.of_version(answer.model_version):
                newer = yield from self._about(model, patience)
                if not newer.same(about):
                    answer = yield from ask(newer)
        return PredictResult(*_split(answer), **answer.account)

    def lookup(
        self,
        model: str,
        features: Mapping[str, Keys],
        *,
        want_source: bool = False,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Flow[LookupResult]:
        """Look up pooled vectors per feature; ``want_source`` adds the tier's code of every key."""
        wanted = [*features, *(_sources(features) if want_source else ())]
        inputs = tensors_of(features)
        call = InferCall(f"{model}.lookup", inputs, wanted, {}, request_id, timeout_s)
        answer = yield from self._infer(call, self._patience(timeout_s))
        return LookupResult(*_split(answer), **answer.account)

    def infer(
        self,
        model: str,
        inputs: Mapping[str, NDArray[Any]],
        *,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Any] | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Flow[Answer]:
        """Send one request of the Open Inference Protocol; tensors are binary and unchanged."""
        call = InferCall(model, inputs, outputs, parameters or {}, request_id, timeout_s)
        return (yield from self._infer(call, self._patience(timeout_s)))

    def metadata(self, model: str) -> Flow[dict[str, Any]]:
        """A model's inputs and outputs, as the protocol describes them."""
        return self._ask("metadata", model, self._patience())

    def config(self, model: str) -> Flow[dict[str, Any]]:
        """A model's configuration in Triton's form, ``max_batch_size`` for one."""
        return self._ask("config", model, self._patience())

    def about(self) -> Flow[dict[str, Any]]:
        """The server's name, version and extensions, as the protocol describes them."""
        return self._ask("server", "", self._patience())

    def is_hps(self) -> Flow[bool]:
        """Whether the server is an hps server, by the name it reports."""
        reply = yield from self.about()
        return str(reply.get("name", "")).startswith("hps")

    def models(self) -> Flow[list[str]]:
        """The models that are ready, from the server's repository index."""
        reply = yield from self._ask("models", "", self._patience())
        ready = (m for m in reply.get("models", ()) if m.get("state", "READY") == "READY")
        return list(dict.fromkeys(str(model["name"]) for model in ready))

    def ready(self) -> Flow[bool]:
        """Whether the server is ready. Raises Unavailable if it does not answer.

        Loads and connects what requests need."""
        try:
            reply = yield from self._ask("ready", "", RetryDeadline(self._timeout_s, 0))
        except ServerUnreachable:
            raise
        except Unavailable:  # it responds, and is not ready
            return False
        return bool(reply["ready"])

    def _about(self, model: str, patience: RetryDeadline) -> Flow[_ModelTensors]:
        """The server's current metadata of the model."""
        reply = yield from self._ask("metadata", model, patience)
        found = self._known[model] = _ModelTensors(
            {t["name"]: numpy_type(t["datatype"]) for t in reply["inputs"]},
            tuple(t["name"] for t in reply["outputs"]),
            tuple(reply.get("versions", ())),
        )
        return found

    def _infer(self, call: InferCall, patience: RetryDeadline) -> Flow[Answer]:
        return self._sent(self._wire.request(call), self._wire.answer, patience)

    def _ask(self, what: str, model: str, patience: RetryDeadline) -> Flow[dict[str, Any]]:
        read = partial(self._wire.decode, what)
        return self._sent(self._wire.question(what, model), read, patience)

    def _sent(self, message: Any, read: Callable[[Any], T], patience: RetryDeadline) -> Flow[T]:
        while True:
            if self.closed:
                raise HpsError("this client was closed; make another one")
            try:
                return read((yield SendStep(message, patience.until)))
            except HpsError as error:
                pause_s = patience.pause_s(error)
            yield pause_s

    def _patience(self, timeout_s: float | None = None) -> RetryDeadline:
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
