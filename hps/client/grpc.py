"""Transport over gRPC, for threads and asyncio, with ``tritonclient``'s messages."""

from __future__ import annotations

from typing import Any, NamedTuple

import grpc
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from hps.client.address import ServerAddress
from hps.client.calls import InferCall
from hps.client.errors import grpc_error, left_s
from hps.client.http_messages import checked_key
from hps.client.trace import trace_headers
from hps.client.wire import Answer, decode_array, encode_array
from hps.errors import HpsError

_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # bound on one connection attempt
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
_QUERIES = {
    "server": ("ServerMetadata", pb.ServerMetadataRequest),
    "ready": ("ServerReady", pb.ServerReadyRequest),
    "metadata": ("ModelMetadata", pb.ModelMetadataRequest),
    "config": ("ModelConfig", pb.ModelConfigRequest),
    "models": ("RepositoryIndex", pb.RepositoryIndexRequest),
}
_KINDS = {bool: "bool_param", int: "int64_param", float: "double_param"}


class GrpcMessage(NamedTuple):
    """A message, its method and its metadata."""

    method: str
    content: Any
    metadata: tuple[tuple[str, str], ...]


class _Channel:
    def __init__(self, at: ServerAddress, *, is_shared: bool = True) -> None:
        """``is_shared``: the connection may be shared with other channels of this process to the server."""
        self._at = at
        self._options = [*_OPTIONS, ("grpc.use_local_subchannel_pool", int(not is_shared))]
        self._credentials = None
        if at.tls is not None:
            self._credentials = grpc.ssl_channel_credentials(*at.tls.contents())
        self._channel: Any = None

    def _open(self, kind: Any) -> None:
        """Open a channel of the module ``kind``: ``grpc`` or ``grpc.aio``."""
        if self._credentials is None:
            self._channel = kind.insecure_channel(self._at.target, self._options)
        else:
            self._channel = kind.secure_channel(self._at.target, self._credentials, self._options)
        self._stub = GRPCInferenceServiceStub(self._channel)

    def _call(self, message: GrpcMessage, until: float) -> Any:
        method, content, metadata = message
        return getattr(self._stub, method)(content, timeout=left_s(until), metadata=metadata)

    def _hps_error(self, error: Any) -> HpsError:
        pushback = dict(error.trailing_metadata() or ()).get("grpc-retry-pushback-ms")
        return grpc_error(self._at.base, error.code().name, error.details() or "", pushback)


class GrpcChannel(_Channel):
    """A connection to one server. Thread-safe."""

    def __init__(self, at: ServerAddress) -> None:
        super().__init__(at)
        self._open(grpc)

    def send(self, message: GrpcMessage, until: float) -> Any:
        """Send and return the response. Raises the call's status, and DeadlineExceeded at ``until``."""
        try:
            return self._call(message, until)
        except grpc.RpcError as error:
            raise self._hps_error(error) from None
        except ValueError as error:  # closed by another thread, for example
            raise HpsError(f"the request to {self._at.base} was not sent: {error}") from None

    def close(self) -> None:
        self._channel.close()


class AsyncGrpcChannel(_Channel):
    """A connection to one server, for the event loop of its first call: grpc.aio binds it to that."""

    async def send(self, message: GrpcMessage, until: float) -> Any:
        """See ``GrpcChannel.send``."""
        if self._channel is None:
            self._open(grpc.aio)
        try:
            return await self._call(message, until)
        except grpc.RpcError as error:
            raise self._hps_error(error) from None

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


class GrpcCodec:
    """Encodes one client's calls as messages, and decodes answers."""

    def __init__(self, api_key: str | None) -> None:
        self._metadata = (("x-api-key", checked_key(api_key)),) if api_key else ()

    def query(self, kind: str, model: str) -> GrpcMessage:
        method, request = _QUERIES[kind]
        return GrpcMessage(method, request(name=model) if model else request(), self._metadata)

    def decode(self, kind: str, response: Any) -> dict[str, Any]:
        """Decode as over HTTP: protobuf's JSON form has 64-bit numbers as text and omits false values."""
        if kind == "ready":
            return {"ready": response.ready}
        found: dict[str, Any] = MessageToDict(response, preserving_proto_field_name=True)
        if kind == "metadata":
            for tensor in (*found.get("inputs", ()), *found.get("outputs", ())):
                tensor["shape"] = [int(size) for size in tensor["shape"]]
        return dict(found["config"]) if kind == "config" else found

    def request(self, call: InferCall) -> GrpcMessage:
        """Build the message of a call, with its timeout."""
        request = pb.ModelInferRequest(model_name=call.model, id=call.request_id)
        for name, value in call.inputs.items():
            datatype, tensor = encode_array(value)
            request.inputs.add(name=name, datatype=datatype, shape=value.shape)
            request.raw_input_contents.append(tensor.tobytes())
        for name in call.outputs or ():
            request.outputs.add(name=name)
        for name, value in call.parameters.items():
            kind = _KINDS.get(type(value), "string_param")
            setattr(request.parameters[name], kind, value)
        return GrpcMessage("ModelInfer", request, (*self._metadata, *trace_headers().items()))

    def answer(self, response: Any) -> Answer:
        """Decode an answer; its arrays own their memory."""
        if len(response.raw_output_contents) != len(response.outputs):
            raise HpsError("the server's outputs are not raw; is it an hps server?")
        arrays = {
            out.name: decode_array(out.datatype, raw).reshape(tuple(out.shape))
            for out, raw in zip(response.outputs, response.raw_output_contents, strict=True)
        }
        parameters = {
            name: getattr(value, value.WhichOneof("parameter_choice"))
            for name, value in response.parameters.items()
        }
        return Answer(arrays, parameters, response.model_version)
