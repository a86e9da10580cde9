"""The lookup nodes that are asked: a channel to each, kept open."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import grpc

from hps.errors import TierError
from hps.v1 import lookup_pb2 as pb

_SERVICE = "hps.v1.Lookup"
_ASK_S = 1.0
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A node that is back is to be asked again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # One connection each, even where several are of one address.
    ("grpc.use_local_subchannel_pool", 1),
]


class Certificates(NamedTuple):
    """What TLS takes, as PEM. Without ``roots``: the system's."""

    roots: bytes | None = None
    key: bytes | None = None
    chain: bytes | None = None


class Target:
    """One node. ``in_flight`` lookups are under way there. Any thread may call it."""

    def __init__(
        self,
        address: str,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.address = address
        self.in_flight = 0
        self._lock = threading.Lock()
        self._metadata = tuple(metadata)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, _OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, _OPTIONS)
        self._lookup = self._channel.unary_unary(
            f"/{_SERVICE}/Lookup", response_deserializer=pb.LookupResponse.FromString
        )
        self._describe = self._channel.unary_unary(
            f"/{_SERVICE}/Describe",
            pb.DescribeRequest.SerializeToString,
            pb.DescribeResponse.FromString,
        )

    def start(
        self, message: bytes, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Any:
        """A lookup begun, told of its trace by ``headers``; gRPC's future of a ``LookupResponse``. ValueError
        after ``close``."""
        metadata = (*self._metadata, *(headers or {}).items())
        asked = self._lookup.future(message, timeout=timeout_s, metadata=metadata)
        with self._lock:
            self.in_flight += 1
        asked.add_done_callback(self._ended)
        return asked

    def _ended(self, _asked: Any) -> None:
        with self._lock:
            self.in_flight -= 1

    def describe(self, model: str, version: int, timeout_s: float) -> Any:
        """The node's ``DescribeResponse``; raises ``grpc.RpcError``."""
        request = pb.DescribeRequest(model=model, version=version)
        return self._describe(request, timeout=timeout_s, metadata=self._metadata)

    def close(self) -> None:
        self._channel.close()


class Targets:
    """All of them, for the lookups of several models. ``close`` once nobody asks any more."""

    def __init__(
        self,
        addresses: Sequence[str],
        certificates: Certificates | None = None,
        api_key: str | None = None,
    ) -> None:
        """Without ``certificates`` plain text is spoken."""
        credentials = None
        if certificates is not None:
            credentials = grpc.ssl_channel_credentials(*certificates)
        metadata = [] if api_key is None else [("x-api-key", api_key)]
        self.all = [Target(address, credentials, metadata) for address in addresses]

    def version_of(self, model: str) -> int:
        """The version that the first node which answers serves. Raises ``TierError`` when none does."""
        problems = []
        for target in self.all:
            try:
                return int(target.describe(model, 0, _ASK_S).version)
            except grpc.RpcError as error:
                problems.append(f"{target.address}: {error.code().name}: {error.details()}")
        raise TierError("remote", f"no node tells of model '{model}': {'; '.join(problems)}")

    def close(self) -> None:
        for target in self.all:
            target.close()
