"""Classes of the batch scheduler, which exist in the compiled core only (`hps.native.COMPILED`)."""

from __future__ import annotations

from hps.native._core import (
    BatchScheduler,
    ChannelClient,
    FillChunk,
    MessageLayout,
    MissFill,
    SizeClass,
    Step,
)

__all__ = [
    "BatchScheduler",
    "ChannelClient",
    "FillChunk",
    "MessageLayout",
    "MissFill",
    "SizeClass",
    "Step",
]
