"""A lookup on its way to other nodes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from hps.lookup.remote.targets import Target
from hps.types import JaggedKeys, LookupRequest, LookupResult


class Attempt(NamedTuple):
    """One node was asked, at an instant of ``time.monotonic()``. ``is_last``: there was no other, or another
    may not be asked after it."""

    target: Target
    started: float
    is_last: bool


class Call:
    """A lookup on its way; ``tried`` are the nodes it was sent to."""

    __slots__ = (
        "answer",
        "asked",
        "deadline",
        "failure",
        "features",
        "message",
        "request",
        "started",
        "tried",
    )

    def __init__(
        self,
        request: LookupRequest,
        features: Mapping[str, JaggedKeys],
        message: bytes,
        deadline: float,
    ) -> None:
        self.request = request
        self.features = features
        self.message = message
        self.deadline = deadline
        self.started = time.monotonic()
        self.tried: list[Target] = []
        self.failure = ""
        self.asked: Any = None
        self.answer: Future[LookupResult] = Future()

    def fail(self, error: BaseException) -> None:
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)
