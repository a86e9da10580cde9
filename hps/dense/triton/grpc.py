"""Transport to Triton over gRPC."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Sequence
from itertools import count
from typing import Any

from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from hps.dense.triton.transport import (
    CudaSharedMemory,
    SharedMemoryTensors,
    TritonModelInfo,
    info_of,
    microseconds,
    output_arrays_of,
    request_headers,
    tensors_in,
    tensors_out,
    translate_triton_error,
)

# The longest interval between two connection attempts of a channel.
_RECONNECT_MS = 500
_MESSAGE_BYTES = 2**31 - 1


class GrpcTransport:
    """A `TritonTransport` over gRPC; requests alternate between ``channels`` connections."""

    def __init__(
        self, url: str, model: str, version: str, *, channels: int, tls: Any = None
    ) -> None:
        from tritonclient import grpc

        self._grpc = grpc
        self._model, self._version = model, version
        options = [
            ("grpc.max_send_message_length", _MESSAGE_BYTES),
            ("grpc.max_receive_message_length", _MESSAGE_BYTES),
            ("grpc.use_local_subchannel_pool", 1),  # otherwise all channels share one connection
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 2_000),
            (
                "grpc.http2.ping_timeout_ms",
                2_000,
            ),  # gRPC's own pings: see hps/lookup/remote/connection.py
        ]
        self._clients = [
            grpc.InferenceServerClient(url, channel_args=options, **_tls(tls))
            for _ in range(channels)
        ]
        self._turn = count()

    def _client(self) -> Any:
        return self._clients[next(self._turn) % len(self._clients)]

    def describe(self, timeout_s: float) -> TritonModelInfo:
        client, of = self._client(), (self._model, self._version)
        until = time.monotonic() + timeout_s
        try:
            about = client.get_model_metadata(*of, client_timeout=timeout_s)
            left = max(0.0, until - time.monotonic())
            config = client.get_model_config(*of, client_timeout=left).config
        except InferenceServerException as error:
            raise translate_triton_error(error, describing=self._model) from None
        return TritonModelInfo(
            tuple(info_of(t.name, t.datatype, t.shape) for t in about.inputs),
            tuple(info_of(t.name, t.datatype, t.shape) for t in about.outputs),
            config.max_batch_size,
        )

    def infer(
        self,
        inputs: Sequence[tuple[str, str, NDArray[Any]]],
        outputs: Sequence[str],
        timeout_s: float,
        shared: SharedMemoryTensors | None = None,
    ) -> dict[str, NDArray[Any]]:
        request_id, headers = request_headers()
        try:
            result = self._client().infer(
                self._model,
                tensors_in(self._grpc, inputs, shared),
                self._version,
                tensors_out(self._grpc, outputs, shared),
                request_id=request_id,
                headers=headers or None,
                client_timeout=timeout_s,
                timeout=microseconds(timeout_s),
            )
        except InferenceServerException as error:
            raise translate_triton_error(error) from None
        return output_arrays_of(result, outputs, shared)

    def register(
        self, region: str, key: str | CudaSharedMemory, size: int, timeout_s: float
    ) -> None:
        client = self._client()
        try:
            if isinstance(key, CudaSharedMemory):
                client.register_cuda_shared_memory(
                    region, b64encode(key.handle), key.device, size, client_timeout=timeout_s
                )
            else:
                client.register_system_shared_memory(region, key, size, client_timeout=timeout_s)
        except InferenceServerException as error:
            raise translate_triton_error(error) from None

    def unregister(self, region: str, key: str | CudaSharedMemory, timeout_s: float) -> None:
        client = self._client()
        try:
            if isinstance(key, CudaSharedMemory):
                client.unregister_cuda_shared_memory(region, client_timeout=timeout_s)
            else:
                client.unregister_system_shared_memory(region, client_timeout=timeout_s)
        except InferenceServerException as error:
            raise translate_triton_error(error) from None

    def close(self) -> None:
        for client in self._clients:
            client.close()


def _tls(tls: Any) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "ssl": True,
        "root_certificates": tls.ca_file and str(tls.ca_file),
        "private_key": tls.key_file and str(tls.key_file),
        "certificate_chain": tls.certificate_file and str(tls.certificate_file),
    }
