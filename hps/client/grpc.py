"""The gRPC client, by ``tritonclient``, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hps.client.calls import AsyncCalls, Call, Calls, Patience
from hps.client.errors import Unreachable
from hps.client.wire import Answer
from hps.errors import (
    BadRequest,
    DeadlineExceeded,
    Forbidden,
    HpsError,
    NotFound,
    Unauthenticated,
    Unavailable,
    Unsupported,
)

_ASK_S = 2.0
_MESSAGE_BYTES = 2**31 - 1
_CHANNEL = [
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
]
_ERRORS: dict[str, type[HpsError]] = {
    "INVALID_ARGUMENT": BadRequest,
    "RESOURCE_EXHAUSTED": BadRequest,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": Forbidden,
    "NOT_FOUND": NotFound,
    "UNIMPLEMENTED": Unsupported,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
}
# How gRPC itself says that nobody was there; a server says it in other words.
_NEVER_ARRIVED = ("failed to connect", "Socket closed", "Connection reset", "recvmsg")


class GrpcClient(Calls):
    """Speaks to one server's gRPC port. Any number of threads may use it.

    ``timeout_s`` bounds a call and its repetitions; ``retries``: how often a call is repeated that found
    the server unavailable. Failures are ``HpsError``s, as ``Client``'s are. ``tls``: the file of the roots
    that the server's certificate must lead to; None speaks plain text.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:8001",
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        retries: int = 0,
        tls: str | None = None,
    ) -> None:
        from tritonclient import grpc

        self.address = address
        self._timeout_s, self._retries = timeout_s, retries
        self._wire = _Wire(address, api_key)
        self._triton = grpc.InferenceServerClient(
            address, ssl=tls is not None, root_certificates=tls, channel_args=_CHANNEL
        )

    def __enter__(self) -> GrpcClient:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._triton.close()

    def ready(self) -> bool:
        """Whether the server answers requests by now; ``Unavailable`` when nobody is there."""
        with self._wire.telling():
            return bool(self._triton.is_server_ready(client_timeout=self._timeout_s))

    def _ask(self, call: Call) -> Answer:
        patience = Patience(self._timeout_s, self._retries)
        while True:
            try:
                with self._wire.telling():
                    return self._wire.answer(
                        self._triton.infer(**self._wire.infer(call, patience.left_s))
                    )
            except HpsError as error:
                time.sleep(patience.pause_s(error))

    def _datatypes(self, model: str) -> Mapping[str, Any]:
        if model not in self._wire.types:
            with self._wire.telling():
                about = self._triton.get_model_metadata(
                    model, headers=self._wire.headers, client_timeout=self._timeout_s
                )
            self._wire.learn(model, about)
        return self._wire.types[model]


class AsyncGrpcClient(AsyncCalls):
    """``GrpcClient`` for asyncio: the same methods, awaited. Used on one event loop."""

    def __init__(
        self,
        address: str = "127.0.0.1:8001",
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        retries: int = 0,
        tls: str | None = None,
    ) -> None:
        from tritonclient.grpc import aio

        self.address = address
        self._timeout_s, self._retries = timeout_s, retries
        self._wire = _Wire(address, api_key)
        self._triton = aio.InferenceServerClient(
            address, ssl=tls is not None, root_certificates=tls, channel_args=_CHANNEL
        )

    async def __aenter__(self) -> AsyncGrpcClient:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._triton.close()

    async def ready(self) -> bool:
        """Whether the server answers requests by now; ``Unavailable`` when nobody is there."""
        with self._wire.telling():
            return bool(await self._triton.is_server_ready(client_timeout=self._timeout_s))

    async def _ask(self, call: Call) -> Answer:
        patience = Patience(self._timeout_s, self._retries)
        while True:
            try:
                with self._wire.telling():
                    return self._wire.answer(
                        await self._triton.infer(**self._wire.infer(call, patience.left_s))
                    )
            except HpsError as error:
                await asyncio.sleep(patience.pause_s(error))

    async def _datatypes(self, model: str) -> Mapping[str, Any]:
        if model not in self._wire.types:
            with self._wire.telling():
                about = await self._triton.get_model_metadata(
                    model, headers=self._wire.headers, client_timeout=self._timeout_s
                )
            self._wire.learn(model, about)
        return self._wire.types[model]


class _Wire:
    """Calls, answers and errors as Triton's client has them."""

    def __init__(self, address: str, api_key: str | None) -> None:
        from tritonclient import grpc

        self._address, self._kind = address, grpc
        self.headers = {"x-api-key": api_key} if api_key else None
        self.types: dict[str, dict[str, Any]] = {}

    def infer(self, call: Call, timeout_s: float) -> dict[str, Any]:
        """The arguments of ``infer``."""
        from tritonclient.utils import np_to_triton_dtype

        tensors = []
        for name, value in call.inputs.items():
            tensor = self._kind.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
            tensors.append(tensor.set_data_from_numpy(value))
        wanted = call.outputs
        return {
            "model_name": call.model,
            "inputs": tensors,
            "outputs": None
            if wanted is None
            else [self._kind.InferRequestedOutput(n) for n in wanted],
            "headers": self.headers,
            "client_timeout": timeout_s,
            "parameters": dict(call.parameters) if call.parameters else None,
        }

    def answer(self, result: Any) -> Answer:
        reply = result.get_response()
        arrays = {out.name: result.as_numpy(out.name) for out in reply.outputs}
        parameters = {
            name: getattr(value, value.WhichOneof("parameter_choice"))
            for name, value in reply.parameters.items()
        }
        return Answer(arrays, parameters, reply.model_version)

    def learn(self, model: str, about: Any) -> None:
        """NumPy's type of every input of ``model``."""
        from tritonclient.utils import triton_to_np_dtype

        self.types[model] = {t.name: triton_to_np_dtype(t.datatype) for t in about.inputs}

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Triton's errors as ours."""
        from tritonclient.utils import InferenceServerException

        try:
            yield
        except InferenceServerException as error:
            status, message = str(error.status()).removeprefix("StatusCode."), error.message()
            if status == "UNAVAILABLE" and any(sign in message for sign in _NEVER_ARRIVED):
                raise Unreachable(f"{self._address} cannot be reached: {message}") from None
            raise _ERRORS.get(status, HpsError)(message) from None


def is_hps(address: str, api_key: str | None = None) -> bool:
    """Whether an hps server answers at ``host:port``, in plain text. Raises ``Unauthenticated``."""
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    headers = {"x-api-key": api_key} if api_key else None
    try:
        with InferenceServerClient(address) as client:
            about = client.get_server_metadata(headers, client_timeout=_ASK_S)
    except InferenceServerException as error:
        if error.status() == "StatusCode.UNAUTHENTICATED":
            raise Unauthenticated(error.message()) from None
        return False
    return bool(about.name == "hps")
