"""Connection pool to a node's socket; each connection serves one request at a time."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hps.errors import TierError, TierMisfit, TierTimeout, Unavailable
from hps.tiers.node import frames
from hps.tiers.node.attached_processes import Report
from hps.tiers.node.frames import FrameKind, Pieces
from hps.types import EmbeddingTable

NAME = "node"
"""Name of `NodeTier` in errors, metrics and answers."""
_CONNECT_S = 5.0


class NodeConnectionPool:
    """Connections to the node with the socket ``path``, made on demand.

    ``tables``: the tables that may be requested; a request names a table by its position here. If the
    node was restarted, the request that finds its connection closed is sent again on a new one; every
    request may safely be sent twice. ``timeout_s`` bounds requests without a deadline. Thread-safe.
    Raises TierError if the node does not respond, TierTimeout if it does not respond in time, TierMisfit
    if it serves other tables, Unavailable if it is overloaded or shutting down."""

    def __init__(
        self, path: Path, tables: Sequence[EmbeddingTable] = (), *, timeout_s: float = 30.0
    ) -> None:
        self.path = path
        self.tables = tuple(tables)
        self._hello = {
            "protocol": frames.PROTOCOL,
            "tables": [[table.id, table.dim, table.row_format.name] for table in self.tables],
        }
        self._timeout_s = timeout_s
        self._free: deque[_NodeConnection] = deque()
        self._closed = False

    def request(self, kind: FrameKind, pieces: Pieces, deadline: float | None = None) -> bytearray:
        """Send a request and return the answer's payload. ``deadline`` is a ``time.monotonic()`` instant."""
        until = time.monotonic() + self._timeout_s if deadline is None else deadline
        while True:
            connection, used = self._take(until)
            try:
                answer = connection.request(kind, pieces, until)
            except (OSError, frames.BadFrame) as error:
                connection.close()
                if used and isinstance(error, ConnectionError):
                    continue  # the node closed it while idle: try another one, finally a new one
                raise self._translated(error) from None
            except BaseException:
                connection.close()
                raise
            self._give_back(connection)
            return connection.read(answer)

    def ask(self, handler: str, deadline: float | None = None, **arguments: Any) -> Any:
        """Call one of the node's handlers with JSON arguments; return its JSON answer."""
        request = frames.as_json({"what": handler, **arguments})
        return frames.read_json(self.request(FrameKind.ASK, request, deadline))

    def report_versions(self, report: Report, deadline: float | None = None) -> Any:
        """Report this process's model versions; return those that it must serve and open.

        For one thread only, so that all reports use one connection: see
        `hps.tiers.node.attached_processes`."""
        return frames.read_json(self.request(FrameKind.REPORT, frames.as_json(report), deadline))

    def close(self) -> None:
        """Close idle connections; requests in flight finish first. Idempotent."""
        self._closed = True
        while self._free:
            with suppress(IndexError):
                self._free.popleft().close()

    def _take(self, until: float) -> tuple[_NodeConnection, bool]:
        """Return a connection, and whether it was used before."""
        if self._closed:
            raise TierError(NAME, "closed")
        try:
            return self._free.pop(), True
        except IndexError:
            pass
        try:
            return _NodeConnection(self.path, self._hello, until), False
        except (OSError, frames.BadFrame) as error:
            raise self._translated(error) from None

    def _give_back(self, connection: _NodeConnection) -> None:
        self._free.append(connection)
        if self._closed:
            self.close()

    def _translated(self, error: Exception) -> TierError:
        if isinstance(error, TimeoutError):
            return TierTimeout(NAME, f"no answer from {self.path} in time")
        if isinstance(error, FileNotFoundError | ConnectionRefusedError):
            return TierError(NAME, f"no node listens at {self.path}; is it running?")
        return TierError(NAME, f"{self.path}: {error or type(error).__name__}")


class _NodeConnection:
    """A connection after a successful HELLO. Not thread-safe."""

    def __init__(self, path: Path, hello: dict[str, Any], until: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(min(_CONNECT_S, _remaining_s(until)))
            self._socket.connect(str(path))
            answer = self.request(FrameKind.HELLO, frames.as_json(hello), until)
            self._check(hello, frames.read_json(self.read(answer)))
        except BaseException:
            self._socket.close()
            raise

    @staticmethod
    def _check(hello: dict[str, Any], answer: dict[str, Any]) -> None:
        if answer["protocol"] != hello["protocol"]:
            raise TierMisfit(
                NAME,
                f"the node uses protocol version {answer['protocol']}, this process version "
                f"{hello['protocol']}; run both from one installation",
            )
        if answer["lacking"]:
            names = ", ".join(hello["tables"][i][0] for i in answer["lacking"][:3])
            raise TierMisfit(
                NAME, f"the node no longer serves {names} with the same shape; restart this process"
            )

    def request(self, kind: FrameKind, pieces: Pieces, until: float) -> tuple[int, bytearray]:
        """Send a request; return the kind and the payload of the answer.

        Raises OSError or BadFrame; the connection is unusable then."""
        self._socket.settimeout(_remaining_s(until))
        frames.send(self._socket, kind, pieces)
        self._socket.settimeout(_remaining_s(until))
        reply_kind, size = frames.receive_head(self._socket)
        return reply_kind, frames.receive_payload(self._socket, size)

    @staticmethod
    def read(answer: tuple[int, bytearray]) -> bytearray:
        """Return the payload of an ``OK`` answer; raise the error that a ``FAILED`` one reports."""
        kind, payload = answer
        if kind == FrameKind.OK:
            return payload
        failure = frames.read_json(payload)
        if failure["kind"] == "unavailable":
            raise Unavailable(failure["message"])
        if failure["kind"] == "late":
            raise TierTimeout(NAME, failure["message"])
        raise TierError(NAME, failure["message"])

    def close(self) -> None:
        self._socket.close()


def _remaining_s(until: float) -> float:
    """Return the seconds left. Raises TimeoutError if there are none."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
