"""A gRPC channel to a lookup node, kept open."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import grpc

from hps.lookup.remote.addresses import NodeAddress
from hps.lookup.remote.unary_method import UnaryMethod
from hps.v1 import lookup_pb2 as pb

_SERVICE, _WATCH = "hps.v1.Lookup", "/grpc.health.v1.Health/Watch"
OPTIONS: dict[str, int] = {
    "grpc.max_receive_message_length": -1,
    "grpc.max_send_message_length": -1,
    # A node that restarts, also at another address, must get lookups again within a second.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
    "grpc.dns_min_time_between_resolutions_ms": 1000,
    # Despite its name, the longest time of a connection attempt.
    "grpc.min_reconnect_backoff_ms": 5000,
    # Close a connection that receives nothing, as after a network partition: the kernel would keep it for a
    # quarter of an hour. Nodes permit these pings (`services.frontend.grpc.listener`).
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5000,
    # The same for gRPC's own pings, which measure bandwidth: while one is in flight, no keepalive ping is
    # sent. If both were lost, the connection would be kept for a minute.
    "grpc.http2.ping_timeout_ms": 5000,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.per_message_compression": 0,  # vectors do not compress
    # One connection per channel, even if several have the same address.
    "grpc.use_local_subchannel_pool": 1,
    # Nodes are in the same network; the environment's proxy is for remote hosts.
    "grpc.enable_http_proxy": 0,
}


class NodeChannel:
    """A gRPC channel with its methods. Thread-safe; raises ValueError after ``close``.

    ``lookup`` is `UnaryMethod.start`; ``describe`` and ``serving`` are gRPC's callables."""

    def __init__(self, at: NodeAddress, credentials: grpc.ChannelCredentials | None) -> None:
        """``credentials`` None: plain text."""
        options: list[tuple[str, Any]] = [*OPTIONS.items()]
        if at.name is not None:
            options.append(("grpc.default_authority", at.name))
        if credentials is None:
            self._channel = grpc.insecure_channel(at.address, options)
        else:
            if at.name is not None:
                options.append(("grpc.ssl_target_name_override", at.name))
            self._channel = grpc.secure_channel(at.address, credentials, options)
        self.lookup = UnaryMethod(
            self._channel, f"/{_SERVICE}/Lookup", pb.LookupResponse.FromString
        ).start
        self.describe = self._channel.unary_unary(
            f"/{_SERVICE}/Describe",
            pb.DescribeRequest.SerializeToString,
            pb.DescribeResponse.FromString,
        )
        self.serving = self._channel.unary_unary(
            f"/{_SERVICE}/Serving",
            pb.ServingRequest.SerializeToString,
            pb.ServingResponse.FromString,
        )
        self._watch = self._channel.unary_stream(_WATCH)
        self._watching: Any = None

    def keep_thread(self) -> None:
        """Keep one call in flight, so that gRPC keeps its thread.

        Without any call, gRPC starts a thread per call, which costs as much as a lookup."""
        if self._watching is None or self._watching.done():
            with suppress(ValueError):  # closed
                self._watching = self._watch(b"")

    @property
    def keeps_thread(self) -> bool:
        return self._watching is not None

    def close(self) -> None:
        self._channel.close()
