"""Connection age: gRPC clients keep their connections, so without it they never find new servers."""

from __future__ import annotations


def connection_age_s(max_connection_age_s: float | None, drain_delay_s: float) -> float | None:
    """Return the age at which connections end; None: never.

    Clients reconnect by themselves and lose no call.

    ``max_connection_age_s`` None: half of ``drain_delay_s``, during which a stopping server still answers, so
    that all clients leave it. If that is 0, connections have no maximum age.
    """
    age_s = drain_delay_s / 2 if max_connection_age_s is None else max_connection_age_s
    return age_s or None
