"""Files of served versions, by ranges, for sibling nodes that download them."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from hps.errors import BadRequest, NotFound, Unavailable, Unsupported
from hps.models.manifest import FILE_NAME
from hps.models.remote.mapped_tables import mapped_paths
from hps.node.node import Node
from services.frontend.auth import Authorizer
from services.frontend.http.api import answers, needs
from services.frontend.state import FrontendState

_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")
_MAX_RANGE = 64 << 20
_MAX_READS = 4
_BYTES = {
    "description": "The range.",
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: answers("Error", [status])[status] for status in statuses}


def version_files_route(state: FrontendState, guard: Authorizer) -> APIRouter:
    """The route; needs role admin, for the files hold whole tables and networks."""
    router = APIRouter(tags=["models"], dependencies=needs(guard, "admin"))
    reads = threading.BoundedSemaphore(_MAX_READS)

    @router.get(
        "/v1/models/{model}/versions/{version}/files/{path:path}",
        status_code=206,
        response_class=Response,
        responses={206: _BYTES, **_errors(400, 404, 501, 503)},
    )
    async def version_file(request: Request, model: str, version: int, path: str) -> Response:
        """A range of a file of a served version, which the header ``Range: bytes=FIRST-LAST`` names."""
        file = _file(state, model, version, path)
        found = _RANGE.fullmatch(request.headers.get("range", ""))
        if found is None:
            raise BadRequest("the header 'Range: bytes=FIRST-LAST' is missing or wrong")
        first, last = int(found[1]), int(found[2])
        if not first <= last < first + _MAX_RANGE:
            raise BadRequest(f"the range must have 1 to {_MAX_RANGE} bytes")
        if not reads.acquire(blocking=False):
            raise Unavailable(f"{_MAX_READS} ranges of files are being read already; retry later")
        try:
            data = await run_in_threadpool(_read, file, first, last + 1 - first)
        finally:
            reads.release()
        headers = {"Content-Range": f"bytes {first}-{first + len(data) - 1}/*"}
        return Response(data, 206, headers, "application/octet-stream")

    return router


def _file(state: FrontendState, model: str, version: int, path: str) -> Path:
    """The file, if the manifest of the served version names it."""
    node = state.node
    if not isinstance(node, Node) or node.control is None:
        raise Unsupported("this process gets its models from a node; use that node's admin port")
    opened = node.control.opened_version(model, version)
    if opened.manifest is None:
        raise NotFound(f"version {version} of model '{model}' has no manifest")
    known = {FILE_NAME, *opened.manifest.files(), *mapped_paths(opened.manifest)}
    if path not in known or not (opened.folder / path).is_file():
        raise NotFound(f"version {version} of model '{model}' has no such file")
    return opened.folder / path


def _read(file: Path, first: int, size: int) -> bytes:
    handle = os.open(file, os.O_RDONLY)
    try:
        return os.pread(handle, size, first)
    finally:
        os.close(handle)
