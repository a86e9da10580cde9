"""An inference request with a cached head, while its body arrives in pieces."""

from __future__ import annotations

from time import perf_counter_ns

from services.frontend.admission.byte_budget import ByteBudget, ByteReservation
from services.frontend.http.head import RequestHead
from services.frontend.http.inference import HttpInference


class ArrivingRequest:
    """The pieces received so far of a request that has entered. Runs on one event loop.

    ``missing``: the bytes of the body still to arrive, at least one. The bytes received are reserved in the
    byte budget. It ends with one of `begin`, `give_back` and `leave`.
    """

    __slots__ = ("_inference", "_pieces", "_reservation", "_text", "head", "missing")

    def __init__(
        self,
        inference: HttpInference,
        head: RequestHead,
        text: bytes,
        body_size: int,
        budget: ByteBudget,
    ) -> None:
        """``text``: the bytes of the ``head``."""
        self.head = head
        self._inference = inference
        self._text = text
        self._pieces: list[bytes | memoryview] = []
        self._reservation = ByteReservation(budget)
        self.missing = body_size

    def add(self, piece: bytes | memoryview) -> None:
        """Add bytes of the body, fewer than ``missing``. Raises ``Overloaded``: they cannot be reserved."""
        self._pieces.append(piece)
        self.missing -= len(piece)
        self._reservation.grow(len(piece))

    def begin(self, last: bytes) -> HttpInference:
        """Begin the request with its last ``missing`` bytes.

        If that raises, the request has had no effect, and `give_back` returns all its bytes."""
        self._pieces.append(last)
        self._reservation.release()
        inference = self._inference
        inference.started = perf_counter_ns()  # leaves out the time for which the client sent
        body = b"".join(self._pieces)  # the only copy
        try:
            inference.begin(body)
        except BaseException:
            inference.undo()
            raise
        return inference

    def give_back(self) -> bytes:
        """Undo the request's effects; return its head and the bytes of its body received so far."""
        self._reservation.release()
        self._inference.undo()
        return b"".join((self._text, *self._pieces))

    def leave(self) -> None:
        """End the request: the client is gone."""
        self._reservation.release()
        self._inference.leave()
