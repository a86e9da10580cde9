"""Version retirement: free a replaced version once its last request has finished.

Its rows in RocksDB are dropped when they are not needed for going back either."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from hps.errors import HpsError
from hps.node.model_opening import OpenedModel
from hps.node.stores import NodeStores

log = logging.getLogger(__name__)

_CHECK_EVERY_S = 0.05
# Garbage cycles may hold the last reference to a finished request.
_COLLECT_EVERY_S = 2.0
_DROP_AGAIN_S = 30.0


@dataclass(eq=False, slots=True)
class _ReplacedVersion:
    """A version that was served. ``ended``: no request uses it any more."""

    model: OpenedModel
    ended: bool = False

    @property
    def name(self) -> str:
        return self.model.version.name

    @property
    def version(self) -> int:
        return self.model.version.version


class VersionRetirement:
    """Retirement of one node's versions.

    Callers of `retire` must hold ``turn``, under which no version is loaded or unloaded; ``served``
    returns the served version of a model, or None. ``closed`` ends all waiting."""

    def __init__(
        self,
        stores: NodeStores,
        forget: Callable[[OpenedModel], None],
        served: Callable[[str], int | None],
        turn: threading.Lock,
        closed: threading.Event,
    ) -> None:
        """``forget`` removes a model's tables from the caches, and its metrics."""
        self._stores = stores
        self._forget = forget
        self._served = served
        self._turn = turn
        self._closed = closed
        # In the order of replacement; without those whose rows are no longer in RocksDB.
        self._former: list[_ReplacedVersion] = []
        self.threads: list[threading.Thread] = []

    def retire(
        self,
        old: OpenedModel,
        resources: ExitStack | None,
        engine: weakref.ref[object],
        used_elsewhere: Callable[[], bool],
    ) -> None:
        """Free a version and its network's ``resources`` once no request uses it.

        That is when nothing refers to ``engine``, its lookups, and no other process uses it."""
        former = _ReplacedVersion(old)

        def wait() -> None:
            self._wait_for_last_request(engine)
            while used_elsewhere() and not self._closed.wait(_CHECK_EVERY_S):
                pass
            try:
                self._release(former, resources)
            finally:
                while not self._closed.is_set() and not self._drop_old_rows(former.name):
                    self._closed.wait(_DROP_AGAIN_S)

        thread = threading.Thread(target=wait, name="hps-retire", daemon=True)
        self.threads = [*(each for each in self.threads if each.is_alive()), thread]
        self._former.append(former)
        thread.start()

    def close(self) -> None:
        """Wait for running retirements. ``closed`` must be set."""
        for thread in self.threads:
            thread.join()

    def _wait_for_last_request(self, engine: weakref.ref[object]) -> None:
        collect = time.monotonic() + _COLLECT_EVERY_S
        while engine() is not None and not self._closed.wait(_CHECK_EVERY_S):
            if time.monotonic() > collect:
                gc.collect()
                collect = time.monotonic() + _COLLECT_EVERY_S

    def _release(self, former: _ReplacedVersion, resources: ExitStack | None) -> None:
        self._forget(former.model)
        self._stores.remove(former.model)
        if resources is not None:
            resources.close()
        former.ended = True
        log.info("model %s: version %d is retired", former.name, former.version)

    def _drop_old_rows(self, name: str) -> bool:
        """Drop the rows of old versions from RocksDB, except those of versions that may still be needed.

        Kept are the served version, the one before it, and any that requests use. False if it must be
        retried."""
        with self._turn:
            former = [each for each in self._former if each.name == name]
            busy = {each.version for each in former if not each.ended}
            for each in former[:-1]:
                if each.version in busy or self._closed.is_set():
                    continue
                if each.version not in (self._served(name), former[-1].version):
                    try:
                        self._stores.remove(each.model, drop=True)
                    except HpsError as error:
                        log.warning(
                            "model %s: dropping the rows of version %d failed, retrying later: %s",
                            name,
                            each.version,
                            error,
                        )
                        return False
                self._former.remove(each)
            return True
