"""How long connections last: gRPC's clients keep theirs, so they would never learn of another server."""

from __future__ import annotations


def age_options(
    max_connection_age_s: float | None, drain_delay_s: float, grace_s: float
) -> list[tuple[str, int]]:
    """Options of a server whose connections end after ``max_connection_age_s``, what was asked on them being
    answered for ``grace_s`` more. Clients open another by themselves, and no call is lost by it.

    None: half of ``drain_delay_s``, the time for which a stopping server still answers, so that all leave it;
    grpc has no other way to send them away before it refuses them. Where that is 0, connections last."""
    age_s = drain_delay_s / 2 if max_connection_age_s is None else max_connection_age_s
    if not age_s:
        return []
    return [
        ("grpc.max_connection_age_ms", round(1e3 * age_s)),
        ("grpc.max_connection_age_grace_ms", round(1e3 * grace_s)),
    ]
