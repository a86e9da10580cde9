"""The batch scheduler of a node's GPUs: its models, lanes, and the socket of other processes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hps.config.schema import Settings
from hps.dense.lanes import NetworkLane
from hps.dense.onnx import OnnxModel
from hps.lookup.batching import BatchLimits
from hps.lookup.gpu.device_lookup import DeviceLookup
from hps.node.model_opening import OpenedModel
from hps.observability import metric_names as m
from hps.observability.meters import LookupMeter, TierMeter
from hps.observability.metrics import Metrics
from hps.periodic import PeriodicThread
from hps.predict.batched_pipeline import BatchedPipeline
from hps.predict.pipeline import InferencePipeline
from hps.predict.scheduler.channel_socket import ChannelListener
from hps.predict.scheduler.columns import ModelColumns
from hps.predict.scheduler.fill_reports import FillReporter
from hps.predict.scheduler.host import SchedulerHost
from hps.predict.scheduler.lane_fill import LaneTables
from hps.predict.scheduler.lane_programs import BATCHES, LanePrograms
from hps.predict.scheduler.remote_network import columns_of, describe_network
from hps.predict.scheduler.scheduled_model import ScheduledModel
from hps.types import Source

_GPU = Source.GPU.name.lower()
_METRICS = {
    m.SCHEDULER_REQUESTS: ("requests", 1),
    m.SCHEDULER_SAMPLES: ("samples", 1),
    m.SCHEDULER_SLOW: ("slow", 1),
    m.SCHEDULER_EXPIRED: ("expired", 1),
    m.SCHEDULER_BATCHES: ("batches", 1),
    m.SCHEDULER_INCOMPLETE: ("incomplete", 1),
    m.SCHEDULER_FAILED: ("failed", 1),
    m.SCHEDULER_DEVICE_SECONDS: ("device_ns", 1e-9),
}
"""The native count that each metric shows, and its unit."""
_STATUS = {
    **{name: (name, 1) for name, _ in _METRICS.values() if name != "device_ns"},
    "device_s": ("device_ns", 1e-9),
}
_SLOW_KEYS = 1 << 20
"""The most keys of requests that run together outside the lanes."""


class NodeScheduler:
    """Runs predictions of this process and of attached ones in common batches on the node's GPUs.

    ``resources`` closes it."""

    def __init__(
        self, settings: Settings, caches: Sequence[Any], metrics: Metrics, resources: ExitStack
    ) -> None:
        """``caches``: those of all GPUs."""
        self._settings = settings
        self._metrics = metrics
        self._resources = resources
        self._host = SchedulerHost()
        resources.callback(self._free_lanes)
        resources.callback(self._host.close)
        self._client = self._host.connect()
        resources.callback(self._client.close)
        self._listener: ChannelListener | None = None
        # By the id of the opened model: a version may be loaded again while requests use its former load.
        self._models: dict[int, _Scheduled] = {}
        for cache in caches:
            self._watch(cache)
        for metric, (count, unit) in _METRICS.items():
            metrics.gauges(metric, partial(self._values, count, unit))

    def add(
        self,
        model: OpenedModel,
        network: OnnxModel,
        lookups: Sequence[tuple[DeviceLookup, int]],
        meter: LookupMeter,
        alone: InferencePipeline,
    ) -> ScheduledModel:
        """Prepare the lanes of ``model``. ``lookups``: with their devices.

        ``alone`` runs requests that cannot run in a batch. Raises ModelError."""
        spec = model.spec.dense
        assert spec is not None
        columns = columns_of(
            model.lookup, network, [t.name for t in spec.inputs], [t.name for t in spec.outputs]
        )
        tier = TierMeter(self._metrics, _GPU)
        limits = BatchLimits(BATCHES[-1], _SLOW_KEYS)
        batched = BatchedPipeline(_Alone(alone), model.lookup.features, limits)
        host = lookups[0][0].host
        memory = tier if host.memory is None else TierMeter(self._metrics, host.memory.info.name)
        reporter = FillReporter(columns, host, meter, (tier, memory))
        number = self._host.add_model(columns, batched.submit, reporter)
        key = f"{model.version.name}/{model.version.version}"
        added = _Scheduled(key, number, describe_network(network))
        self._host.gather_with(0 if host.pool is None else host.pool.threads)
        try:
            for lookup, device in lookups:
                tables = LaneTables(lookup.cache, lookup.host)
                for _ in range(self._settings.dense.lanes):
                    self._add_lane(added, model, network, columns, (device, tables))
        except BaseException:
            self._close(added)
            raise
        self._models[id(model)] = added
        return ScheduledModel(
            self._client, number, columns, (meter, tier), remote=False, largest=BATCHES[-1]
        )

    def remove(self, model: OpenedModel) -> None:
        """Remove a version once its batches have ended, and free its lanes. Ignores unknown ones."""
        if (removed := self._models.pop(id(model), None)) is not None:
            self._close(removed)

    def _close(self, scheduled: _Scheduled) -> None:
        self._host.remove_model(scheduled.number)
        for lane in scheduled.lanes:
            lane.close()

    def _free_lanes(self) -> None:
        """Free the lanes of all versions. The batches have ended."""
        while self._models:
            _, scheduled = self._models.popitem()
            for lane in scheduled.lanes:
                lane.close()

    def complete_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """See `SchedulerClient.complete_on`."""
        self._client.complete_on(loop)

    def listen(self, folder: Path) -> None:
        """Open the socket for other processes in ``folder``, which is private to this user."""
        self._listener = ChannelListener(folder, self._host)
        self._resources.callback(self._listener.close)

    def describe(self) -> dict[str, Any] | None:
        """Describe the scheduled models to a process that attaches; None before `listen`.

        Of a version that was loaded again, the last load."""
        if self._listener is None:
            return None
        models = {
            each.key: {"number": each.number, "network": each.network}
            for each in [*self._models.values()]
        }
        return {"path": str(self._listener.path), "models": models}

    def status(self) -> dict[str, dict[str, float]]:
        """Return the counts of each model's version, ready for JSON."""
        return {
            key: {count: unit * counts[source] for count, (source, unit) in _STATUS.items()}
            for key, counts in self._counts().items()
        }

    def _values(self, count: str, unit: float) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yield ``count`` of each version in ``unit``, with its labels."""
        for key, counts in self._counts().items():
            name, _, version = key.rpartition("/")
            yield (name, version), unit * counts[count]

    def _counts(self) -> dict[str, Counter[str]]:
        """The counts of each version, of all its loads together."""
        found: dict[str, Counter[str]] = {}
        for each in [*self._models.values()]:
            if counts := self._host.counts(each.number):
                found.setdefault(each.key, Counter()).update(counts)
        return found

    def _add_lane(
        self,
        added: _Scheduled,
        model: OpenedModel,
        network: OnnxModel,
        columns: ModelColumns,
        place: tuple[int, LaneTables],
    ) -> None:
        device, tables = place
        spec = model.spec.dense
        assert spec is not None
        space = tables.cache.space
        lane = NetworkLane(network, space, device, frozenset(t.name for t in spec.inputs))
        added.lanes.append(lane)
        feeds = [(f, spec.embeddings.get(f.name, f.name)) for f in columns.features]
        programs = LanePrograms(lane, columns, feeds, tables)
        with space.device:
            self._host.add_lane(added.number, programs)

    def _watch(self, cache: Any) -> None:
        """Let writes of ``cache`` wait for the lanes, and publish epochs that end by time to them."""
        cache.add_readers(self._host.hold_back)
        epoch_s = self._settings.tiers.gpu.epoch_s
        if epoch_s is not None:
            thread = PeriodicThread(cache.publish_now, epoch_s / 4, "hps-gpu-epochs")
            thread.start()
            self._resources.callback(thread.close)


@dataclass(frozen=True, slots=True)
class _Scheduled:
    """A version in the scheduler: ``model/version``, its number, its network's description, its lanes."""

    key: str
    number: int
    network: dict[str, Any]
    lanes: list[NetworkLane] = field(default_factory=list)


class _Alone:
    """The pipeline without the scheduler, for requests that it could not run."""

    def __init__(self, pipeline: InferencePipeline) -> None:
        self.submit = pipeline.submit_alone
