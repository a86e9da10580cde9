"""NodeTier: a node's stores as a tier of another process on the same machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from hps.errors import HpsError, TierError, TierTimeout, Unavailable
from hps.threads import BoundedThreadPool
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.checks import check_part
from hps.tiers.node import frames
from hps.tiers.node.connections import NAME, NodeConnectionPool
from hps.tiers.node.frames import FrameKind
from hps.types import EmbeddingTable, IndexArray, KeyArray, Source, VectorArray, VersionArray

# Bytes of rows per request: small enough that copying them delays no other thread noticeably.
_ANSWER_BYTES = 8 << 20
_PROMOTIONS_WAITING = 1_024
_Route = tuple[NodeConnectionPool, int]
"""The pool that serves a table, and the table's number in it."""


class NodeTier:
    """Fetches from `NodeServer`: rows with their sources, deletions, and names of skipped tiers.

    Only the node changes rows: `insert`, `update`, `delete` and `evict` raise TierError. Thread-safe."""

    info = TierInfo(NAME, Source.REMOTE, blocking=True)

    def __init__(
        self,
        connections: Iterable[NodeConnectionPool] = (),
        dropped: Callable[[int], None] = lambda _keys: None,
    ) -> None:
        """``connections``: pools, each for its own tables.

        ``dropped(keys)`` receives the number of keys whose promotion could not be sent to the node."""
        self._pools: list[NodeConnectionPool] = []
        self._routes: dict[EmbeddingTable, _Route] = {}
        self._dropped = dropped
        for each in connections:
            self.add(each)
        self._promotions = BoundedThreadPool(1, _PROMOTIONS_WAITING, name="promote")

    def add(self, connections: NodeConnectionPool) -> None:
        """Use the pool ``connections`` for its tables, which other pools may have, too."""
        self._use([*self._pools, connections])

    def remove(self, connections: NodeConnectionPool) -> None:
        """Stop using the pool ``connections``, and close it."""
        self._use([each for each in self._pools if each is not connections])
        connections.close()

    def _use(self, pools: list[NodeConnectionPool]) -> None:
        self._pools = pools
        self._routes = {table: (pool, i) for pool in pools for i, table in enumerate(pool.tables)}

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        for part in parts:
            check_part(part)
        by_pool: dict[NodeConnectionPool, list[tuple[Part, int]]] = {}
        for part in parts:
            if len(part.missing) and (route := self._routes.get(part.table)):
                by_pool.setdefault(route[0], []).append((part, route[1]))
        for connections, numbered in by_pool.items():
            self._fetch_all(connections, numbered, ctx)

    def _fetch_all(
        self,
        connections: NodeConnectionPool,
        numbered: Sequence[tuple[Part, int]],
        ctx: FetchContext,
    ) -> None:
        numbers = {part.table: number for part, number in numbered}
        left: dict[int, list[IndexArray]] = {}
        for portion in _portions([part for part, _ in numbered]):
            answered = self._fetch(connections, numbers, portion, ctx)
            for (part, _), missing in zip(portion, answered, strict=True):
                left.setdefault(id(part), []).append(missing)
        for part, _ in numbered:
            pieces = left[id(part)]
            part.missing = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _fetch(
        self,
        connections: NodeConnectionPool,
        numbers: Mapping[EmbeddingTable, int],
        portion: Sequence[tuple[Part, IndexArray]],
        ctx: FetchContext,
    ) -> list[IndexArray]:
        left_s = None
        if ctx.deadline is not None:
            left_s = ctx.deadline - time.monotonic()
            if left_s <= 0:
                raise TierTimeout(NAME, "the request's deadline exceeded")
        keys = [(numbers[part.table], part.keys[positions]) for part, positions in portion]
        request = frames.fetch_request(keys, left_s)
        answer = connections.request(FrameKind.FETCH, request, ctx.deadline)
        try:
            return frames.read_fetch_answer(answer, portion, ctx.degraded)
        except frames.BadFrame as error:
            raise TierError(NAME, str(error)) from None

    def promote(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Ask the node to promote the rows of ``keys`` into the cache soon; never waits.

        Does nothing for a table with the miss policy ``wait``: the node itself promotes the rows that it
        returns."""
        route = self._routes.get(table)
        if table.miss.kind == "wait" or route is None:
            return
        try:
            self._promotions.submit(partial(self._promote, route, keys))
        except Unavailable:
            self._dropped(len(keys))

    def _promote(self, route: _Route, keys: KeyArray) -> None:
        connections, number = route
        most = frames.MAX_PAYLOAD // 16
        for start in range(0, len(keys), most):
            some = keys[start : start + most]
            try:
                request = frames.promote_request(number, some)
                connections.request(FrameKind.PROMOTE, request)
            except HpsError:
                self._dropped(len(some))

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        raise _refused(table)

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        raise _refused(table)

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> None:
        raise _refused(table)

    def evict(self, table: EmbeddingTable, keys: KeyArray) -> None:
        raise _refused(table)

    def close(self) -> None:
        self._promotions.close(1.0, self._close_routes)

    def _close_routes(self) -> None:
        for connections in self._pools:
            connections.close()


def _refused(table: EmbeddingTable) -> TierError:
    return TierError(NAME, f"only the node may change rows of {table.id}")


def _portions(parts: Sequence[Part]) -> Iterator[list[tuple[Part, IndexArray]]]:
    """Yield the parts, with the positions to request, of one request at a time."""
    portion: list[tuple[Part, IndexArray]] = []
    budget = _ANSWER_BYTES
    for part in parts:
        size, positions = part.table.row_bytes + frames.KEY_BYTES, part.missing
        while len(positions):
            most = min(
                max(budget // size, 0 if portion else 1), frames.most_keys(part.table.row_bytes)
            )
            if some := len(positions[:most]):
                portion.append((part, positions[:most]))
                positions = positions[most:]
                budget -= some * size
            if len(positions):
                yield portion
                portion, budget = [], _ANSWER_BYTES
    if portion:
        yield portion
