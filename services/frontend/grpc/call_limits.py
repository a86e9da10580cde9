"""Limits of grpc's core on the calls of one connection, so that no client's calls displace another's.

The core queues the calls of a method until the server takes them. By default that queue drops calls of any
client at random beyond 1,000, and ends them with CANCELLED; a cancelled call stays queued until its turn. So
one client that makes and cancels calls faster than the server takes them ends other clients' calls, or delays
them for seconds where the queue is longer.
"""

from __future__ import annotations

# Calls of one connection in flight. Cancelled ones count until their memory is free
# (grpc.http.overload_protection, on by default). Further ones are refused unprocessed: REFUSED_STREAM, which
# clients report as UNAVAILABLE.
CALLS_PER_CONNECTION = 1024
# Calls per method that the core queues before it drops any: enough for 16 connections at their limit.
_QUEUED = 16 * CALLS_PER_CONNECTION


def call_options() -> list[tuple[str, int]]:
    """Server options for the limits. No public header of grpc names those of the queue."""
    return [
        ("grpc.max_concurrent_streams", CALLS_PER_CONNECTION),
        ("grpc.server.max_pending_requests", _QUEUED),
        ("grpc.server.max_pending_requests_hard_limit", _QUEUED),
    ]
