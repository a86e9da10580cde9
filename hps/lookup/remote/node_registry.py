"""Registry of lookup nodes: discovery, health and served versions, polled by one thread.

A node that is replaced, drained or hangs is detected even while it gets no lookups."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import grpc

from hps.config.secrets import Secret
from hps.lookup.remote.addresses import NodeAddress, NodeResolver, Resolve
from hps.lookup.remote.lookup_node import LATE_S, ClientTls, LookupNode
from hps.periodic import PeriodicThread

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Interval between polls of a node."""
_ANSWER_S = 1.0
# How long lookups may still use a channel that has been replaced.
_DRAIN_S = 60.0
# The shortest interval between polls, however many lookups fail.
_MIN_INTERVAL_S = 0.02


class NodeRegistry:
    """All lookup nodes, shared by the lookups of several models. Thread-safe; ``close`` it last."""

    def __init__(
        self,
        nodes: Sequence[str],
        certificates: Callable[[], ClientTls] | None = None,
        api_key: Secret | str | None = None,
        *,
        resolve_s: float = 5.0,
        resolve: Resolve | None = None,
    ) -> None:
        """``nodes`` as in `lookup.nodes`. ``certificates``: returns the current ones, so that renewed ones
        are used; without it, connections are plain text. ``api_key`` is sent with every call. Blocks
        until each node has answered once, at most a second."""
        self._certificates = certificates
        self._shown = None if certificates is None else certificates()
        self._credentials = _credentials(self._shown)
        self._key = api_key if isinstance(api_key, Secret) else Secret(api_key, None, "")
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._addresses = NodeResolver(nodes, resolve)
        self.all: tuple[LookupNode, ...] = ()
        self._leaving: list[LookupNode] = []
        self._polls: dict[LookupNode, Any] = {}
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._watchers: tuple[Callable[[], None], ...] = ()
        self._logged: dict[str, str] = {}
        self._unknown: dict[str, str] = {}
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._closed = False
        self._thread = PeriodicThread(self._round, self._pause_s, "hps-lookup-nodes")
        self._resolve_nodes()
        self._start_polls()
        self._await_first()
        self._thread.start()
        self._resolving = None
        if self._addresses.may_change:
            self._resolving = PeriodicThread(self._resolve_nodes, resolve_s, "hps-lookup-names")
            self._resolving.start()

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed``, on the registry's thread, whenever a node has changed."""
        with self._lock:
            self._watchers = (*self._watchers, changed)

    def unwatch(self, changed: Callable[[], None]) -> None:
        with self._lock:
            self._watchers = tuple(each for each in self._watchers if each != changed)

    def poll_soon(self, *, notify: bool = False) -> None:
        """Poll the nodes soon, after an unexpected answer; does not block.

        ``notify``: subscribers are called even if nothing changed."""
        if notify:
            self._changed.set()
        self._thread.wake()

    def later(self, seconds: float, work: Callable[[], None]) -> bool:
        """Run ``work``, which must not block, after ``seconds``; False if the registry is closed."""
        with self._lock:
            if self._closed:
                return False
            self._due.append((time.monotonic() + seconds, work))
        self._thread.wake()
        return True

    @property
    def problem(self) -> str:
        """The reason why no node is usable; empty if one may serve."""
        if any(target.may_serve for target in self.all):
            return ""
        found = [*self._addresses.problems.values()]
        found += [f"{target.address}: {target.problem}" for target in self.all]
        return "; ".join(found) or "no address is known"

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._thread.close(2.0)
        self._run_due(float("inf"))
        if self._resolving is not None:
            self._resolving.close()
        for target in (*self.all, *self._leaving):
            target.close()

    # -- thread ------------------------------------------------------------------------------------

    def _round(self) -> None:
        self._run_due(time.monotonic())
        if not self._changed.is_set():
            self._thread.wait(_MIN_INTERVAL_S)
        self._poll_and_notify()

    def _pause_s(self) -> float:
        """Time to the next poll, or to what is due before it."""
        due = min((due for due, _ in [*self._due]), default=float("inf"))
        return min(POLL_S, max(_MIN_INTERVAL_S, due - time.monotonic()))

    def _run_due(self, now: float) -> None:
        """Run everything that is due."""
        with self._lock:
            due = [work for at, work in self._due if at <= now]
            self._due = [each for each in self._due if each[0] > now]
        for work in due:
            work()

    def _poll_and_notify(self) -> None:
        self._start_polls()
        if self._changed.is_set():
            self._changed.clear()
            self._log_changes()
            for changed in self._watchers:
                changed()
        for target in [each for each in self._leaving if not each.in_flight]:
            self._leaving.remove(target)
            target.close()

    def _resolve_nodes(self) -> None:
        """Add nodes that are new and remove those that are gone."""
        before = dict(self._addresses.problems)
        found = self._addresses.now()
        with self._lock:
            known = {NodeAddress(each.address, each.name): each for each in self.all}
            gone = [target for at, target in known.items() if at not in found]
            self.all = tuple(
                known.get(at) or LookupNode(at, self._credentials, lambda: self._metadata)
                for at in found
            )
            self._leaving += gone
        if gone or len(found) > len(known) or before != self._addresses.problems:
            self._changed.set()
            self._thread.wake()

    def _start_polls(self) -> None:
        """Poll each node that has answered its last poll."""
        self._renew()
        key = self._key.now()
        self._metadata = () if key is None else (("x-api-key", key),)
        for target in self.all:
            if target not in self._polls:
                self._polls[target] = poll = target.start_poll(_ANSWER_S)
                poll.add_done_callback(lambda done, target=target: self._finish_poll(target, done))

    def _renew(self) -> None:
        """Reconnect after a renewal of certificates; calls in flight end on their channel."""
        if self._certificates is None or (certificates := self._certificates()) == self._shown:
            return
        with self._lock:
            self._shown, self._credentials = certificates, _credentials(certificates)
            former = [target.connect(self._credentials) for target in self.all]
        for connection in former:
            if not self.later(_DRAIN_S, connection.close):
                connection.close()

    def _finish_poll(self, target: LookupNode, poll: Any) -> None:
        """Handle the end of a poll, on a thread of gRPC."""
        try:
            if target.finish_poll(poll) and not self._closed:
                self._changed.set()
                self._thread.wake()
                if target.standing == "unreachable" and target.may_serve:
                    self.later(LATE_S, partial(self.poll_soon, notify=True))
        finally:
            self._polls.pop(target, None)

    def _await_first(self) -> None:
        done: list[Future[None]] = []
        for poll in [*self._polls.values()]:
            ended: Future[None] = Future()
            poll.add_done_callback(lambda _poll, ended=ended: ended.set_result(None))
            done.append(ended)
        for ended in done:
            ended.result(2 * _ANSWER_S)

    def _log_changes(self) -> None:
        """Log what has changed."""
        standings = {target.address: (target.standing, target.problem) for target in self.all}
        for address, (standing, problem) in standings.items():
            if self._logged.get(address) == standing:
                continue  # same state; only the wording of the problem may differ
            if standing == "ready":
                log.info("lookup node %s is ready", address)
            else:
                log.warning("lookup node %s is %s: %s", address, standing, problem)
        for address in self._logged.keys() - standings.keys():
            log.info("lookup node %s removed", address)
        self._logged = {address: standing for address, (standing, _) in standings.items()}
        for name, problem in self._addresses.problems.items():
            if self._unknown.get(name) != problem:
                log.warning("lookup nodes %s: %s; retrying", name, problem)
        self._unknown = dict(self._addresses.problems)


def _credentials(certificates: ClientTls | None) -> grpc.ChannelCredentials | None:
    return None if certificates is None else grpc.ssl_channel_credentials(*certificates)
