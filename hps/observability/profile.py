"""Profile of one request: the timed parts of its work, as `hps.tracing` reports them.

A profiled request is recorded like one with OpenTelemetry; other requests cost nothing more. A lookup
node that works for a profiled request returns its own profile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from time import perf_counter_ns
from typing import Any

from hps.tracing import RequestContext


class Profile(RequestContext):
    """A request, or a part of its work, with its parts. Used by one thread at a time."""

    __slots__ = ("_began", "about", "name", "ns", "parts")

    is_recorded = True
    is_profiled = True

    def __init__(self, name: str = "request", began: int | None = None) -> None:
        """``began``: an instant of ``time.perf_counter_ns``; None: now."""
        super().__init__()
        self.name = name
        self.ns: int | None = None
        """Duration in nanoseconds; None while it runs."""
        self.parts: list[Profile] = []
        self.about: dict[str, Any] = {}
        self._began = perf_counter_ns() if began is None else began

    def begin(self, name: str) -> Profile:
        part = Profile(name)
        self.parts.append(part)
        return part

    def note(self, **attributes: Any) -> None:
        self.about |= attributes

    def end(self, error: BaseException | None = None) -> None:
        if self.ns is None:
            self.ns = perf_counter_ns() - self._began
            self.about |= {"error": str(error)} if error is not None else {}

    def stage(self, name: str, started: int, ended: int) -> None:
        self.begin(name).ns = ended - started

    def spent(self, name: str, ns: int) -> None:
        for part in self.parts:
            if part.name == name:
                part.ns = (part.ns or 0) + ns
                return
        self.begin(name).ns = ns

    def reported(self, name: str, started: int, ended: int, report: bytes) -> None:
        part = self.begin(name)
        part.ns = ended - started
        if not report:
            return
        remote = json.loads(report)
        part.about = dict(remote["about"])
        part.parts = [_decode(each) for each in remote["parts"]]

    def packed(self) -> bytes:
        """Encode `as_dict` as bytes, for ``reported``."""
        return json.dumps(self.as_dict(), default=str).encode()

    def as_dict(self) -> dict[str, Any]:
        """The profile as JSON: ``name``, ``us`` (null: not ended), ``about``, ``parts``."""
        return {
            "name": self.name,
            "us": None if self.ns is None else self.ns / 1e3,
            "about": self.about,
            "parts": [part.as_dict() for part in list(self.parts)],
        }


def _decode(report: Mapping[str, Any]) -> Profile:
    """Decode a part from `as_dict`."""
    part = Profile(report["name"])
    part.ns = None if report["us"] is None else round(report["us"] * 1e3)
    part.about = dict(report["about"])
    part.parts = [_decode(each) for each in report["parts"]]
    return part
