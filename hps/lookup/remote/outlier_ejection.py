"""Outlier ejection: nodes that fail get no lookups for a while.

Envoy's rules, simplified
(https://www.envoyproxy.io/docs/envoy/latest/intro/arch_overview/upstream/outlier): a node is ejected for
failures among its last lookups, for twice as long each time, and returns without a probe. A failure of all
nodes ejects none: another node must do much better, and at most half of the nodes are ejected. So nodes
that are all slow, as in an overload, keep their share of the lookups.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import grpc

from hps.backoff import Backoff
from hps.lookup.remote.balancing import LeastBusy, NodePicker
from hps.lookup.remote.lookup_node import LookupNode

log = logging.getLogger(__name__)

_LAST = 10
# A lookup that times out after less time than this does not count as a failure of the node.
_MIN_TIMEOUT_S = 0.1
_Code = grpc.StatusCode
_FAILURES = (_Code.UNAVAILABLE, _Code.INTERNAL, _Code.UNKNOWN, _Code.DATA_LOSS)


@dataclass(slots=True)
class _NodeRecord:
    """The last results and the ejections of one node.

    ``last``: for each of its last lookups, True if it failed; ``until``: end of its ejection, an instant
    of the clock; ``in_a_row``: number of ejections in a row, each twice as long as the one before."""

    last: deque[bool] = field(default_factory=partial(deque, maxlen=_LAST))
    until: float = 0.0
    in_a_row: int = 0
    ejections: int = 0

    @property
    def share(self) -> float:
        """The share of failures among its last lookups; 1 if there were none."""
        return self.last.count(True) / len(self.last) if self.last else 1.0


class OutlierEjection:
    """A `NodePicker` that excludes ejected nodes; ``inner`` picks among the others. Thread-safe.

    If all are ejected, ``inner`` picks among all.
    """

    def __init__(
        self,
        nodes: Callable[[], Sequence[LookupNode]],
        inner: NodePicker | None = None,
        *,
        failures: int = 5,
        base_s: float = 1.0,
        most_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``nodes`` returns all nodes. ``failures`` among a node's last ten lookups eject it, for
        ``base_s`` at first and ``most_s`` at most."""
        self._nodes = nodes
        self._inner = inner or LeastBusy()
        self._failures = failures
        self._backoff = Backoff(base_s, most_s, jitter=0)
        self._clock = clock
        self._records: dict[LookupNode, _NodeRecord] = {}
        self._lock = threading.Lock()
        # Read without the lock: usually no node is ejected.
        self._out: tuple[LookupNode, ...] = ()

    def pick(self, among: Sequence[LookupNode]) -> LookupNode:
        if self._out:
            self._readmit()
            among = [target for target in among if target not in self._out] or among
        return self._inner.pick(among)

    def record(self, target: LookupNode, code: grpc.StatusCode, seconds: float) -> None:
        self._inner.record(target, code, seconds)
        late = code is _Code.DEADLINE_EXCEEDED and seconds >= _MIN_TIMEOUT_S
        failed = late or code in _FAILURES
        record = self._records.get(target)
        if record is None:
            if not failed:
                return
            with self._lock:
                self._drop_removed_nodes()
                record = self._records.setdefault(target, _NodeRecord())
        record.last.append(failed)
        if failed and record.last.count(True) >= self._failures:
            self._eject(target, record)

    def is_out(self, target: LookupNode) -> bool:
        """True while the node is ejected."""
        self._readmit()
        return target in self._out

    def ejections(self, target: LookupNode) -> int:
        """The number of times that the node was ejected."""
        record = self._records.get(target)
        return 0 if record is None else record.ejections

    def _eject(self, target: LookupNode, record: _NodeRecord) -> None:
        nodes, now = self._nodes(), self._clock()
        with self._lock:
            self._drop_removed_nodes()
            if target in self._out or target not in nodes or 2 * (len(self._out) + 1) > len(nodes):
                return
            if not self._does_better(record, nodes):
                return
            if now > record.until + self._backoff.max_s:
                record.in_a_row = 0  # it did well for a long time
            record.in_a_row += 1
            out_s = self._backoff.pause_s(record.in_a_row)
            record.until = now + out_s
            record.ejections += 1
            record.last.clear()
            self._out = (*self._out, target)
        log.warning(
            "lookup node %s ejected for %.3g s: too many of its lookups failed",
            target.address,
            out_s,
        )

    def _does_better(self, record: _NodeRecord, nodes: Sequence[LookupNode]) -> bool:
        """True if another node is not ejected, answers, and fails at most half as often. Holds the lock."""
        answer = [each for each in nodes if each.standing == "ready" and each.answers["OK"]]
        records = [self._records.get(each) for each in answer if each not in self._out]
        others = [each for each in records if each is not record]
        return any(each is None or 2 * each.share <= record.share for each in others)

    def _readmit(self) -> None:
        now = self._clock()
        if any(self._until(each) <= now for each in self._out):
            with self._lock:
                back = [each for each in self._out if self._until(each) <= now]
                self._out = tuple(each for each in self._out if each not in back)
            for each in back:
                log.info("lookup node %s readmitted after its ejection", each.address)

    def _until(self, target: LookupNode) -> float:
        """The end of the node's ejection; 0, which is past, if the node is unknown."""
        record = self._records.get(target)
        return 0.0 if record is None else record.until

    def _drop_removed_nodes(self) -> None:
        """Drop the records of removed nodes. Holds the lock."""
        nodes = self._nodes()
        self._out = tuple(each for each in self._out if each in nodes)
        self._records = {t: r for t, r in self._records.items() if t in nodes}
