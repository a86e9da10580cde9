"""Probe of grpc's private interface: do calls that are accepted from its core get their answers?"""

from __future__ import annotations

import functools
import logging

import grpc

from hps.errors import Unavailable
from services.frontend.grpc.method_handlers import UnaryHandler
from services.frontend.grpc.responders import UnaryResponder

log = logging.getLogger(__name__)

_METHOD, _TIMEOUT_S = "Call", 5.0


@functools.cache
def is_supported() -> bool:
    """Check that this grpc's private interface works as `CallAcceptor` uses it. Tried once per process, by
    two calls to a server on a loopback port; logs a warning if not."""
    try:
        works = _answers_calls()
    except Exception as error:  # a name that is missing, a call that fails or times out
        works, reason = False, repr(error)
    else:
        reason = "wrong answer"
    if not works:
        log.warning(
            "unsupported grpcio %s internals (%s); using one thread per call",
            grpc.__version__,
            reason,
        )
    return works


def _answers_calls() -> bool:
    """Make a call that succeeds and one that fails."""
    from services.frontend.grpc.core.call_acceptor import (
        CallAcceptor,
    )  # raises if a name is missing

    server = grpc.server(None, options=[("grpc.so_reuseport", 0)])
    handler = UnaryHandler(_echo)
    handlers = {_METHOD: grpc.unary_unary_rpc_method_handler(handler)}
    server.add_registered_method_handlers("hps.Probe", handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    acceptor = CallAcceptor(2, 2)
    try:
        acceptor.start(server, {f"/hps.Probe/{_METHOD}": handler})
        options = [("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            call = channel.unary_unary(f"/hps.Probe/{_METHOD}")
            echoed: bytes = call(b"probe", timeout=_TIMEOUT_S)
            failure = call.future(b"", timeout=_TIMEOUT_S)
            return echoed == b"probe" and failure.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        server.stop(0)  # None would wait for a server whose thread has ended
        acceptor.shutdown()


def _echo(message: bytes, reply: UnaryResponder) -> None:
    if message:
        reply.answer(message)
    else:
        reply.fail(Unavailable("probe"))
