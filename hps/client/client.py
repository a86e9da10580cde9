"""The client, for threads and for asyncio: what both can ask, each in its own manner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar

from numpy.typing import ArrayLike, NDArray

from hps.client.address import Address, Tls, address
from hps.client.calls import (
    UNKNOWN,
    Call,
    Patience,
    Tensors,
    lookup_call,
    lookup_result,
    predict_call,
    predict_result,
)
from hps.client.errors import Unreachable
from hps.client.http_wire import HttpWire
from hps.client.wire import Answer, Keys
from hps.errors import BadRequest, HpsError, Unavailable
from hps.types import LookupResult, PredictResult

T = TypeVar("T")


class _Opened:
    """What both clients are made of."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        retries: int = 2,
        tls: Tls | None = None,
    ) -> None:
        """``url``: ``http://host:port`` or ``grpc://host:port`` as the server printed it when it started,
        ``https`` and ``grpcs`` where it has certificates. ``timeout_s`` bounds a call with all its
        repetitions; ``retries``: how often it is repeated when the server is not available, after pauses
        that grow and are as long as the server asks for. Raises ``ConfigError``."""
        at = address(url, tls)
        self.url, self.timeout_s = at.base, timeout_s
        self._retries = retries
        self._wire, self._line = self._open(at, api_key)
        self._known: dict[str, Tensors] = {}
        self._closed = False

    def _patience(self, timeout_s: float | None = None, retries: int | None = None) -> Patience:
        return Patience(
            self.timeout_s if timeout_s is None else timeout_s,
            self._retries if retries is None else retries,
        )

    def _open_still(self) -> None:
        if self._closed:
            raise HpsError("this client was closed; make another one")

    def _open(self, at: Address, api_key: str | None) -> tuple[Any, Any]:
        """How calls are written and answers read, and what sends them: a ``HttpWire`` and a ``Http``, or what
        is like them."""
        raise NotImplementedError


class Client(_Opened):
    """Asks one server. Any number of threads may use it. Every failure is an ``HpsError``: ``Unavailable``
    when nobody answers, ``DeadlineExceeded`` when nobody did in time, else the class that fits the server's
    reply."""

    def _open(self, at: Address, api_key: str | None) -> tuple[Any, Any]:
        if at.is_grpc:
            from hps.client.grpc import GrpcChannel, GrpcWire

            return GrpcWire(at.base, api_key), GrpcChannel(at)
        from hps.client.rest import Http

        return HttpWire(at.base, api_key), Http(at)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, for good; idempotent."""
        self._closed = True
        self._line.close()

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
    ) -> PredictResult:
        """Score a batch: keys per feature and the named dense tensors in, named outputs out.

        ``top_k`` keeps the best and adds ``top_k_index``; context features may come with batch 1 then.
        ``want_source`` adds the tier's code of every key. ``timeout_s``: for this call, told to the
        server, too.
        """
        patience = self._patience(timeout_s)

        def ask(about: Tensors) -> Answer:
            call = predict_call(
                model, features, dense, about, top_k, want_source, request_id, timeout_s
            )
            return self._infer(call, patience)

        if not dense and not want_source:
            return predict_result(ask(UNKNOWN))
        about = self._known.get(model) or self._about(model, patience)
        try:
            answer = ask(about)
        except BadRequest as error:
            newer = self._about(model, patience)
            if newer.same(about):
                raise error
            return predict_result(ask(newer))
        if not about.of_version(answer.model_version):
            newer = self._about(model, patience)
            answer = answer if newer.same(about) else ask(newer)
        return predict_result(answer)

    def lookup(
        self,
        model: str,
        features: Mapping[str, Keys],
        *,
        want_source: bool = False,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> LookupResult:
        """Pooled vectors per feature; ``want_source`` adds the tier's code of every key."""
        call = lookup_call(model, features, want_source, request_id, timeout_s)
        return lookup_result(self._infer(call))

    def infer(
        self,
        model: str,
        inputs: Mapping[str, NDArray[Any]],
        *,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Any] | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Answer:
        """One request of the Open Inference Protocol with binary tensors, as they are."""
        return self._infer(Call(model, inputs, outputs, parameters or {}, request_id, timeout_s))

    def metadata(self, model: str) -> dict[str, Any]:
        """A model's inputs and outputs, as the protocol describes them."""
        return self._ask("metadata", model)

    def config(self, model: str) -> dict[str, Any]:
        """A model's configuration in Triton's form, ``max_batch_size`` for one."""
        return self._ask("config", model)

    def is_hps(self) -> bool:
        """Whether the server at ``url`` is one of ours, by the name it gives itself."""
        return str(self._ask("server").get("name", "")).startswith("hps")

    def ready(self) -> bool:
        """Whether the server answers requests by now; ``Unavailable`` when nobody is there."""
        with _Readiness() as found:
            found.ready = self._ask("ready", "", retries=0)["ready"]
        return found.ready

    def connect(self) -> None:
        """Load what requests need and connect, so that the first one takes no longer than the others.

        Raises ``Unavailable`` when nobody is there.
        """
        self.ready()

    def _about(self, model: str, patience: Patience) -> Tensors:
        """What the server tells of the model now."""
        question = self._wire.question("metadata", model)
        told = self._sent(question, partial(self._wire.told, "metadata"), patience)
        self._known[model] = found = Tensors.of(told)
        return found

    def _infer(self, call: Call, patience: Patience | None = None) -> Answer:
        patience = patience or self._patience(call.timeout_s)
        read: Callable[[Any], Answer] = self._wire.answer
        return self._sent(self._wire.request(call), read, patience)

    def _ask(self, what: str, model: str = "", retries: int | None = None) -> dict[str, Any]:
        question = self._wire.question(what, model)
        told = partial(self._wire.told, what)
        return self._sent(question, told, self._patience(None, retries))

    def _sent(self, message: Any, read: Callable[[Any], T], patience: Patience) -> T:
        while True:
            self._open_still()
            try:
                return read(self._line.send(message, patience.until))
            except HpsError as error:
                time.sleep(patience.pause_s(error))


