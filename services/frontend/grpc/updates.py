"""``hps.v1.Updates``: direct writes; status, pause, resume and replay of update streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import ParseDict

from hps.config.auth import Role
from hps.errors import BadRequest
from hps.node.streams import UpdateStreams
from hps.v1 import admin_pb2 as pb
from services.frontend.grpc.packed_numbers import FLOAT32, INT64, unpack_numbers
from services.frontend.grpc.responders import CallContext
from services.server_state import ServerState


class UpdatesService:
    """The methods of the service, by their names in the ``.proto``."""

    roles: Mapping[str, Role] = {
        "Write": "write",
        "Status": "admin",
        "Pause": "admin",
        "Resume": "admin",
        "Seek": "admin",
    }

    def __init__(self, state: ServerState[Any]) -> None:
        self._state = state

    def Write(self, request: Any, context: CallContext) -> Any:
        node = self._state.require_node()
        keys = unpack_numbers(request.table, "keys", request.keys, INT64)
        deleted = unpack_numbers(request.table, "deleted", request.deleted, INT64)
        vectors = unpack_numbers(request.table, "vectors", request.vectors, FLOAT32)
        of = request.model_version or None
        dim = node.table(request.model, request.table, of).dim
        if len(vectors) != len(keys) * dim:
            raise BadRequest(
                f"table '{request.table}' has dim {dim}: {len(keys)} keys need {len(keys) * dim} values of "
                f"'vectors', not {len(vectors)}"
            )
        rows = vectors.reshape(-1, dim)
        version = node.write(request.model, request.table, keys, rows, deleted=deleted, version=of)
        return pb.WriteResponse(version=version, written=len(keys), deleted=len(deleted))

    def Status(self, request: Any, context: CallContext) -> Any:
        return self._status()

    def Pause(self, request: Any, context: CallContext) -> Any:
        self._streams().pause(request.group or None)
        return self._status()

    def Resume(self, request: Any, context: CallContext) -> Any:
        self._streams().resume(request.group or None)
        return self._status()

    def Seek(self, request: Any, context: CallContext) -> Any:
        if not request.topic:
            raise BadRequest("'topic' is missing")
        self._streams().seek(
            request.topic, request.partition, request.offset, request.group or None
        )
        return self._status()

    def _streams(self) -> UpdateStreams:
        streams: UpdateStreams = self._state.require_node().streams
        return streams

    def _status(self) -> Any:
        status = {"updates": self._streams().status()}
        return ParseDict(status, pb.UpdatesStatus(), ignore_unknown_fields=True)
