"""NodeServer: serves a node's stores to attached processes over a Unix socket."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hps.errors import ConfigError, DeadlineExceeded, HpsError, TierTimeout, Unavailable
from hps.threads import BoundedThreadPool
from hps.tiers.base import FetchContext, Part, Tier
from hps.tiers.file_lock import FileLock
from hps.tiers.node import frames
from hps.tiers.node.attached_processes import AttachedProcesses
from hps.tiers.node.frames import FrameKind, Pieces
from hps.types import EmbeddingTable, KeyArray

log = logging.getLogger(__name__)
MAX_CONNECTIONS = 1_024
# The longest pause within a frame; after it the connection is closed.
_FRAME_TIMEOUT_S = 30.0
# If a fetch waited longer than this for a thread, the caches are checked first: other requests may have
# loaded its rows meanwhile.
_RECHECK_CACHES_S = 0.002
# The most bytes of a Unix socket's path.
_MAX_PATH_BYTES = 107

Answer = Callable[[Mapping[str, Any]], Any]
"""Handler of an ASK request: takes its JSON object, returns a value that JSON can represent."""


@dataclass(frozen=True, slots=True)
class ServedTiers:
    """The tiers of a node that a `NodeServer` reads.

    ``stores`` are read on ``pool``, like by the node's own lookups; ``promote`` must not block."""

    caches: Tier
    stores: Tier
    pool: BoundedThreadPool
    promote: Callable[[EmbeddingTable, KeyArray], None]


class NodeServer:
    """Listens at ``folder``/node.sock until it is closed, with one thread per connection.

    A connection may fetch the tables that exist when it begins. ``attached`` gets the reports of attached
    processes. ``answers``: handlers of ASK requests by name; may be extended later. Raises ConfigError if
    another node listens there, or ``folder`` is not private to this user."""

    def __init__(
        self,
        folder: Path,
        tables: Callable[[], Iterable[EmbeddingTable]],
        tiers: ServedTiers,
        attached: AttachedProcesses,
        answers: Mapping[str, Answer] | None = None,
    ) -> None:
        self.path = folder / frames.SOCKET
        self._tables = tables
        self._tiers = tiers
        self._attached = attached
        self.answers = dict(answers or {})
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._lock = _FolderLock(folder)
        try:
            self._listener = _listen(self.path)
        except BaseException:
            self._lock.release()
            raise
        threading.Thread(target=self._accept, name="hps-node-socket", daemon=True).start()

    def status(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "connections": len(self._connections),
            "attached": self._attached.processes,
        }

    def close(self) -> None:
        """Close every connection. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.path.unlink(missing_ok=True)
        for each in (self._listener, *self._connections):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the waiting thread
        self._listener.close()
        self._lock.release()

    # -- connections -------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # possibly out of file descriptors
                continue
            if len(self._connections) >= MAX_CONNECTIONS:
                log.warning(
                    "rejected a connection: %d connections are open, the maximum", MAX_CONNECTIONS
                )
                connection.close()
                continue
            self._connections.add(connection)
            work = partial(self._serve, connection)
            try:
                threading.Thread(target=work, name="hps-node-connection", daemon=True).start()
            except RuntimeError as error:  # possibly out of threads
                log.warning("rejected a connection to %s: %s", self.path, error)
                self._connections.discard(connection)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        client_tables: list[EmbeddingTable | None] = []
        try:
            while not self._closed:
                connection.settimeout(None)
                kind, size = frames.receive_head(connection)
                connection.settimeout(_FRAME_TIMEOUT_S)
                payload = frames.receive_payload(connection, size)
                try:
                    answer = self._answer(connection, kind, payload, client_tables)
                except HpsError as error:
                    frames.send(connection, FrameKind.FAILED, _failure(error))
                else:
                    frames.send(connection, FrameKind.OK, answer)
                del payload  # an idle connection holds no memory
        except ConnectionError:
            pass  # the client ended or closed the connection
        except (OSError, frames.BadFrame) as error:
            if not self._closed:
                log.warning("closing a connection to %s: %s", self.path, error)
        except Exception:
            log.exception("closing a connection to %s after an unexpected error", self.path)
        finally:
            self._connections.discard(connection)
            self._attached.disconnected(connection)
            connection.close()

    # -- requests ----------------------------------------------------------------------------------

    def _answer(
        self,
        connection: socket.socket,
        kind: int,
        payload: bytearray,
        client_tables: list[EmbeddingTable | None],
    ) -> Pieces:
        """Answer one request. ``client_tables``: the tables of the client's HELLO, by their numbers there."""
        if kind == FrameKind.FETCH:
            parts, left_s = frames.read_fetch(payload, client_tables)
            return self._fetch(parts, left_s)
        if kind == FrameKind.PROMOTE:
            self._tiers.promote(*frames.read_promote(payload, client_tables))
            return []
        if kind == FrameKind.ASK:
            request = frames.read_json(payload)
            answer = self.answers.get(request["what"])
            if answer is None:
                raise Unavailable(f"no handler for {request['what']!r} is available now")
            return frames.as_json(answer(request))
        if kind == FrameKind.REPORT:
            return frames.as_json(self._attached.report(connection, frames.read_json(payload)))
        if kind == FrameKind.HELLO:
            hello = frames.read_json(payload)
            tables = {(t.id, t.dim, t.row_format.name): t for t in self._tables()}
            client_tables[:] = [tables.get(tuple(each)) for each in hello["tables"]]
            missing = [i for i, table in enumerate(client_tables) if table is None]
            return frames.as_json({"protocol": frames.PROTOCOL, "lacking": missing})
        raise frames.BadFrame(f"unknown frame kind {kind}")

    def _fetch(self, parts: list[Part], left_s: float | None) -> Pieces:
        arrived = time.monotonic()
        ctx = FetchContext(None if left_s is None else arrived + left_s)
        self._tiers.pool.submit(
            partial(self._fetch_misses, parts, ctx, arrived), ctx.deadline
        ).result()
        for part in parts:
            # With the other miss policy, the client itself asks for promotions.
            if part.table.miss.kind == "wait" and len(hits := part.source.nonzero()[0]):
                self._tiers.promote(part.table, part.keys[hits])
        return frames.fetch_answer(parts, ctx.degraded)

    def _fetch_misses(self, parts: list[Part], ctx: FetchContext, arrived: float) -> None:
        if time.monotonic() - arrived > _RECHECK_CACHES_S:
            self._tiers.caches.fetch(parts, ctx)
        if waiting := [part for part in parts if len(part.missing)]:
            self._tiers.stores.fetch(waiting, ctx)


