"""A lookup node: the connection to it, and what is known of it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import grpc

from hps.lookup.remote.addresses import NodeAddress
from hps.lookup.remote.connection import NodeChannel
from hps.lookup.remote.unary_method import Cancel, Told
from hps.v1 import lookup_pb2 as pb

Standing = Literal["ready", "not ready", "unreachable"]
LATE_S = 5.0
"""For how long a node that has not answered in time, and was ready before, counts as one that serves."""


class ClientTls(NamedTuple):
    """What TLS takes, as PEM. Without ``roots``: the system's."""

    roots: bytes | None = None
    key: bytes | None = None
    chain: bytes | None = None


class ServedVersion(NamedTuple):
    """A version of a model at a node: the digest of what it tells of it, and whether another one has taken
    its place, so that it will not be answered for much longer."""

    digest: int
    former: bool


def short_error(details: str) -> str:
    """What a call that failed says; gRPC takes many words to say that nobody listens."""
    if details.startswith("failed to connect to all addresses"):
        return details.rpartition(": ")[2]
    return details


class LookupNode:
    """One node. ``in_flight`` lookups are under way there. Any thread may call it; what is known of it is
    written by one (`Nodes`), and read by all."""

    def __init__(
        self,
        at: NodeAddress,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Callable[[], Sequence[tuple[str, str]]] = tuple,
    ) -> None:
        """``metadata`` goes with every call."""
        self.address, self.name = at
        self.in_flight = 0
        self.standing: Standing = "unreachable"
        self.problem = "not asked yet"
        """Why it is not ready."""
        self._late_until = 0.0
        self.models: Mapping[tuple[str, int], ServedVersion] = {}
        """What it serves, by model and version, as it said last."""
        self.answers: Counter[str] = Counter()
        """Lookups it was asked, by how they ended: gRPC's name of the status."""
        self.retries = 0
        """Lookups that were sent to another node because this one failed."""
        self._lock = threading.Lock()
        self._at, self._metadata = at, metadata
        self._connection = NodeChannel(at, credentials)

    def connect(self, credentials: grpc.ChannelCredentials | None) -> NodeChannel:
        """Have a new connection, with other ``credentials``; the former one, which is to be closed when its
        calls have ended."""
        former, self._connection = self._connection, NodeChannel(self._at, credentials)
        return former

    def start(
        self, message: bytes, timeout_s: float, headers: Mapping[str, str] | None, told: Told
    ) -> Cancel:
        """Begin a lookup, told of its trace by ``headers``; ``told`` gets what comes of it, on a thread of
        gRPC's, a ``LookupResponse`` if all is well. Returns what cancels it. ValueError after ``close``."""
        metadata = self._metadata()
        if headers:
            metadata = (*metadata, *headers.items())
        with self._lock:
            self.in_flight += 1

        def ended(code: grpc.StatusCode, details: str, response: Any) -> None:
            with self._lock:
                self.in_flight -= 1
                self.answers[code.name] += 1
            told(code, details, response)

        try:
            return self._connection.lookup(message, timeout_s, metadata, ended)
        except BaseException:
            with self._lock:
                self.in_flight -= 1
            raise

    def passed_over(self) -> None:
        """A lookup goes to another node because this one failed."""
        with self._lock:
            self.retries += 1

    def describe(self, model: str, version: int, timeout_s: float) -> Any:
        """The node's ``DescribeResponse``; raises ``grpc.RpcError``."""
        request = pb.DescribeRequest(model=model, version=version)
        return self._connection.describe(
            request, timeout=timeout_s, metadata=tuple(self._metadata())
        )

    def look(self, timeout_s: float) -> Any:
        """Begin to ask what it serves; gRPC's future, to be given to `looked` when it is done. ValueError
        after ``close``."""
        metadata = tuple(self._metadata())
        serving = self._connection.serving
        return serving.future(pb.ServingRequest(), timeout=timeout_s, metadata=metadata)

    def looked(self, asked: Any) -> bool:
        """Note what `look` found; whether anything has changed."""
        before = self.standing, self.problem, self.models
        code = asked.code()
        if code is not grpc.StatusCode.DEADLINE_EXCEEDED:
            self._late_until = 0.0
        elif self.standing == "ready":
            self._late_until = time.monotonic() + LATE_S
        if code is grpc.StatusCode.OK:
            told = asked.result()
            self.models = {
                (each.model, each.version): ServedVersion(each.digest, each.former)
                for each in told.models
            }
            self.standing = "ready" if told.ready else "not ready"
            self.problem = "" if told.ready else "it is starting or shutting down"
            self._connection.keep_thread()
        else:
            # What it served last stays known: it may be this process that is slow.
            self.standing = "unreachable"
            self.problem = f"{code.name}: {short_error(asked.details() or '')}"
        return before != (self.standing, self.problem, self.models)

    @property
    def may_serve(self) -> bool:
        """Whether it is ready, or was a moment ago and is only late: so are all nodes at once when it is this
        process that is held up, which is no reason to say that it can't answer."""
        return self.standing == "ready" or time.monotonic() < self._late_until

    def lacks(self, model: str, version: int) -> None:
        """It does not serve that any more: not to be asked for it until it says otherwise."""
        self.models = {of: each for of, each in self.models.items() if of != (model, version)}

    def close(self) -> None:
        self._connection.close()
