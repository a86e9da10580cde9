"""Shared parts of the FastAPI routes: responses, errors, JSON bodies, roles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.params import Depends as Dependency
from starlette.exceptions import HTTPException
from starlette.responses import Response

from hps.config.auth import Role
from hps.errors import BadRequest, HpsError
from services.frontend.admission.byte_budget import ByteBudget
from services.frontend.auth import Authorizer
from services.frontend.errors import RequestCancelled, RequestTooLarge
from services.frontend.http.body import ClientGone, read_body
from services.frontend.http.errors import error_body, error_headers
from services.frontend.http.failures import describe
from services.frontend.http.head import request_id
from services.frontend.http.peer import peer_of

# The bodies of these routes are small and arrive quickly; only inference takes large ones.
_MAX_BODY = 1 << 20
_BODY_TIMEOUT_S = 10.0


class JsonAnswer(Response):
    """A JSON response; numbers that are not finite become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def answers(
    schema: str, errors: Sequence[int] = (), description: str = "Done."
) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's ``responses``: 200 with a schema of ``openapi.SCHEMAS``, and errors."""
    responses: dict[int | str, dict[str, Any]] = {200: _response(description, schema)}
    for status in errors:
        responses[status] = _response(_MEANING[status], "Error")
    return responses


def takes(schema: str) -> dict[str, Any]:
    """OpenAPI's ``requestBody`` for a route that reads a JSON body of a schema of ``openapi.SCHEMAS``."""
    reference = {"$ref": f"#/components/schemas/{schema}"}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}
    }


_MEANING = {
    400: "Invalid request.",
    403: "The caller's role does not allow this.",
    404: "No such model, version or table.",
    409: "The model's files are damaged, don't fit together, or were changed after they were loaded.",
    413: "The body is too large.",
    501: "Part of the protocol, but not supported here.",
    503: "Not ready: loading, overloaded or shutting down.",
    504: "Deadline exceeded.",
}


def _response(description: str, schema: str) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{schema}"}
    return {"description": description, "content": {"application/json": {"schema": reference}}}


def needs(guard: Authorizer, role: Role) -> list[Dependency]:
    """Dependencies that admit only callers with ``role``."""

    def check(request: Request) -> None:
        scope = request.scope
        guard.check(dict(scope["headers"]), role, peer_of(scope).certificate)

    return [Depends(check)]


async def body_of(request: Request, most: int) -> bytes:
    """Read the request's body, of at most ``most`` bytes. Raises as `read_body`."""
    headers = dict(request.scope["headers"])
    try:
        return await read_body(request.receive, headers, most, _BODY_TIMEOUT_S, ByteBudget(most))
    except RequestTooLarge:
        raise RequestTooLarge(f"the request body has more than {most} bytes") from None
    except ClientGone:
        raise RequestCancelled("the client disconnected before its request was complete") from None


async def json_body(request: Request) -> dict[str, Any]:
    """Read the request's JSON object; an empty body is an empty object."""
    body = await body_of(request, _MAX_BODY)
    if not body.strip():
        return {}
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"failed to parse the request JSON buffer: {error}") from None
    if not isinstance(data, dict):
        raise BadRequest("the request must be a JSON object")
    return data


async def parameters_of(request: Request) -> dict[str, Any]:
    """Read the ``parameters`` of the request's JSON object."""
    parameters = (await json_body(request)).get("parameters", {})
    if not isinstance(parameters, dict):
        raise BadRequest("'parameters' must be an object")
    return parameters


def failure(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """Return an error response."""
    body = error_body(message)
    response = Response(body, status)
    response.raw_headers = error_headers(status, body)
    for name, value in (headers or {}).items():
        response.headers[name] = value
    return response


def install_errors(api: FastAPI) -> None:
    """Answer every error of FastAPI and Starlette as ``{"error": text}``; 422 becomes 400."""

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{message}: {request.method} {request.url.path}"
        headers = dict(error.headers) if error.headers else None
        return failure(error.status_code, message, headers)

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        faults = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return failure(400, "; ".join(faults))

    async def on_other(request: Request, error: Exception) -> Response:
        status, body = describe(error, request_id(dict(request.scope["headers"])))
        response = Response(body, status)
        response.raw_headers = error_headers(status, body)
        return response

    handlers: dict[type[Exception], Callable[[Request, Exception], Any]] = {
        HTTPException: on_http,
        RequestValidationError: on_validation,
        HpsError: on_other,
        Exception: on_other,
    }
    for kind, handler in handlers.items():
        api.add_exception_handler(kind, handler)
