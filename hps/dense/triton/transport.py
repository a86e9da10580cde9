"""How Triton is asked: by gRPC or HTTP, with its own clients.

Errors are Triton's: `Unreachable` for what may be better a moment later or elsewhere, anything else as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from hps.dense.base import DATATYPES, TensorInfo
from hps.errors import DeadlineExceeded, DenseModelError, ModelError, NotFound

# A channel asks for its server again after at most this long.
_RECONNECT_MS = 500
_MESSAGE_BYTES = 2**31 - 1
_TOO_LATE = "StatusCode.DEADLINE_EXCEEDED"
_UNREACHABLE = {"StatusCode.UNAVAILABLE", "503"}
_NOT_FOUND = {"StatusCode.NOT_FOUND", "404"}


class Unreachable(DenseModelError):
    """Nobody answers there, or Triton says that it cannot at the moment."""


@dataclass(frozen=True, slots=True)
class Described:
    """A model as Triton describes it. ``max_batch`` 0: Triton knows no batches there."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    max_batch: int


@dataclass(frozen=True, slots=True)
class Placed:
    """Tensors in shared memory that Triton knows as ``region``: offset and bytes of each, by name."""

    region: str
    places: dict[str, tuple[int, int]]


class Transport(Protocol):
    """One model of one Triton. Any number of threads may call it."""

    def describe(self, timeout_s: float) -> Described:
        """Raises `Unreachable`, `ModelError` when there is no such model."""
        ...

    def infer(
        self,
        inputs: Sequence[tuple[str, str, NDArray[Any]]],
        outputs: Sequence[str],
        timeout_s: float,
        shared: Placed | None = None,
    ) -> dict[str, NDArray[Any]]:
        """The ``outputs`` for ``inputs`` (name, datatype, array). What is ``shared`` is read and written
        there, and not among the arrays returned. Raises `Unreachable`, `DeadlineExceeded`,
        `DenseModelError`."""
        ...

    def register(self, region: str, key: str, size: int) -> None:
        """Let Triton map ``size`` bytes of shared memory."""
        ...

    def unregister(self, region: str) -> None: ...

    def close(self) -> None: ...


class GrpcTransport:
    """By gRPC; requests take turns over ``channels`` connections."""

    def __init__(
        self, url: str, model: str, version: str, *, channels: int, tls: Any = None
    ) -> None:
        from tritonclient import grpc

        self._grpc = grpc
        self._model, self._version = model, version
        options = [
            ("grpc.max_send_message_length", _MESSAGE_BYTES),
            ("grpc.max_receive_message_length", _MESSAGE_BYTES),
            ("grpc.use_local_subchannel_pool", 1),  # else all channels share one connection
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 2_000),
        ]
        self._clients = [
            grpc.InferenceServerClient(url, channel_args=options, **_tls(tls))
            for _ in range(channels)
        ]
        self._turn = count()

    def _client(self) -> Any:
        return self._clients[next(self._turn) % len(self._clients)]

    def describe(self, timeout_s: float) -> Described:
        client, of = self._client(), (self._model, self._version)
        try:
            about = client.get_model_metadata(*of, client_timeout=timeout_s)
            config = client.get_model_config(*of, client_timeout=timeout_s).config
        except InferenceServerException as error:
            raise _told(error, describing=self._model) from None
        return Described(
            tuple(_info(t.name, t.datatype, t.shape) for t in about.inputs),
            tuple(_info(t.name, t.datatype, t.shape) for t in about.outputs),
            config.max_batch_size,
        )

    def infer(
        self,
        inputs: Sequence[tuple[str, str, NDArray[Any]]],
        outputs: Sequence[str],
        timeout_s: float,
        shared: Placed | None = None,
    ) -> dict[str, NDArray[Any]]:
        try:
            result = self._client().infer(
                self._model,
                _inputs(self._grpc, inputs, shared),
                self._version,
                _outputs(self._grpc, outputs, shared),
                client_timeout=timeout_s,
            )
        except InferenceServerException as error:
            raise _told(error) from None
        return _arrays(result, outputs, shared)

    def register(self, region: str, key: str, size: int) -> None:
        try:
            self._client().register_system_shared_memory(region, key, size)
        except InferenceServerException as error:
            raise _told(error) from None

    def unregister(self, region: str) -> None:
        try:
            self._client().unregister_system_shared_memory(region)
        except InferenceServerException as error:
            raise _told(error) from None

    def close(self) -> None:
        for client in self._clients:
            client.close()


