"""Everything that changes rows while the node serves; ``hps.updates.Producer`` sends them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hps.updates.kafka.producer import Producer

__all__ = ["Producer"]


def __getattr__(name: str) -> Any:
    # Kafka's client is imported when it is asked for: a node without Kafka does without it.
    if name == "Producer":
        from hps.updates.kafka.producer import Producer

        return Producer
    raise AttributeError(f"module 'hps.updates' has no attribute {name!r}")
