"""A remote lookup in progress."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from hps.lookup.remote.lookup_codec import LookupRequestTemplate
from hps.lookup.remote.lookup_node import LookupNode
from hps.lookup.remote.unary_method import Cancel
from hps.tracing import RequestContext
from hps.types import LookupResult, VectorArray


@dataclass(slots=True, eq=False)
class LookupAttempt:
    """One attempt at one node, started at an instant of ``time.monotonic()``.

    ``is_last``: no other node may be tried after it. ``cancel`` ends the attempt; None until it has
    started."""

    target: LookupNode
    started: float
    is_last: bool
    cancel: Cancel | None = None


@dataclass(slots=True, eq=False)
class RemoteLookupCall:
    """A remote lookup in progress.

    ``headers``: its trace; ``profile``: the request profile, if there is one; ``tried``: the nodes it was
    sent to; ``all_failed_since``: when all nodes had failed for the first time (``time.monotonic()``)."""

    template: LookupRequestTemplate
    message: bytes
    started: float
    deadline: float
    out: Mapping[str, VectorArray] | None
    headers: Mapping[str, str] | None
    profile: RequestContext | None = None
    tried: list[LookupNode] = field(default_factory=list)
    failure: str = ""
    all_failed_since: float | None = None
    attempt: LookupAttempt | None = None
    """The latest attempt. Set before its call starts: the call may fail, and the next attempt start on
    another thread, before `LookupAttempt.cancel` is set."""
    answer: Future[LookupResult] = field(default_factory=Future)

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
