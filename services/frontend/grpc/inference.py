"""One gRPC inference request: its caller, its answer and its failure."""

from __future__ import annotations

from abc import abstractmethod
from concurrent.futures import Future
from typing import Any

from hps.tracing import RequestContext
from services.frontend.grpc.call_identity import address_of, sent_identity
from services.frontend.grpc.responders import UnaryResponder
from services.frontend.inference import Inference, InferencePort


class GrpcInference(Inference):
    """A request that is answered through ``reply``."""

    __slots__ = ("reply",)

    def __init__(self, port: InferencePort, reply: UnaryResponder) -> None:
        super().__init__(port)
        self.reply = reply

    def identify(self) -> RequestContext:
        return sent_identity(self.reply.context)

    def address(self) -> str:
        return address_of(self.reply.context)

    def remaining_s(self) -> float | None:
        return self.reply.context.time_remaining()

    @abstractmethod
    def answer(self, future: Future[Any]) -> bytes:
        """Encode and count the answer with the result of ``future``."""

    def reject(self, error: BaseException) -> None:
        """Answer with a failure."""
        self.reply.fail(self.fail(error))

    def wait(self) -> None:
        """Answer the submitted request when its result is ready or its deadline has passed.

        The work is cancelled when the client is gone.
        """
        future = self.future
        if not future.done():
            self.reply.waits_for(future)
        self.port.state.pending.add(future, self.deadline, self._end)

    def _end(self, future: Future[Any]) -> None:
        failure = future.exception()  # raising it would make a reference cycle
        if failure is not None:
            self.reject(failure)
            return
        try:
            message = self.answer(future)
        except Exception as error:
            self.reject(error)
        else:
            self.reply.answer(message)