def _failure(error: HpsError) -> Pieces:
    kind = "failed"
    if isinstance(error, DeadlineExceeded | TierTimeout):
        kind = "late"
    elif isinstance(error, Unavailable):
        kind = "unavailable"
    return frames.as_json({"kind": kind, "message": str(error)})


# -- the folder ------------------------------------------------------------------------------------


def private_folder(folder: Path) -> None:
    """Create ``folder`` for this user only. Raises ConfigError if others may enter an existing one."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A symbolic link of another user is as unsafe as a folder of another user.
        target, link = folder.stat(), folder.lstat()
    except OSError as error:
        remedy = "name a folder that this user can create, on a writable file system"
        raise ConfigError(
            f"server.runtime {folder} cannot be created: {error.strerror}; {remedy}"
        ) from None
    if {target.st_uid, link.st_uid} != {os.getuid()}:
        raise ConfigError(f"server.runtime {folder} belongs to another user; choose another folder")
    if target.st_mode & 0o077:
        raise ConfigError(f"server.runtime {folder} is open to other users; chmod 700 {folder}")


class _FolderLock:
    """Exclusive lock on the folder; the kernel releases it even if this process is killed."""

    def __init__(self, folder: Path) -> None:
        """Take the lock. Raises ConfigError."""
        self._folder, self._made = folder, not folder.exists()
        while True:
            private_folder(folder)
            try:
                self._lock = FileLock(folder / "lock")
            except FileNotFoundError:
                self._made = True  # the previous owner has just removed it
            except BlockingIOError:
                raise ConfigError(
                    f"another running node has its socket in {folder}; give this node another "
                    "server.runtime"
                ) from None
            else:
                return

    def release(self) -> None:
        """Remove the lock file and, if this process made it and it is empty, the folder; release the lock."""
        (self._folder / "lock").unlink(missing_ok=True)
        if self._made:
            with suppress(OSError):
                self._folder.rmdir()
        self._lock.release()


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(
            f"{path} is too long for a socket ({_MAX_PATH_BYTES} bytes); set server.runtime to a shorter one"
        )
    path.unlink(missing_ok=True)  # left by a killed node: this process holds the lock
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(MAX_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot create a socket at {path}: {error.strerror}") from None
    return listener
