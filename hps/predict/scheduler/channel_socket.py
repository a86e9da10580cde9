"""Unix socket over which other processes get channels to the batch scheduler.

A connection gets one channel, whose files the node sends at once. It stays open as long as both processes
live: each learns of the other's end by it."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from hps.errors import TierError, Unavailable
from hps.predict.scheduler.client import ChannelFiles, SchedulerClient
from hps.predict.scheduler.host import SchedulerHost

log = logging.getLogger(__name__)
SOCKET = "gpu.sock"
_HELLO = b"hps-scheduler-1"
_TIMEOUT_S = 10.0
NODE_ENDED = "the node's process, which runs the GPU, has ended; retry once it is back"


class ChannelListener:
    """Listens at ``folder``/gpu.sock until it is closed, with one thread per connection.

    ``folder`` must be private to this user."""

    def __init__(self, folder: Path, host: SchedulerHost) -> None:
        self.path = folder / SOCKET
        self._host = host
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.path.unlink(missing_ok=True)
        self._listener.bind(str(self.path))
        self._listener.listen()
        threading.Thread(target=self._accept, name="hps-scheduler-socket", daemon=True).start()

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

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # possibly out of file descriptors
                continue
            self._connections.add(connection)
            if self._closed:  # `close` may not have seen this connection
                connection.close()
                return
            threading.Thread(
                target=self._serve,
                args=(connection,),
                name="hps-scheduler-connection",
                daemon=True,
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            number, files = self._host.open_channel()
        except (OSError, Unavailable) as error:
            log.warning("a process got no channel to the GPU: %s", error)
        else:
            self._send(connection, files)
            with suppress(OSError):
                while connection.recv(1):
                    pass  # it sends nothing: this waits for its end
            if not self._closed:
                self._host.close_channel(number)
        self._connections.discard(connection)
        connection.close()

    def _send(self, connection: socket.socket, files: ChannelFiles) -> None:
        try:
            socket.send_fds(connection, [_HELLO], [files.memory, files.wake, files.woken])
        except OSError as error:  # the process has ended
            log.warning("a process got no channel to the GPU: %s", error)
        finally:
            files.close()


def connect(path: Path | str) -> SchedulerClient:
    """Return a client of the scheduler in the node's process. Raises ``TierError`` if it cannot be reached.

    When that process ends, the client's requests fail with ``Unavailable``."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_TIMEOUT_S)
    files: list[int] = []
    try:
        connection.connect(str(path))
        hello, files, _, _ = socket.recv_fds(connection, len(_HELLO), 3)
        for each in files:
            os.set_inheritable(each, False)
        if hello != _HELLO or len(files) != 3:
            raise Unavailable("it answers in another version's way" if hello else "it is stopping")
    except (OSError, Unavailable) as error:
        connection.close()
        for each in files:
            os.close(each)
        raise TierError("node", f"no channel to its GPU: {error}") from error
    connection.settimeout(None)

    def disconnect() -> None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that watches

    client = SchedulerClient(ChannelFiles(*files), disconnect)

    def watch() -> None:
        with suppress(OSError):
            connection.recv(1)
        connection.close()
        client.fail(NODE_ENDED)

    threading.Thread(target=watch, name="hps-scheduler-node", daemon=True).start()
    return client
