"""A remote lookup in progress."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

from hps.lookup.remote.lookup_codec import LookupRequestTemplate
from hps.lookup.remote.lookup_node import LookupNode
from hps.lookup.remote.unary_method import Cancel
from hps.tracing import RequestContext
from hps.types import LookupResult, VectorArray


class LookupAttempt:
    """One attempt at one node, started at an instant of ``time.monotonic()``.

    ``is_last``: no other node may be tried after it. ``cancel`` ends the attempt; None until it has
    started."""

    __slots__ = ("cancel", "is_last", "started", "target")

    def __init__(self, target: LookupNode, started: float, is_last: bool) -> None:
        self.target = target
        self.started = started
        self.is_last = is_last
        self.cancel: Cancel | None = None


class RemoteLookupCall:
    """A remote lookup in progress.

    ``tried``: the nodes it was sent to; ``headers``: its trace; ``profile``: the request profile, if there
    is one.
    """

    __slots__ = (
        "all_failed_since",
        "answer",
        "attempt",
        "deadline",
        "failure",
        "headers",
        "message",
        "out",
        "profile",
        "started",
        "template",
        "tried",
    )

    def __init__(
        self,
        template: LookupRequestTemplate,
        message: bytes,
        started: float,
        deadline: float,
        out: Mapping[str, VectorArray] | None,
        headers: Mapping[str, str] | None,
        profile: RequestContext | None = None,
    ) -> None:
        self.template = template
        self.message = message
        self.deadline = deadline
        self.started = started
        self.out = out
        self.headers = headers
        self.profile = profile
        self.tried: list[LookupNode] = []
        self.failure = ""
        self.all_failed_since: float | None = None
        """Time at which all nodes had failed for the first time (``time.monotonic()``)."""
        self.attempt: LookupAttempt | None = None
        """The latest attempt. Set before its call starts: the call may fail, and the next attempt start on
        another thread, before `LookupAttempt.cancel` is set."""
        self.answer: Future[LookupResult] = Future()

    def cancel(self) -> None:
        """Cancel the attempts in flight."""
        attempt = self.attempt
        if attempt is not None and attempt.cancel is not None:
            attempt.cancel()

    def finish(self, result: LookupResult) -> None:
        """Answer with ``result``; vectors are copied to the request's ``out`` arrays.

        A cancelled call's arrays belong to the caller; while they are written, the call cannot be
        cancelled.
        """
        if not self.answer.set_running_or_notify_cancel():
            return
        try:
            for name, into in (self.out or {}).items():
                into[...] = result.vectors[name]
                result.vectors[name] = into
        except BaseException as error:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(result)

    def fail(self, error: BaseException) -> None:
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)
