"""What a thread does while others work at the answer of its call: wait, no longer than the client does."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError, Future
from typing import Any

import grpc

from hps.errors import DeadlineExceeded, Unavailable

_LONGEST_S = 86_400.0  # threads cannot wait for any length of time


class Cancelling:
    """Cancels what a call waits for when its client is gone. One for each call: grpc keeps what it is to call
    until the call's end, which of a stream may be far away."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._future: Future[Any] | None = None
        self._gone = not context.add_callback(self._cancel)

    def _cancel(self) -> None:
        self._gone = True
        if (future := self._future) is not None:
            future.cancel()

    def watch(self, future: Future[Any] | None) -> None:
        """Wait for ``future`` from now on."""
        self._future = future
        if self._gone and future is not None:
            future.cancel()


def deadline_of(context: grpc.ServicerContext, allowed_s: float) -> float:
    """An instant of ``time.monotonic``: the client's deadline, and no later than ``allowed_s`` from now."""
    remaining_s = context.time_remaining()
    if remaining_s is not None and remaining_s < allowed_s:
        allowed_s = remaining_s
    return time.monotonic() + allowed_s


def wait_for(future: Future[Any], deadline: float, cancelling: Cancelling) -> None:
    """Until ``future`` is done; it is cancelled when its time is up or its client gone."""
    cancelling.watch(future)
    try:
        future.exception(min(max(0.0, deadline - time.monotonic()), _LONGEST_S))
    except TimeoutError:
        future.cancel()
        raise DeadlineExceeded(
            "no answer within the request's time; a later deadline, parameter 'timeout' (microseconds) or "
            "server.request_timeout_ms allow more"
        ) from None
    except CancelledError:
        raise Unavailable("the request was cancelled") from None
    finally:
        cancelling.watch(None)
