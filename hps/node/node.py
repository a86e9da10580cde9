"""An open node: its models, and operations that need no server.

``hps.node.build`` makes it; REST, gRPC, the command line and user code call it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hps.array_inputs import Features, device_number, flat_keys, tensor
from hps.config.traffic_settings import TrafficRule, parse_rule
from hps.errors import BadRequest, NotFound, Unsupported
from hps.lookup.gpu.device_lookup import DeviceLookup
from hps.node.served_models import OpenModels, deadline_in
from hps.node.served_versions import ServedModel
from hps.node.streams import UpdateStreams
from hps.node.tier_status import hot_keys
from hps.tiers.node import NodeServer
from hps.types import JaggedKeys, LookupRequest, LookupResult
from hps.updates.cache_writer import CacheWriter

if TYPE_CHECKING:
    from hps.models.repository import ModelVersion
    from hps.node.gpu_scheduler import NodeScheduler
    from hps.node.version_choice import RecentSwitch, VersionChoice
    from hps.tiers.rocksdb import CheckpointFolder

__all__ = ["ModelController", "Node", "ServedModel"]


class TrafficController(Protocol):
    """Changes a node's traffic rules: `hps.node.traffic_control.TrafficControl`."""

    def set_rule(self, name: str, rule: TrafficRule | None) -> None: ...

    def choice(self, name: str) -> VersionChoice | None: ...

    def switch_before_start(self, name: str) -> RecentSwitch | None: ...

    def roll_back(self, name: str, version: int, reason: str, detail: str) -> int | None: ...


class ModelController(Protocol):
    """Changes a node's models while it serves: `hps.node.model_control.ModelControl`."""

    @property
    def loading(self) -> Mapping[str, int]: ...

    @property
    def warnings(self) -> Mapping[str, str]: ...

    def problem(self, name: str, version: int) -> str: ...

    def available(self) -> Mapping[str, Sequence[int]]: ...

    def opened_version(self, name: str, version: int) -> ModelVersion: ...

    @property
    def on_change(self) -> list[Callable[[], None]]: ...

    def load(
        self,
        name: str,
        version: int | None = None,
        *,
        labels: Iterable[str] = (),
        switch: bool = True,
    ) -> int: ...

    def unload(self, name: str, version: str | int | None = None) -> None: ...

    def label(self, name: str, label: str, version: str | int | None) -> None: ...

    def switch(self, name: str, version: str | int) -> int: ...

    def rollback_loads(self, name: str) -> bool: ...

    def rollback(self, name: str) -> int: ...

    @property
    def traffic(self) -> TrafficController: ...


