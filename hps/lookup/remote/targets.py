"""A lookup node: a channel to it, kept open, and what is known of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import grpc

from hps.lookup.remote.addresses import Address
from hps.v1 import lookup_pb2 as pb

_SERVICE, _WATCH = "hps.v1.Lookup", "/grpc.health.v1.Health/Watch"
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A node that is back is to be asked again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # How long an attempt to connect may take, in spite of its name.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # One connection each, even where several are of one address.
    ("grpc.use_local_subchannel_pool", 1),
]

Standing = Literal["ready", "not ready", "unreachable"]


class Certificates(NamedTuple):
    """What TLS takes, as PEM. Without ``roots``: the system's."""

    roots: bytes | None = None
    key: bytes | None = None
    chain: bytes | None = None


class Served(NamedTuple):
    """A version of a model at a node: the digest of what it tells of it, and whether another one has taken
    its place, so that it will not be answered for much longer."""

    digest: int
    former: bool


def details_of(asked: Any) -> str:
    """What a call that failed says; gRPC takes many words to say that nobody listens."""
    details = asked.details() or ""
    if details.startswith("failed to connect to all addresses"):
        return str(details.rpartition(": ")[2])
    return str(details)


class Target:
    """One node. ``in_flight`` lookups are under way there. Any thread may call it; what is known of it is
    written by one (`Nodes`), and read by all."""

    def __init__(
        self,
        at: Address,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Callable[[], Sequence[tuple[str, str]]] = tuple,
    ) -> None:
        """``metadata`` goes with every call."""
        self.address, self.name = at
        self.in_flight = 0
        self.standing: Standing = "unreachable"
        self.problem = "not asked yet"
        """Why it is not ready."""
        self.models: Mapping[tuple[str, int], Served] = {}
        """What it serves, by model and version, as it said last."""
        self.answers: Counter[str] = Counter()
        """Lookups it was asked, by how they ended: gRPC's name of the status."""
        self.retries = 0
        """Lookups that were sent to another node because this one failed."""
        self._lock = threading.Lock()
        self._metadata = metadata
        options = list(_OPTIONS)
        if self.name is not None:
            options.append(("grpc.default_authority", self.name))
        if credentials is None:
            self._channel = grpc.insecure_channel(self.address, options)
        else:
            if self.name is not None:
                options.append(("grpc.ssl_target_name_override", self.name))
            self._channel = grpc.secure_channel(self.address, credentials, options)
        self._lookup = self._channel.unary_unary(
            f"/{_SERVICE}/Lookup", response_deserializer=pb.LookupResponse.FromString
        )
        self._describe = self._channel.unary_unary(
            f"/{_SERVICE}/Describe",
            pb.DescribeRequest.SerializeToString,
            pb.DescribeResponse.FromString,
        )
        self._watch = self._channel.unary_stream(_WATCH)
        self._watching: Any = None
        self._serving = self._channel.unary_unary(
            f"/{_SERVICE}/Serving",
            pb.ServingRequest.SerializeToString,
            pb.ServingResponse.FromString,
        )

    def start(
        self, message: bytes, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Any:
        """A lookup begun, told of its trace by ``headers``; gRPC's future of a ``LookupResponse``. ValueError
        after ``close``."""
        metadata = (*self._metadata(), *(headers or {}).items())
        asked = self._lookup.future(message, timeout=timeout_s, metadata=metadata)
        with self._lock:
            self.in_flight += 1
        asked.add_done_callback(self._ended)
        return asked

    def _ended(self, asked: Any) -> None:
        code = asked.code().name
        with self._lock:
            self.in_flight -= 1
            self.answers[code] += 1

    def passed_over(self) -> None:
        """A lookup goes to another node because this one failed."""
        with self._lock:
            self.retries += 1

    def describe(self, model: str, version: int, timeout_s: float) -> Any:
        """The node's ``DescribeResponse``; raises ``grpc.RpcError``."""
        request = pb.DescribeRequest(model=model, version=version)
        return self._describe(request, timeout=timeout_s, metadata=tuple(self._metadata()))

    def look(self, timeout_s: float) -> Any:
        """Begin to ask what it serves; gRPC's future, to be given to `looked` when it is done. ValueError
        after ``close``."""
        metadata = tuple(self._metadata())
        return self._serving.future(pb.ServingRequest(), timeout=timeout_s, metadata=metadata)

    def looked(self, asked: Any) -> bool:
        """Note what `look` found; whether anything has changed."""
        before = self.standing, self.problem, self.models
        if asked.code() is grpc.StatusCode.OK:
            told = asked.result()
            self.models = {
                (each.model, each.version): Served(each.digest, each.former) for each in told.models
            }
            self.standing = "ready" if told.ready else "not ready"
            self.problem = "" if told.ready else "it is starting or shutting down"
            self._keep_thread()
        else:
            # What it served last stays known: it may be this process that is slow.
            self.standing = "unreachable"
            self.problem = f"{asked.code().name}: {details_of(asked)}"
        return before != (self.standing, self.problem, self.models)

    def _keep_thread(self) -> None:
        """Have a call under way: where none is, gRPC begins a thread for each that comes, which costs as much
        as a lookup does."""
        if self._watching is None or self._watching.done():
            with suppress(ValueError):  # closed
                self._watching = self._watch(b"")

    def lacks(self, model: str, version: int) -> None:
        """It does not serve that any more: not to be asked for it until it says otherwise."""
        self.models = {of: each for of, each in self.models.items() if of != (model, version)}

    def close(self) -> None:
        self._channel.close()