class AsyncClient(_Opened):
    """``Client`` for asyncio: the same methods, awaited; see there. Used on one event loop."""

    def _open(self, at: Address, api_key: str | None) -> tuple[Any, Any]:
        if at.is_grpc:
            from hps.client.grpc import AsyncGrpcChannel, GrpcWire

            return GrpcWire(at.base, api_key), AsyncGrpcChannel(at)
        from hps.client.rest_aio import AsyncHttp

        return HttpWire(at.base, api_key), AsyncHttp(at)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, for good; idempotent."""
        self._closed = True
        await self._line.close()

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
        """See ``Client.predict``."""
        patience = self._patience(timeout_s)

        async def ask(about: Tensors) -> Answer:
            call = predict_call(
                model, features, dense, about, top_k, want_source, request_id, timeout_s
            )
            return await self._infer(call, patience)

        if not dense and not want_source:
            return predict_result(await ask(UNKNOWN))
        about = self._known.get(model) or await self._about(model, patience)
        try:
            answer = await ask(about)
        except BadRequest as error:
            newer = await self._about(model, patience)
            if newer.same(about):
                raise error
            return predict_result(await ask(newer))
        if not about.of_version(answer.model_version):
            newer = await self._about(model, patience)
            answer = answer if newer.same(about) else await ask(newer)
        return predict_result(answer)

    async def lookup(
        self,
        model: str,
        features: Mapping[str, Keys],
        *,
        want_source: bool = False,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> LookupResult:
        """See ``Client.lookup``."""
        call = lookup_call(model, features, want_source, request_id, timeout_s)
        return lookup_result(await self._infer(call))

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
        """See ``Client.infer``."""
        call = Call(model, inputs, outputs, parameters or {}, request_id, timeout_s)
        return await self._infer(call)

    async def metadata(self, model: str) -> dict[str, Any]:
        """See ``Client.metadata``."""
        return await self._ask("metadata", model)

    async def config(self, model: str) -> dict[str, Any]:
        """See ``Client.config``."""
        return await self._ask("config", model)

    async def ready(self) -> bool:
        """See ``Client.ready``."""
        with _Readiness() as found:
            found.ready = (await self._ask("ready", "", retries=0))["ready"]
        return found.ready

    async def _about(self, model: str, patience: Patience) -> Tensors:
        """What the server tells of the model now."""
        question = self._wire.question("metadata", model)
        told = await self._sent(question, partial(self._wire.told, "metadata"), patience)
        self._known[model] = found = Tensors.of(told)
        return found

    async def _infer(self, call: Call, patience: Patience | None = None) -> Answer:
        patience = patience or self._patience(call.timeout_s)
        return await self._sent(self._wire.request(call), self._wire.answer, patience)

    async def _ask(self, what: str, model: str = "", retries: int | None = None) -> dict[str, Any]:
        question = self._wire.question(what, model)
        told = partial(self._wire.told, what)
        return await self._sent(question, told, self._patience(None, retries))

    async def _sent(self, message: Any, read: Callable[[Any], T], patience: Patience) -> T:
        while True:
            self._open_still()
            try:
                return read(await self._line.send(message, patience.until))
            except HpsError as error:
                await asyncio.sleep(patience.pause_s(error))


class _Readiness:
    """A server that says that it is not available is there, and not ready."""

    ready = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        return isinstance(error, Unavailable) and not isinstance(error, Unreachable)
