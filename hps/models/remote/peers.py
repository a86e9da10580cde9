"""Sibling nodes as a source of a version's files, over their admin ports; the store is the fallback."""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from hps.backoff import Backoff
from hps.models.manifest import FILE_NAME
from hps.models.remote.store import RemoteFile

log = logging.getLogger(__name__)

OpenFile = Callable[[str], RemoteFile]
Read = TypeVar("Read")
_FAILURES = OSError, ValueError, http.client.HTTPException
# Half a second in all: longer than a node takes to read the ranges before this one, and short beside the
# download of a range from the store.
_BUSY_ATTEMPTS = 6
_BUSY_BACKOFF = Backoff(0.02, 0.5)


class PeerBusy(Exception):
    """A peer that reads as many ranges as it may, and answers again soon."""


@dataclass(frozen=True)
class PeerAccess:
    """Addresses of admin ports, ``http://host:port``, and how to authenticate there.

    ``api_key`` returns the current key, or None."""

    addresses: Sequence[str] = ()
    api_key: Callable[[], str | None] = lambda: None
    timeout_s: float = 10.0


class PeerVersion:
    """The peers that serve one version with the same manifest. Thread-safe.

    A peer that fails is not asked again for this version. One that is busy is asked again after a pause."""

    def __init__(self, access: PeerAccess, model: str, version: int, manifest: bytes) -> None:
        self._access = access
        self._prefix = f"/v1/models/{quote(model)}/versions/{version}/files"
        self._lock = threading.Lock()
        self._turn = 0
        self._sources: defaultdict[str, set[str]] = defaultdict(
            set
        )  # peers by the paths they returned
        self._peers = [each for each in access.addresses if self._serves(each, manifest)]

    def __bool__(self) -> bool:
        return bool(self._peers)

    def open(self, path: str, store: OpenFile, store_bytes: int = 0) -> RemoteFile:
        """A file of the version; its first ``store_bytes``, and what no peer returns, are the store's."""
        return _PeerFile(self, path, store, store_bytes)

    def read(self, path: str, size: int, offset: int) -> bytes | None:
        """A range of a file from one of the peers; None if none returns it, or all are busy."""
        try:
            return _while_busy(lambda: self._read(path, size, offset))
        except PeerBusy:
            return None

    def distrust(self, path: str) -> None:
        """Drop the peers that returned parts of a file which does not match its checksum."""
        with self._lock:
            sources = self._sources.pop(path, set())
        for address in sources:
            self._drop(address, ValueError(f"{path} does not match its checksum"))

    def _read(self, path: str, size: int, offset: int) -> bytes | None:
        while (address := self._next()) is not None:
            try:
                data = self._get(address, path, size, offset)
            except _FAILURES as error:
                self._drop(address, error)
                continue
            if len(data) == size:
                with self._lock:
                    self._sources[path].add(address)
                return data
            self._drop(address, ValueError(f"{len(data)} bytes instead of {size}"))
        return None

    def _next(self) -> str | None:
        """The peers in turn, so that the one after a busy peer is asked next."""
        with self._lock:
            self._turn += 1
            return self._peers[self._turn % len(self._peers)] if self._peers else None

    def _drop(self, address: str, error: Exception) -> None:
        with self._lock:
            if address in self._peers:
                self._peers.remove(address)
                log.warning("download: peer %s failed, skipping it: %s", address, error)

    def _serves(self, address: str, manifest: bytes) -> bool:
        try:
            found = _while_busy(lambda: self._get(address, FILE_NAME, len(manifest) + 1, 0))
        except (PeerBusy, *_FAILURES) as error:
            reason = error.reason if isinstance(error, URLError) else error
            log.info("download: peer %s does not serve this version: %s", address, reason)
            return False
        return found == manifest

    def _get(self, address: str, path: str, size: int, offset: int) -> bytes:
        headers = {"Range": f"bytes={offset}-{offset + size - 1}"}
        if key := self._access.api_key():
            headers["X-API-Key"] = key
        request = Request(f"{address}{self._prefix}/{quote(path)}", headers=headers)
        try:
            with closing(urlopen(request, timeout=self._access.timeout_s)) as reply:
                data: bytes = reply.read(size)
                return data
        except HTTPError as error:
            error.close()
            if error.code == http.HTTPStatus.SERVICE_UNAVAILABLE:
                raise PeerBusy(f"{address} is busy") from None
            raise


def _while_busy(read: Callable[[], Read]) -> Read:
    """Call ``read``, repeatedly with pauses while a peer is busy. Raises PeerBusy after the last attempt."""
    for attempt in range(1, _BUSY_ATTEMPTS):
        try:
            return read()
        except PeerBusy:
            time.sleep(_BUSY_BACKOFF.pause_s(attempt))
    return read()


class _PeerFile:
    """See `RemoteFile`."""

    def __init__(self, peers: PeerVersion, path: str, store: OpenFile, store_bytes: int) -> None:
        self._peers, self._path, self._open_store = peers, path, store
        self._store_bytes = store_bytes
        self._lock = threading.Lock()
        self._stored: RemoteFile | None = None

    def read_at(self, size: int, offset: int) -> bytes:
        own = max(0, min(size, self._store_bytes - offset))
        head = self._from_store().read_at(own, offset) if own else b""
        if len(head) < own or own == size:
            return head
        data = self._peers.read(self._path, size - own, offset + own)
        return head + (
            self._from_store().read_at(size - own, offset + own) if data is None else data
        )

    def close(self) -> None:
        if self._stored is not None:
            self._stored.close()

    def _from_store(self) -> RemoteFile:
        with self._lock:
            if self._stored is None:
                self._stored = self._open_store(self._path)
            return self._stored
