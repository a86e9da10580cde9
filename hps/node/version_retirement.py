"""Version retirement: free a replaced version once its last request has finished.

Its rows in RocksDB are dropped when they are not needed for going back either."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

from hps.errors import HpsError
from hps.lookup.base import Lookup
from hps.node.model_opening import OpenedModel, tables_of
from hps.node.stores import NodeStores
from hps.periodic import PeriodicThread
from hps.types import EmbeddingTable

log = logging.getLogger(__name__)

_CHECK_EVERY_S = 0.05
_COLLECT_EVERY_S = 2.0
_DROP_AGAIN_S = 30.0


class LastRequest:
    """Detects the end of the last request on a version: nothing refers to its ``lookups`` any more."""

    _collect_at: ClassVar[float] = 0.0

    def __init__(self, *lookups: Lookup) -> None:
        self._lookups = [weakref.ref(lookup) for lookup in lookups]
        LastRequest._collect_at = time.monotonic() + _COLLECT_EVERY_S

    def has_finished(self) -> bool:
        """Poll. Collects garbage at times: cycles may hold the last reference to a finished request."""
        if self._is_used() and time.monotonic() > LastRequest._collect_at:
            gc.collect()
            LastRequest._collect_at = time.monotonic() + _COLLECT_EVERY_S
        return not self._is_used()

    def _is_used(self) -> bool:
        return any(lookup() is not None for lookup in self._lookups)


@dataclass(eq=False, slots=True)
class ReplacedVersion:
    """A version that was served, and its network's ``resources``.

    ``is_used_remotely`` returns whether another process uses it."""

    model: OpenedModel
    resources: ExitStack | None
    last_request: LastRequest
    is_used_remotely: Callable[[], bool]

    @property
    def name(self) -> str:
        return self.model.version.name

    @property
    def version(self) -> int:
        return self.model.version.version


class VersionRetirement:
    """Retirement of one node's versions, on a thread.

    One thread at a time may call `retire`. No version is loaded while ``loads`` is held. ``needed`` returns
    the versions of a model that are served, or that a rollback would serve."""

    def __init__(
        self,
        stores: NodeStores,
        free_caches: Callable[[OpenedModel], None],
        needed: Callable[[str], Collection[int]],
        loads: threading.Lock,
    ) -> None:
        """``free_caches`` removes a model's tables from the caches, and its metrics."""
        self._stores = stores
        self._free_caches = free_caches
        self._needed = needed
        self._loads = loads
        # In the order of replacement; without those whose rows are no longer in RocksDB.
        self._replaced: list[ReplacedVersion] = []
        self._in_use: list[ReplacedVersion] = []
        self._drop_at: dict[str, float] = {}  # by model
        self._thread = PeriodicThread(self._sweep, _CHECK_EVERY_S, "hps-retire", idle_rounds=1)

    @property
    def is_idle(self) -> bool:
        """True if no version is to be freed and no rows are to be dropped."""
        return not (self._in_use or self._drop_at)

    def retire(self, replaced: ReplacedVersion) -> None:
        """Free a version once no request uses it, in this process or another one."""
        self._replaced.append(replaced)
        self._in_use.append(replaced)
        self._thread.start()

    def close(self) -> None:
        """Free all replaced versions. No request may be in flight any more."""
        self._thread.close(timeout_s=None)
        for each in self._in_use:
            self._free(each)

    def _sweep(self) -> bool:
        for each in [*self._in_use]:
            if each.last_request.has_finished() and not each.is_used_remotely():
                self._drop_at[each.name] = 0.0
                self._in_use.remove(each)
                self._free(each)
        for name, due in [*self._drop_at.items()]:
            # While a version is loaded, the next sweep tries again.
            if time.monotonic() >= due and self._loads.acquire(blocking=False):
                try:
                    self._drop_old_rows(name)
                finally:
                    self._loads.release()
        return not self.is_idle

    def _free(self, replaced: ReplacedVersion) -> None:
        self._free_caches(replaced.model)
        self._stores.remove(replaced.model)
        if replaced.resources is not None:
            replaced.resources.close()
        log.info("model %s: version %d is retired", replaced.name, replaced.version)

    def _drop_old_rows(self, name: str) -> None:
        """Drop the rows of old versions from RocksDB, except those of versions that may still be needed.

        Kept are the served versions, the one before them, and any that requests use."""
        replaced = [each for each in self._replaced if each.name == name]
        in_use = {each.version for each in self._in_use if each.name == name}
        for each in replaced[:-1]:
            if each.version in in_use:
                continue
            if each.version not in (*self._needed(name), replaced[-1].version):
                try:
                    self._stores.drop_rows(self._droppable(each))
                except HpsError as error:
                    log.warning(
                        "model %s: dropping the rows of version %d failed, retrying later: %s",
                        name,
                        each.version,
                        error,
                    )
                    self._drop_at[name] = time.monotonic() + _DROP_AGAIN_S
                    return
            self._replaced.remove(each)
        del self._drop_at[name]

    def _droppable(self, old: ReplacedVersion) -> list[EmbeddingTable]:
        """The tables of an ``old`` version, except those that another one may need."""
        others = tables_of(each.model for each in self._replaced if each is not old)
        kept, needed = {table.id for table in others}, self._needed(old.name)
        return [
            table
            for table in old.model.tables.values()
            if table.id not in kept and table.version not in needed
        ]
