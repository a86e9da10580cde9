"""Repeated kernel launches, which exist in the compiled core only (`hps.native.COMPILED`)."""

from __future__ import annotations

from hps.native._core import (
    FetchLaunch,
    PlaceLaunch,
    hold_back,
    order_after,
    waited_ns,
)

__all__ = ["FetchLaunch", "PlaceLaunch", "hold_back", "order_after", "waited_ns"]
