"""Profiler of single inference requests: decoded, answered and encoded as by a port, and timed.

It uses the slow path, because the fast path of similar requests does not report parts. The connection is
not part of the profile, and the request is not counted in the metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any, NamedTuple

from hps.config.server_settings import ServerSettings
from hps.errors import BadRequest
from hps.observability.profile import Profile
from services.frontend.inference import ResponseEncoder
from services.frontend.inference_request import InferenceRequest
from services.frontend.state import FrontendState, ServedEndpoint


class ProfiledProtocol(NamedTuple):
    """Decoder of a protocol's requests to one name, and encoder of their answers.

    ``decode`` takes the body and the length of the JSON at its start, for HTTP; None: all of it. It raises
    ``BadRequest``."""

    decode: Callable[[bytes, int | None], InferenceRequest]
    encoder: ResponseEncoder[object]


MakeWire = Callable[[ServedEndpoint], ProfiledProtocol]


class RequestProfiler:
    """Profiles one request at a time. Thread-safe."""

    def __init__(
        self, state: FrontendState, settings: ServerSettings, wires: Mapping[str, MakeWire]
    ) -> None:
        """``wires``: by protocol."""
        self._state = state
        self._workers = settings.workers
        self._timeout_s = settings.request_timeout_ms / 1e3
        self._wires = wires
        self._lock = threading.Lock()
        # They keep templates of similar requests, like those of a port.
        self._known: dict[tuple[str, ServedEndpoint], ProfiledProtocol] = {}

    def measure(
        self, name: str, body: bytes, size: int | None, protocol: str = "http"
    ) -> dict[str, Any]:
        """Profile the request ``body``; see `Profile.as_dict`. Raises the request's error."""
        entry = self._state.entry(name)
        with self._lock:
            profile = self._measure(entry, self._of(protocol, entry), body, size)
        profile.note(
            protocol=protocol,
            process=self._state.role,
            workers=self._workers,
        )
        return profile.as_dict()

    def _measure(
        self, entry: ServedEndpoint, wire: ProfiledProtocol, body: bytes, size: int | None
    ) -> Profile:
        profile, done = Profile(), list[int]()
        started = perf_counter_ns()
        call = wire.decode(body, size)
        if call.form.memory_refs is not None:
            raise BadRequest(
                "a profile needs tensors in the request, not in shared memory; send them"
            )
        profile.stage("parse", started, perf_counter_ns())
        call.origin = profile
        deadline = time.monotonic() + (call.form.timeout_us * 1e-6 or self._timeout_s)
        future = entry.endpoint.submit(call, deadline)
        if not future.done():
            future.add_done_callback(lambda _: done.append(perf_counter_ns()))
        result: Any = future.result(self._timeout_s)
        inferred = perf_counter_ns()
        if done:  # otherwise it was answered on this thread
            profile.stage("return", min(done[0], inferred), inferred)
        outputs = entry.endpoint.outputs(call, result)
        wire.encoder.encode(call, result.defaulted, result.degraded, result.stale_s, outputs)
        profile.stage("serialise", inferred, perf_counter_ns())
        profile.ns = perf_counter_ns() - started
        profile.note(
            model=entry.name,
            version=entry.version,
            batch=call.batch,
            defaulted=result.defaulted,
            degraded=list(result.degraded),
        )
        return profile

    def _of(self, protocol: str, entry: ServedEndpoint) -> ProfiledProtocol:
        found = self._known.get((protocol, entry))
        if found is None:
            make = self._wires.get(protocol)
            if make is None:
                known = ", ".join(self._wires)
                raise BadRequest(
                    f"requests of {protocol} cannot be profiled here, only those of {known}"
                )
            served = self._state.all_entries
            self._known = {of: value for of, value in self._known.items() if of[1] in served}
            found = self._known[protocol, entry] = make(entry)
        return found
