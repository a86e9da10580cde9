"""Rows of tables on the admin port: read and write."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Query
from fastapi.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from hps.errors import BadRequest
from hps.lookup.explain import explain_rows
from hps.suggestions import hint_for
from hps.types import JaggedKeys, KeyArray, LookupRequest, VectorArray
from services.frontend.auth import Authorizer
from services.frontend.errors import short_value
from services.frontend.http.api import JsonAnswer, answers, json_body, needs, takes
from services.frontend.state import FrontendState
from services.server_state import ServerState

MAX_ROWS = 1000
_FIELDS = ("keys", "vectors", "deleted", "model_version")


def rows_routes(state: FrontendState, guard: Authorizer, timeout_s: float) -> APIRouter:
    """Inspection of single rows; needs role admin."""
    router = APIRouter(tags=["admin"], dependencies=needs(guard, "admin"))

    @router.get("/v1/tables/{model}/{table}/rows", responses=answers("Rows", [400, 404, 503, 504]))
    async def rows(
        model: str,
        table: str,
        keys: str = Query(description="Keys, separated by commas", examples=["1,2"]),
    ) -> Response:
        """Rows of a table: vector, tier, version and age. Keys are the table's own (features may add an
        offset to theirs). The lookup counts like any other."""
        node = state.require_node()
        rows_table, engine = node.table(model, table), node.model(model).engine
        wanted = parse_keys(keys)
        deadline = time.monotonic() + timeout_s
        request = LookupRequest(
            {table: JaggedKeys(wanted, len(wanted))}, deadline, want_source=True, by_table=True
        )
        result = await state.pending.result(engine.submit(request), deadline)
        return JsonAnswer(explain_rows(rows_table, wanted, result))

    return router


def row_writes(state: ServerState[Any], guard: Authorizer) -> APIRouter:
    """Direct row writes, without a stream; needs role write."""
    router = APIRouter(tags=["admin"], dependencies=needs(guard, "write"))

    @router.post(
        "/v1/tables/{model}/{table}/rows",
        responses=answers("Written", [400, 404, 413, 501, 503]),
        openapi_extra=takes("RowWrite"),
    )
    async def write(model: str, table: str, request: Request) -> Response:
        """Upsert and delete rows in every store, then in the caches; answers when all have them. Later writes
        win over earlier ones, and over updates of a stream that were made before. All served versions of the
        model get them, or only `model_version`."""
        node = state.require_node()
        fields = JsonFields(await json_body(request), _FIELDS)
        keys, deleted = fields.keys("keys"), fields.keys("deleted")
        of = {"deleted": deleted, "version": fields.version("model_version")}
        work = partial(node.write, model, table, keys, fields.vectors(), **of)
        version = await run_in_threadpool(work)
        return JsonAnswer({"version": version, "written": len(keys), "deleted": len(deleted)})

    return router


class JsonFields:
    """The fields of a request's JSON object, which may have only ``names``. Raises BadRequest."""

    def __init__(self, body: dict[str, Any], names: Sequence[str]) -> None:
        for name in body:
            if name not in names:
                raise BadRequest(f"{short_value(name)} is not a field here{hint_for(name, names)}")
        self._body = body

    def keys(self, name: str) -> KeyArray:
        keys = self._body.get(name, [])
        if not isinstance(keys, list) or not all(type(key) is int for key in keys):
            raise BadRequest(f"'{name}' must be a list of integers")
        return np.array([in_64_bits(key) for key in keys], np.uint64).view(np.int64)

    def version(self, name: str) -> str | int | None:
        """A version's number or label; None if there is none."""
        found = self._body.get(name)
        if found is None or type(found) in (int, str):
            return found
        raise BadRequest(f"'{name}' must be a number or a label")

    def vectors(self) -> VectorArray:
        vectors = self._body.get("vectors", [])
        try:
            return np.array(vectors, np.float64)
        except (OverflowError, TypeError, ValueError):
            raise BadRequest(
                "'vectors' must be a list of lists of numbers, all of the same length"
            ) from None


def parse_keys(text: str) -> KeyArray:
    """Comma-separated integers of 64 bits, signed or unsigned, as ``(n,) int64``."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or len(parts) > MAX_ROWS:
        raise BadRequest(f"'keys' must be 1 to {MAX_ROWS} integers separated by commas")
    keys = []
    for part in parts:
        digits = part.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 21):
            raise BadRequest(f"key {short_value(part)} is not an integer")
        keys.append(in_64_bits(int(part)))
    return np.array(keys, np.uint64).view(np.int64)


def in_64_bits(key: int) -> int:
    """Return the bits of a signed or unsigned key. Raises BadRequest if it has more than 64."""
    if not -(2**63) <= key < 2**64:
        raise BadRequest(f"key {short_value(str(key))} does not fit into 64 bits")
    return key % 2**64
