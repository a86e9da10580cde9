"""Where the time of an inference request goes that is sent here for that: ``POST /v1/profile/<name>``.

It is read, answered and written by what does so with others' requests; only its connection is not looked
at, and requests are not counted. It takes the ordinary way: the shorter one of requests that look alike
tells no parts.
"""

from __future__ import annotations

import threading
import time
from time import perf_counter_ns
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from hps.config.server_settings import ServerSettings
from hps.errors import BadRequest
from hps.profile import Profile
from services.frontend.auth import Guard
from services.frontend.errors import TooLarge
from services.frontend.http.api import Json, answers, needs
from services.frontend.http.request import Parser
from services.frontend.http.response import Encoder
from services.frontend.state import Entry, State


class Profiler:
    """One request at a time. Any thread may call it."""

    def __init__(self, state: State, settings: ServerSettings) -> None:
        self._state = state
        self._max_keys = settings.max_keys
        self._timeout_s = settings.request_timeout_ms / 1e3
        self._lock = threading.Lock()
        # They know requests that look alike, as those of a port do.
        self._known: dict[Entry, tuple[Parser, Encoder]] = {}

    def measure(self, name: str, body: bytes, size: int | None) -> dict[str, Any]:
        """The parts of the request ``body``, whose JSON takes ``size`` bytes (None: all); see
        `Profile.told`. Raises what is wrong with it."""
        entry = self._state.entry(name)
        with self._lock:
            parser, encoder = self._of(entry)
            return self._measure(entry, parser, encoder, body, size)

    def _measure(
        self, entry: Entry, parser: Parser, encoder: Encoder, body: bytes, size: int | None
    ) -> dict[str, Any]:
        profile = Profile()
        started = perf_counter_ns()
        call = parser.parse(body, size)
        profile.stage("parse", started, perf_counter_ns())
        call.origin = profile
        deadline = time.monotonic() + (call.form.timeout_us * 1e-6 or self._timeout_s)
        result: Any = entry.endpoint.submit(call, deadline).result(self._timeout_s)
        inferred = perf_counter_ns()
        outputs = entry.endpoint.outputs(call, result)
        encoder.encode(call.form, result.defaulted, result.degraded, result.stale_s, outputs)
        profile.stage("serialise", inferred, perf_counter_ns())
        profile.ns = perf_counter_ns() - started
        profile.note(
            model=entry.name,
            version=entry.version,
            batch=call.batch,
            defaulted=result.defaulted,
            degraded=list(result.degraded),
        )
        return profile.told()

    def _of(self, entry: Entry) -> tuple[Parser, Encoder]:
        found = self._known.get(entry)
        if found is None:
            served = self._state.entries.values()
            self._known = {known: value for known, value in self._known.items() if known in served}
            endpoint = entry.endpoint
            found = self._known[entry] = (
                Parser(endpoint.name, endpoint.rules, self._max_keys),
                Encoder(endpoint.name, endpoint.version),
            )
        return found


def profile_route(state: State, settings: ServerSettings, guard: Guard) -> APIRouter:
    """Needs role admin: times tell what is in a cache."""
    router = APIRouter(tags=["admin"], dependencies=needs(guard, "admin"))
    profiler = Profiler(state, settings)

    @router.post("/v1/profile/{name}", responses=answers("Profile", [400, 404, 413, 503, 504]))
    async def profile(name: str, request: Request) -> Response:
        """Answers an inference request, and tells where its time went instead of its outputs."""
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > settings.max_body_bytes:
                raise TooLarge(f"the request body has more than {settings.max_body_bytes} bytes")
        told = request.headers.get("inference-header-content-length")
        if told is not None and not (told.isdigit() and int(told) <= len(body)):
            raise BadRequest(
                f"inference header size should be in range (0, {len(body)}), got: {told[:40]}"
            )
        size = None if told is None else int(told)
        return Json(await run_in_threadpool(profiler.measure, name, body, size))

    return router
