"""Sibling nodes as a source of a version's files, over their admin ports; the store is the fallback."""

from __future__ import annotations

import http.client
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from hps.models.manifest import FILE_NAME
from hps.models.remote.store import RemoteFile

log = logging.getLogger(__name__)

OpenFile = Callable[[str], RemoteFile]


@dataclass(frozen=True)
class PeerAccess:
    """Addresses of admin ports, ``http://host:port``, and how to authenticate there.

    ``api_key`` returns the current key, or None."""

    addresses: Sequence[str] = ()
    api_key: Callable[[], str | None] = lambda: None
    timeout_s: float = 10.0


class PeerVersion:
    """The peers that serve one version with the same manifest. Thread-safe.

    A peer that fails is not asked again for this version."""

    def __init__(self, access: PeerAccess, model: str, version: int, manifest: bytes) -> None:
        self._access = access
        self._prefix = f"/v1/models/{quote(model)}/versions/{version}/files"
        self._lock = threading.Lock()
        self._peers = [each for each in access.addresses if self._serves(each, manifest)]

    def __bool__(self) -> bool:
        return bool(self._peers)

    def open(self, path: str, store: OpenFile) -> RemoteFile:
        """A file of the version; ranges that no peer returns are read from the store's."""
        return _PeerFile(self, path, store)

    def read(self, path: str, size: int, offset: int) -> bytes | None:
        """A range of a file from one of the peers; None if none returns it."""
        while (address := self._next(offset)) is not None:
            try:
                data = self._get(address, path, size, offset)
            except (OSError, ValueError, http.client.HTTPException) as error:
                self._drop(address, error)
            else:
                if len(data) == size:
                    return data
                self._drop(address, ValueError(f"{len(data)} bytes instead of {size}"))
        return None

    def _next(self, offset: int) -> str | None:
        with self._lock:
            return self._peers[(offset >> 16) % len(self._peers)] if self._peers else None

    def _drop(self, address: str, error: Exception) -> None:
        with self._lock:
            if address in self._peers:
                self._peers.remove(address)
                log.warning("download: peer %s failed, skipping it: %s", address, error)

    def _serves(self, address: str, manifest: bytes) -> bool:
        try:
            found = self._get(address, FILE_NAME, len(manifest) + 1, 0)
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            log.info("download: peer %s does not serve this version: %s", address, reason)
            return False
        return found == manifest

    def _get(self, address: str, path: str, size: int, offset: int) -> bytes:
        headers = {"Range": f"bytes={offset}-{offset + size - 1}"}
        if key := self._access.api_key():
            headers["X-API-Key"] = key
        request = Request(f"{address}{self._prefix}/{quote(path)}", headers=headers)
        with closing(urlopen(request, timeout=self._access.timeout_s)) as reply:
            data: bytes = reply.read(size)
            return data


class _PeerFile:
    """See `RemoteFile`."""

    def __init__(self, peers: PeerVersion, path: str, store: OpenFile) -> None:
        self._peers, self._path, self._open_store = peers, path, store
        self._lock = threading.Lock()
        self._stored: RemoteFile | None = None

    def read_at(self, size: int, offset: int) -> bytes:
        data = self._peers.read(self._path, size, offset)
        return self._from_store().read_at(size, offset) if data is None else data

    def close(self) -> None:
        if self._stored is not None:
            self._stored.close()

    def _from_store(self) -> RemoteFile:
        with self._lock:
            if self._stored is None:
                self._stored = self._open_store(self._path)
            return self._stored
