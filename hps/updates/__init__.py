"""Updates of rows while a node serves; ``hps.updates.Producer`` sends them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hps.updates.kafka.producer import Producer

__all__ = ["Producer"]


def __getattr__(name: str) -> Any:
    # Imported on first use: a node without Kafka does not need its client.
    if name == "Producer":
        from hps.updates.kafka.producer import Producer

        return Producer
    raise AttributeError(f"module 'hps.updates' has no attribute {name!r}")
