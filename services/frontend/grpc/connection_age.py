"""Connection age: gRPC clients keep their connections, so without it they never find new servers."""

from __future__ import annotations


def age_options(
    max_connection_age_s: float | None, drain_delay_s: float, grace_s: float
) -> list[tuple[str, int]]:
    """Return server options that end connections after ``max_connection_age_s``.

    Calls in flight have ``grace_s`` more. Clients reconnect by themselves and lose no call.

    ``max_connection_age_s`` None: half of ``drain_delay_s``, during which a stopping server still answers, so
    that all clients leave it; grpc has no other way to send them away before it refuses them. If that is 0,
    connections have no maximum age.
    """
    age_s = drain_delay_s / 2 if max_connection_age_s is None else max_connection_age_s
    if not age_s:
        return []
    return [
        ("grpc.max_connection_age_ms", round(1e3 * age_s)),
        ("grpc.max_connection_age_grace_ms", round(1e3 * grace_s)),
    ]
