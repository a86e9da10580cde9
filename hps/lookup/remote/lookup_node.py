"""A lookup node: its channel and its last known state."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import grpc

from hps.lookup.remote.addresses import NodeAddress
from hps.lookup.remote.connection import NodeChannel
from hps.lookup.remote.unary_method import Cancel, OnDone
from hps.v1 import lookup_pb2 as pb

Standing = Literal["ready", "not ready", "unreachable"]
LATE_S = 5.0
"""Seconds for which a ready node still counts as serving after one of its polls timed out."""


class ClientTls(NamedTuple):
    """TLS files of a client, as PEM. Without ``roots``: the system's."""

    roots: bytes | None = None
    key: bytes | None = None
    chain: bytes | None = None


class ServedVersion(NamedTuple):
    """A model version at a node: the digest of its description, and whether it has been replaced.

    A replaced version is served for a short time only.
    """

    digest: int
    former: bool
    beside: bool = False
    """Served by its number and ``labels``, beside the current version."""
    labels: tuple[str, ...] = ()
    traffic: str = ""
    """The model's traffic rule as JSON, of its current version; empty: none."""


def short_error(details: str) -> str:
    """Return the message of a failed call; shortens gRPC's for a refused connection."""
    if details.startswith("failed to connect to all addresses"):
        return details.rpartition(": ")[2]
    return details


class LookupNode:
    """One node, with its number of lookups ``in_flight``. Thread-safe.

    One thread (`NodeRegistry`) writes its state; all read it.
    """

    def __init__(
        self,
        at: NodeAddress,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Callable[[], Sequence[tuple[str, str]]] = tuple,
    ) -> None:
        """``metadata`` is sent with every call."""
        self.address, self.name = at
        self.in_flight = 0
        self.standing: Standing = "unreachable"
        self.problem = "not polled yet"
        """Reason why the node is not ready; empty if it is."""
        self._late_until = 0.0
        self.models: Mapping[tuple[str, int], ServedVersion] = {}
        """Served versions by model and version, as the node last reported them."""
        self.answers: Counter[str] = Counter()
        """Number of lookups sent to the node, by the name of their gRPC status."""
        self.retries = 0
        """Number of lookups retried on another node because this one failed."""
        self._lock = threading.Lock()
        self._at, self._metadata = at, metadata
        self._connection = NodeChannel(at, credentials)

    def connect(self, credentials: grpc.ChannelCredentials | None) -> NodeChannel:
        """Open a new channel with ``credentials``; return the old one.

        The caller closes that after its last call."""
        former, self._connection = self._connection, NodeChannel(self._at, credentials)
        return former

    def start(
        self, message: bytes, timeout_s: float, headers: Mapping[str, str] | None, on_done: OnDone
    ) -> Cancel:
        """Start a lookup with the trace ``headers``; return the function that cancels it.

        ``on_done`` gets the outcome on a thread of gRPC: a ``LookupResponse`` on success. Raises ValueError
        after ``close``.
        """
        metadata = self._metadata()
        if headers:
            metadata = (*metadata, *headers.items())
        with self._lock:
            self.in_flight += 1

        def ended(code: grpc.StatusCode, details: str, response: Any) -> None:
            with self._lock:
                self.in_flight -= 1
                self.answers[code.name] += 1
            on_done(code, details, response)

        try:
            return self._connection.lookup(message, timeout_s, metadata, ended)
        except BaseException:
            with self._lock:
                self.in_flight -= 1
            raise

    def count_retry(self) -> None:
        """Count a lookup that was retried on another node because this one failed."""
        with self._lock:
            self.retries += 1

    def describe(self, model: str, version: int, timeout_s: float) -> Any:
        """Return the node's ``DescribeResponse``; raises ``grpc.RpcError``."""
        request = pb.DescribeRequest(model=model, version=version)
        return self._connection.describe(
            request, timeout=timeout_s, metadata=tuple(self._metadata())
        )

    def start_poll(self, timeout_s: float) -> Any:
        """Start a poll of the node's state; returns gRPC's future, to be passed to `finish_poll` when done.

        Raises ValueError after ``close``.
        """
        metadata = tuple(self._metadata())
        serving = self._connection.serving
        return serving.future(pb.ServingRequest(), timeout=timeout_s, metadata=metadata)

    def finish_poll(self, poll: Any) -> bool:
        """Store the result of a poll; return True if anything has changed."""
        before = self.standing, self.problem, self.models
        code = poll.code()
        if code is not grpc.StatusCode.DEADLINE_EXCEEDED:
            self._late_until = 0.0
        elif self.standing == "ready":
            self._late_until = time.monotonic() + LATE_S
        if code is grpc.StatusCode.OK:
            status = poll.result()
            self.models = {
                (each.model, each.version): ServedVersion(
                    each.digest, each.former, each.beside, tuple(each.labels), each.traffic
                )
                for each in status.models
            }
            self.standing = "ready" if status.ready else "not ready"
            self.problem = "" if status.ready else "it is starting or shutting down"
            self._connection.keep_thread()
        else:
            # The last known versions are kept: this process may be the slow one.
            self.standing = "unreachable"
            self.problem = f"{code.name}: {short_error(poll.details() or '')}"
        return before != (self.standing, self.problem, self.models)

    @property
    def may_serve(self) -> bool:
        """True if the node is ready, or was a moment ago and is only late.

        If this process is delayed, all nodes look late at the same time; that must not make them
        unavailable.
        """
        return self.standing == "ready" or time.monotonic() < self._late_until

    def mark_not_served(self, model: str, version: int) -> None:
        """Record that the node no longer serves the version, until it reports it again."""
        self.models = {of: each for of, each in self.models.items() if of != (model, version)}

    def close(self) -> None:
        self._connection.close()
