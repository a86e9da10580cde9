"""Repeated kernel launches, which exist in the compiled core only (`hps.native.COMPILED`)."""

from __future__ import annotations

from hps.native._core import KernelLaunch, launch, order_after, wait_for_event

__all__ = ["KernelLaunch", "launch", "order_after", "wait_for_event"]
