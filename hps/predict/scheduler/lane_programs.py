"""Lane programs: what a lane of the batch scheduler runs, prepared once per batch size.

A batch copies its keys and dense inputs to the device, pools the rows straight into the network's inputs,
runs the network, which was recorded as a CUDA graph, and copies the outputs back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hps.dense.lanes import LaneBinding, NetworkLane, address
from hps.lookup.base import Feature
from hps.lookup.gpu.miss_fill import DeviceBags, prepared_pooling
from hps.predict.scheduler.columns import ModelColumns
from hps.predict.scheduler.lane_fill import LaneFill, LaneFillMemory, LaneTables

BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Batch sizes that are prepared: between two of them a batch is padded, by half of its size at most."""


class _BatchProgram:
    """A lane's work for one batch size."""

    def __init__(self, programs: LanePrograms, batch: int) -> None:
        lane, columns = programs.lane, programs.columns
        names = tuple(column.name for column in columns.outputs)
        self.batch = batch
        self.binding: LaneBinding = lane.binding_for(batch, names)
        self.bags: list[DeviceBags] = []
        assigned: list[tuple[Any, Any]] = []
        for (feature, tensor), hotness in zip(programs.feeds, columns.hotness, strict=True):
            self.bags.append(_bags(lane, self.binding, feature, tensor, (batch, hotness), assigned))
        self._pooled = prepared_pooling(programs.tables.cache, self.bags)
        self._network = self.binding.prepare(assigned)
        self._tables = programs.tables
        self._fill_memory = programs.fill_memory(self.bags)
        self._fill: LaneFill | None = None

    def size_class(self, columns: ModelColumns) -> Any:
        """Return the native description."""
        from hps.native.scheduler import SizeClass

        binding, stream = self.binding, self.binding.lane.stream
        sent, received = binding.host_addresses()
        inputs = [*map(address, self._pooled.keys), *(sent[c.name] for c in columns.inputs)]
        steps, missing = self._pooled.steps(stream)
        sends, after = binding.send_steps(), [*self._network, *binding.receive_steps()]
        keys_at = inputs[: len(self.bags)]
        fill = LaneFill(self._tables, self.batch, self.bags, keys_at, self._fill_memory)
        self._fill = fill  # keeps the memory that the native one uses
        return SizeClass.make(
            batch=self.batch,
            inputs=inputs,
            outputs=[received[column.name] for column in columns.outputs],
            missing_keys=missing,
            steps=[*sends, *steps, *after],
            fill=fill.native(sends, after),
        )


class LanePrograms:
    """The work of one lane, for all batch sizes. One thread at a time.

    ``feeds``: each feature and the network's input that takes its vectors."""

    def __init__(
        self,
        lane: NetworkLane,
        columns: ModelColumns,
        feeds: Sequence[tuple[Feature, str]],
        tables: LaneTables,
    ) -> None:
        self.lane = lane
        self.columns = columns
        self.feeds = tuple(feeds)
        self.tables = tables
        self.stream: int = lane.stream.ptr
        self._fill_memory: LaneFillMemory | None = None
        with lane.space.device:
            self.context: int = lane.space.context
            # The largest first: it allocates the memory that all share.
            programs = [_BatchProgram(self, batch) for batch in reversed(BATCHES)]
        self._programs = programs[::-1]

    def size_classes(self) -> list[Any]:
        """See `hps.predict.scheduler.host.Lane`."""
        return [program.size_class(self.columns) for program in self._programs]

    def fill_memory(self, bags: Sequence[DeviceBags]) -> LaneFillMemory:
        """Return the memory for missing rows, which the first, the largest batch size makes."""
        if self._fill_memory is None:
            self._fill_memory = LaneFillMemory.make(self.lane.space, bags)
        return self._fill_memory


def _bags(
    lane: NetworkLane,
    binding: LaneBinding,
    feature: Feature,
    tensor: str,
    size: tuple[int, int],
    assigned: list[tuple[Any, Any]],
) -> DeviceBags:
    """Return where a feature's vectors go: the network's own input, or an array that is assigned to it.

    ``size``: batch and keys per sample."""
    batch, hotness = size
    n, feed = batch * hotness, binding.feeds[tensor]
    unpooled = feature.pooling == "none"
    shape = (n if unpooled else batch, feature.table.dim)
    out = feed.reshape(-1, feature.table.dim)
    if out.shape != shape or out.dtype != feature.table.dtype:
        out = lane.space.empty(shape, feature.table.dtype, lane.stream)
        assigned.append((feed, out.reshape(-1, *feed.shape[1:])))
    return DeviceBags(feature, n, 1 if unpooled else hotness, out)


__all__ = ["BATCHES", "LanePrograms", "LaneTables"]
