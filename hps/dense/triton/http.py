"""Triton by HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from hps.dense.triton.transport import (
    Described,
    Placed,
    arrays_of,
    info_of,
    tensors_in,
    tensors_out,
    told,
)
from hps.errors import DeadlineExceeded


class HttpTransport:
    """By HTTP; every thread that asks has a connection of its own, as Triton's client demands."""

    def __init__(self, url: str, model: str, version: str) -> None:
        import gevent  # type: ignore[import-untyped]  # has no types
        from tritonclient import http

        self._http, self._timeout = http, gevent.Timeout
        self._url, self._model, self._version = url, model, version
        self._own = threading.local()

    @contextmanager
    def _client(self, timeout_s: float, describing: str | None = None) -> Iterator[Any]:
        """This thread's client, for calls that last ``timeout_s`` together. Its own timeouts are set once and
        bound each piece of an answer, so gevent, which its sockets are made of, bounds the whole."""
        client = getattr(self._own, "client", None)
        if client is None:
            client = self._own.client = self._http.InferenceServerClient(self._url)
        try:
            with self._timeout(timeout_s):
                yield client
        except self._timeout:
            # Cut off in the middle, it is no good for another call.
            del self._own.client
            raise DeadlineExceeded("Triton did not answer within the request's time") from None
        except Exception as error:
            raise told(error, describing) from None

    def describe(self, timeout_s: float) -> Described:
        of = self._model, self._version
        with self._client(timeout_s, describing=self._model) as client:
            about = client.get_model_metadata(*of)
            config = client.get_model_config(*of)
        return Described(
            tuple(info_of(t["name"], t["datatype"], t["shape"]) for t in about["inputs"]),
            tuple(info_of(t["name"], t["datatype"], t["shape"]) for t in about["outputs"]),
            config["max_batch_size"],
        )

    def infer(
        self,
        inputs: Sequence[tuple[str, str, NDArray[Any]]],
        outputs: Sequence[str],
        timeout_s: float,
        shared: Placed | None = None,
    ) -> dict[str, NDArray[Any]]:
        with self._client(timeout_s) as client:
            result = client.infer(
                self._model,
                tensors_in(self._http, inputs, shared),
                self._version,
                tensors_out(self._http, outputs, shared),
                timeout=int(timeout_s * 1e6),
            )
        return arrays_of(result, outputs, shared)

    def register(self, region: str, key: str, size: int, timeout_s: float) -> None:
        with self._client(timeout_s) as client:
            client.register_system_shared_memory(region, key, size)

    def unregister(self, region: str, timeout_s: float) -> None:
        with self._client(timeout_s) as client:
            client.unregister_system_shared_memory(region)

    def close(self) -> None:
        """Connections go with the threads that have them."""
