"""Where one request's time goes: the parts of its work, timed as they are told of (`hps.tracing`).

A request that is profiled is recorded, like one of OpenTelemetry; all others are not, and pay nothing. A
lookup node that is asked on its behalf answers with a profile of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from time import perf_counter_ns
from typing import Any

from hps.tracing import RequestContext


class Profile(RequestContext):
    """A request, or a part of its work, and the parts of that. Threads may take turns with it."""

    __slots__ = ("_began", "about", "name", "ns", "parts")

    is_recorded = True
    is_profiled = True

    def __init__(self, name: str = "request", began: int | None = None) -> None:
        """``began``: an instant of ``time.perf_counter_ns``, now if None."""
        super().__init__()
        self.name = name
        self.ns: int | None = None
        """How long it took; None while it has not ended."""
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

    def reported(self, name: str, started: int, ended: int, told: bytes) -> None:
        part = self.begin(name)
        part.ns = ended - started
        if not told:
            return
        found = json.loads(told)
        part.about = dict(found["about"])
        part.parts = [_of(each) for each in found["parts"]]

    def packed(self) -> bytes:
        """`told` as bytes, for ``reported``."""
        return json.dumps(self.told(), default=str).encode()

    def told(self) -> dict[str, Any]:
        """As JSON has it: ``name``, ``us`` (null: it has not ended), ``about``, ``parts``."""
        return {
            "name": self.name,
            "us": None if self.ns is None else self.ns / 1e3,
            "about": self.about,
            "parts": [part.told() for part in list(self.parts)],
        }


def _of(told: Mapping[str, Any]) -> Profile:
    """What was told of a part."""
    part = Profile(told["name"])
    part.ns = None if told["us"] is None else round(told["us"] * 1e3)
    part.about = dict(told["about"])
    part.parts = [_of(each) for each in told["parts"]]
    return part
