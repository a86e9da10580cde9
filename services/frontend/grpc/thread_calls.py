"""Unary calls on grpc's thread pools, through its public interface."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc

from services.frontend.grpc.method_handlers import UnaryHandler

_THREADS = 32


class ThreadPoolCalls:
    """Runs each inference call on a thread until it is answered, where `CallAcceptor` is unsupported.

    It costs more CPU per call, and up to `_THREADS` calls run at a time.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "grpc-calls")

    def start(self, server: grpc.Server, methods: Mapping[str, UnaryHandler]) -> None:
        """Start ``server``, whose unary methods are ``methods`` by their full names."""
        for handler in methods.values():
            if not handler.is_auxiliary:
                handler.experimental_thread_pool = self._threads
        server.start()

    def shutdown(self) -> None:
        """Cancel calls that have no thread yet."""
        self._threads.shutdown(wait=False, cancel_futures=True)
