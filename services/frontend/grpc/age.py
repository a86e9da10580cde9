"""How long connections last: gRPC's clients keep theirs, so they would never learn of another server."""

from __future__ import annotations


def age_options(max_connection_age_s: float | None, grace_s: float) -> list[tuple[str, int]]:
    """Options of a server whose connections end after ``max_connection_age_s``, what was asked on them being
    answered for ``grace_s`` more. Clients open another by themselves, and no call is lost by it."""
    if max_connection_age_s is None:
        return []
    return [
        ("grpc.max_connection_age_ms", round(1e3 * max_connection_age_s)),
        ("grpc.max_connection_age_grace_ms", round(1e3 * grace_s)),
    ]