@dataclass(slots=True, repr=False, kw_only=True)
class Node(OpenModels):
    """An open node: the result of ``hps.open``. Any number of threads may call it until ``close``.

    A process forked from the one that opened it must not."""

    writer: CacheWriter
    streams: UpdateStreams
    promotions_into_stores: Callable[[], Mapping[str, int]] = dict
    """Returns the number of keys queued for promotion into a store, by its name."""
    damage: Callable[[], str] = str
    """Returns the known damage of its store with the remedy; empty if none."""
    not_ready_reason: Callable[[], str] = str
    """Returns the reason why a server with this node is not ready; empty if it may be."""
    on_damage: Callable[[Callable[[], None]], None] = lambda _changed: None
    """Registers a function that is called, on any thread, when more damage is found."""
    socket: NodeServer | None = None
    """Socket for attached processes; None if `server.runtime` is not set."""
    control: ModelController | None = None
    checkpoints: CheckpointFolder | None = None
    """Checkpoints of its RocksDB; None if `tiers.rocksdb.checkpoints` is not set."""
    scheduler: NodeScheduler | None = None
    """Common batches on its GPUs; None if no model has its rows and network there."""
    _turn: Iterator[int] = field(default_factory=count)

    def complete_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """See `OpenModels.complete_on`."""
        if self.scheduler is not None:
            self.scheduler.complete_on(loop)

    def lookup_on_device(
        self,
        model: str,
        features: Features,
        *,
        version: str | int | None = None,
        by_table: bool = False,
        want_source: bool = False,
        timeout_s: float | None = None,
    ) -> LookupResult:
        """Look up vectors that stay on a GPU: CuPy arrays, which Torch takes by DLPack; else as `lookup`.

        Keys may be on the GPU, too: arrays or tensors ``(batch,)`` or ``(batch, hotness)`` of CuPy, Torch or
        anything with ``__dlpack__``, read after the work on CuPy's current stream. The arrays are complete.
        Several GPUs take turns, unless keys are on one. Raises ``BadRequest`` for a node without a GPU cache,
        or for keys on a GPU without one."""
        served = self.model(model, version)
        served.freshness.require()
        lookups = served.on_devices
        if not lookups:
            raise BadRequest(
                "this node has no GPU cache (tiers.gpu.use), or a feature of the model has max_norm; lookup "
                "answers on the host"
            )
        lookup = self._lookup_near(features, lookups)
        if not want_source and timeout_s is None:
            result = lookup.lookup_arrays(features, by_table)
            if result is not None:
                return served.freshness.mark(result)
        keys = served.keys(features, by_table, lookup.cache.space.device_keys)
        request = LookupRequest(keys, deadline_in(timeout_s), want_source, by_table=by_table)
        return served.freshness.mark(lookup.pooled(request))

    def _lookup_near(self, features: Features, lookups: Sequence[DeviceLookup]) -> DeviceLookup:
        """Return the lookup on the GPU where the keys are; if they are on the host, the next in turn."""
        if len(lookups) == 1:
            return lookups[0]
        for keys in features.values():
            number = device_number(keys.keys if isinstance(keys, JaggedKeys) else keys)
            for lookup in lookups:
                if number is not None and lookup.cache.space.number == number:
                    return lookup
        return lookups[next(self._turn) % len(lookups)]

    def write(
        self,
        model: str,
        table: str,
        keys: Any = (),
        vectors: Any = (),
        *,
        deleted: Any = (),
        version: str | int | None = None,
    ) -> int:
        """Upsert ``vectors (n, dim)`` for ``keys (n,)`` and delete ``deleted (m,)``; return their version.

        ``version``: only in this version of the model, by its number or label; None: in all served ones with
        a table of this name and shape. Keys are the table's. Returns after every store and then the
        caches have the rows. The version is Unix ms << 20 | sequence, above those in the stores; the
        highest one if versions differ. For a few rows per call; send many through a stream
        (`hps.updates.Producer`).

        Raises ``BadRequest``, ``NotFound``, ``TierError`` or ``Unavailable``; calling again is harmless."""
        found = self.table(model, table, version)
        rows = np.asarray(tensor("vectors", vectors))
        if rows.size == 0:
            rows = np.empty((0, found.dim), found.dtype)
        if rows.dtype.kind not in "fiu" or rows.ndim != 2:
            raise BadRequest(f"vectors must be numbers (n, dim), not {rows.shape} {rows.dtype}")
        tables = {found: None}
        if version is None:
            others = [each.tables for each in self.models.of(model)]
            tables |= {named[table]: None for named in others if table in named}
        return self.streams.write(
            [*tables], flat_keys("keys", keys), rows, flat_keys("deleted", deleted)
        )

    def load(
        self,
        model: str,
        version: int | None = None,
        *,
        labels: Iterable[str] = (),
        switch: bool = True,
    ) -> int:
        """Serve ``version`` of a model of the repository in place of the current one, if any; returns it.

        The version is made ready first; then all requests switch to it, rows and network together.
        None: the version of the settings, else the highest. ``switch`` False: serve it beside the current
        one, by its number and ``labels``. Raises as `ModelControl.load`."""
        return self._controlled().load(model, version, labels=labels, switch=switch)

    def unload(self, model: str, version: str | int | None = None) -> None:
        """Stop serving a model, or one version of it; requests in flight are answered."""
        self._controlled().unload(model, version)

    def label(self, model: str, label: str, version: str | int | None) -> None:
        """Give a served version a label, by which requests may name it; None removes the label."""
        self._controlled().label(model, label, version)

    def switch(self, model: str, version: str | int) -> int:
        """Make a served version the current one, by its number or label; returns its number."""
        return self._controlled().switch(model, version)

    def rollback(self, model: str) -> int:
        """Make the previous version the current one again; returns its number."""
        return self._controlled().rollback(model)

    def traffic(self, model: str) -> dict[str, Any]:
        """The model's traffic rule, as `set_traffic` takes it; empty: none. Raises ``NotFound``."""
        self.model(model)
        rule = self.models.names[model].traffic
        return {} if rule is None else rule.as_json()

    def set_traffic(self, model: str, rule: Mapping[str, Any] | None) -> None:
        """Set which versions answer requests without a version: ``rule`` has the keys of the setting
        `models.serve.<model>.traffic`; None or empty: the current version.

        Raises ``BadRequest`` for an invalid rule and for versions and labels that are not served."""
        self._controlled().traffic.set_rule(model, parse_rule(rule))

    def checkpoint(self, keep: int = 1) -> Path:
        """Copy the RocksDB while it is served; returns the folder.

        The copy has all tables at one moment, in a folder named by the time in
        `tiers.rocksdb.checkpoints`. All but the newest ``keep`` there are then removed. Raises
        ``BadRequest``, ``Unsupported``, ``Unavailable`` or ``TierError``."""
        if keep < 1:
            raise BadRequest(f"keep is {keep}; it must be 1 or more")
        if self.checkpoints is None:
            raise Unsupported(
                "this node makes no checkpoints; tiers.rocksdb.checkpoints names no folder"
            )
        return self.checkpoints.add(keep)

    def _warnings_of_loads(self) -> list[str]:
        warnings = {} if self.control is None else self.control.warnings
        return [f"model {name}: {warning}" for name, warning in warnings.items()]

    def _controlled(self) -> ModelController:
        if self.control is None:
            raise Unsupported("the models of this node do not change")
        return self.control

    def hot_keys(
        self, model: str | None = None, table: str | None = None, limit: int = 20
    ) -> list[dict[str, Any]]:
        """The hottest keys of each table (of ``model``; its ``table``) in each cache, ready for JSON.

        With their scores from 255 down, and the features that use the table, with their key offsets.
        Scans whole caches. Raises ``NotFound``."""
        chosen = list(self.models.versions) if model is None else [self.model(model)]
        if table is not None and not any(table in served.tables for served in chosen):
            who = "no model has a" if model is None else f"model '{model}' has no"
            raise NotFound(f"{who} table '{table}'")
        found = []
        for served in chosen:
            for name, each in served.tables.items():
                if table in (None, name):
                    features = served.engine.features.values()
                    asking = {f.input: f.key_offset for f in features if f.table is each}
                    where = {
                        "model": served.name,
                        "version": served.version,
                        "table": name,
                        "features": asking,
                    }
                    found += [where | hot for hot in hot_keys(each, self.tiers, limit)]
        return found

    def promotions_waiting(self) -> dict[str, int]:
        """Keys queued for a copy into a tier, by its name; ``cpu`` stands for all caches."""
        return {"cpu": self.writer.waiting_keys, **self.promotions_into_stores()}

    def status(self) -> dict[str, Any]:
        """Status of the node, its models and tiers, ready for JSON."""
        return {
            **OpenModels.status(self),  # a dataclass with slots has no super()
            "warnings": [
                *self.warnings,
                *self._warnings_of_loads(),
                *filter(None, [self.damage()]),
            ],
            "updates": self.streams.status(),
            "promotions_waiting_keys": sum(self.promotions_waiting().values()),
            "socket": self.socket.status() if self.socket else None,
        }