class HttpTransport:
    """By HTTP; every thread that asks has a connection of its own, as Triton's client demands."""

    def __init__(
        self, url: str, model: str, version: str, *, timeout_s: float, tls: Any = None
    ) -> None:
        from tritonclient import http

        self._http = http
        self._url, self._model, self._version = url, model, version
        self._timeout_s, self._tls = timeout_s, tls
        self._own = threading.local()

    def _client(self) -> Any:
        client = getattr(self._own, "client", None)
        if client is None:
            client = self._own.client = self._http.InferenceServerClient(
                self._url,
                connection_timeout=self._timeout_s,
                network_timeout=self._timeout_s,
            )
        return client

    def describe(self, timeout_s: float) -> Described:
        client, of = self._client(), (self._model, self._version)
        try:
            about = client.get_model_metadata(*of)
            config = client.get_model_config(*of)
        except Exception as error:
            raise _told(error, describing=self._model) from None
        return Described(
            tuple(_info(t["name"], t["datatype"], t["shape"]) for t in about["inputs"]),
            tuple(_info(t["name"], t["datatype"], t["shape"]) for t in about["outputs"]),
            config["max_batch_size"],
        )

    def infer(
        self,
        inputs: Sequence[tuple[str, str, NDArray[Any]]],
        outputs: Sequence[str],
        timeout_s: float,
        shared: Placed | None = None,
    ) -> dict[str, NDArray[Any]]:
        try:
            result = self._client().infer(
                self._model,
                _inputs(self._http, inputs, shared),
                self._version,
                _outputs(self._http, outputs, shared),
                timeout=int(timeout_s * 1e6),
            )
        except Exception as error:
            raise _told(error) from None
        return _arrays(result, outputs, shared)

    def register(self, region: str, key: str, size: int) -> None:
        try:
            self._client().register_system_shared_memory(region, key, size)
        except Exception as error:
            raise _told(error) from None

    def unregister(self, region: str) -> None:
        try:
            self._client().unregister_system_shared_memory(region)
        except Exception as error:
            raise _told(error) from None

    def close(self) -> None:
        """Connections go with the threads that have them."""


def _tls(tls: Any) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "ssl": True,
        "root_certificates": tls.ca_file and str(tls.ca_file),
        "private_key": tls.key_file and str(tls.key_file),
        "certificate_chain": tls.certificate_file and str(tls.certificate_file),
    }


def _inputs(
    kind: Any, inputs: Sequence[tuple[str, str, NDArray[Any]]], shared: Placed | None
) -> list[Any]:
    made = []
    for name, datatype, array in inputs:
        tensor = kind.InferInput(name, list(array.shape), datatype)
        if shared is not None and name in shared.places:
            offset, size = shared.places[name]
            tensor.set_shared_memory(shared.region, size, offset)
        else:
            tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def _outputs(kind: Any, names: Sequence[str], shared: Placed | None) -> list[Any]:
    made = []
    for name in names:
        tensor = kind.InferRequestedOutput(name)
        if shared is not None and name in shared.places:
            offset, size = shared.places[name]
            tensor.set_shared_memory(shared.region, size, offset)
        made.append(tensor)
    return made


def _arrays(result: Any, names: Sequence[str], shared: Placed | None) -> dict[str, NDArray[Any]]:
    found = {}
    for name in names:
        if shared is not None and name in shared.places:
            continue
        array = result.as_numpy(name)
        if array is None:
            raise DenseModelError(f"Triton's answer lacks the output {name!r}")
        found[name] = np.ascontiguousarray(array)
    return found


def _info(name: str, datatype: str, shape: Sequence[int]) -> TensorInfo:
    if datatype not in DATATYPES:
        raise ModelError(
            f"Triton says that {name!r} is {datatype}; a network may use {', '.join(DATATYPES)}"
        )
    return TensorInfo(name, datatype, tuple(map(int, shape)))


def _told(error: Exception, describing: str | None = None) -> Exception:
    """Triton's clients' errors as ours."""
    if isinstance(error, InferenceServerException):
        status, message = error.status(), error.message()
        if status == _TOO_LATE:
            return DeadlineExceeded("Triton did not answer within the request's time")
        if describing is not None and (
            status in _NOT_FOUND or (status == "400" and "unknown model" in message)
        ):
            return NotFound(message)
        if status in _UNREACHABLE:
            return Unreachable(message)
        return DenseModelError(f"Triton answered: {message}")
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("Triton did not answer within the request's time")
    if isinstance(error, (OSError, EOFError)):
        return Unreachable(str(error) or type(error).__name__)
    return DenseModelError(f"Triton could not be asked: {type(error).__name__}: {error}")
