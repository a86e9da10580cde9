"""Read-only repositories on web servers, which list their versions in ``index.json``."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Sequence
from contextlib import closing
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from hps.config.repository_uri import RepositoryUri
from hps.environment import netrc_file
from hps.errors import ModelError
from hps.models.remote.store import FileMissing, StoreUnavailable, credentials_remedy

INDEX_FILE = "index.json"
_INDEX_FORMAT = 1
_RETRIED = {408, 425, 429}
_MAX_SMALL = 64 << 20


class WebStore:
    """A repository below an ``https://`` URI; see `RemoteStore`. Each read is one request."""

    def __init__(self, uri: RepositoryUri, timeout_s: float) -> None:
        self.uri = uri
        self._timeout_s = timeout_s
        self._credentials = _basic(uri) if uri.scheme == "https" else None

    def models(self) -> list[str]:
        return sorted(self._index())

    def versions(self, model: str) -> list[int]:
        index = self._index()
        if model not in index:
            raise FileMissing(f"{self.uri}/{INDEX_FILE} has no model '{model}'")
        return index[model]

    def read(self, path: str) -> bytes:
        return self.get(path, {}, _MAX_SMALL)[1]

    def open(self, path: str) -> _WebFile:
        return _WebFile(self, path)

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        return [self._size(path) for path in paths]

    def _size(self, path: str) -> int | None:
        try:
            with closing(self._request(path, {}, "HEAD")) as reply:
                length = reply.headers.get("Content-Length")
        except (FileMissing, ModelError):  # some servers answer 403 for a file that does not exist
            return None
        return None if length is None else int(length)

    def get(self, path: str, headers: dict[str, str], limit: int) -> tuple[int, bytes]:
        """Status and body of a GET, of at most ``limit`` bytes."""
        with closing(self._request(path, headers)) as reply:
            try:
                return reply.status, reply.read(limit)
            except (OSError, http.client.HTTPException) as error:
                where = f"{self.uri}/{path}"
                raise StoreUnavailable(f"{where}: the connection failed: {error!r}") from None

    def _request(self, path: str, headers: dict[str, str], method: str = "GET") -> Any:
        """Send a request; return its open response. Raises as `RemoteStore`."""
        where = f"{self.uri}/{path}"
        request = Request(f"{self.uri}/{quote(path)}", headers=headers, method=method)
        if self._credentials is not None:
            # Not sent to the host of a redirection.
            request.add_unredirected_header("Authorization", self._credentials)
        try:
            return urlopen(request, timeout=self._timeout_s)
        except HTTPError as error:
            with error:
                raise self._refused(where, error.code, error.reason) from None
        except URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise ModelError(
                    f"{where}: the server's certificate is not trusted ({error.reason.verify_message}); set "
                    "SSL_CERT_FILE to the roots that issued it"
                ) from None
            raise StoreUnavailable(
                f"{where}: the server does not respond: {error.reason}"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise StoreUnavailable(f"{where}: the connection failed: {error!r}") from None

    def _refused(self, where: str, status: int, reason: str) -> Exception:
        if status in (404, 410):
            return FileMissing(f"{where} does not exist")
        if status in (401, 403, 407):
            remedy = credentials_remedy("https")
            return ModelError(f"{where}: access denied (HTTP {status} {reason}); {remedy}")
        if status in _RETRIED or status >= 500:
            return StoreUnavailable(f"{where}: the server failed: HTTP {status} {reason}")
        return ModelError(f"{where}: the server rejects the request: HTTP {status} {reason}")

    def _index(self) -> dict[str, list[int]]:
        where = f"{self.uri}/{INDEX_FILE}"
        try:
            data = json.loads(self.read(INDEX_FILE))
        except FileMissing:
            raise ModelError(
                f"{where} does not exist: a web server's repository is listed by it; write it with "
                "`hps model index DIR`, or name model and version in models.serve"
            ) from None
        except ValueError as error:
            raise ModelError(
                f"{where}: not JSON: {error}; write it with `hps model index DIR`"
            ) from None
        return _checked(where, data)


class _WebFile:
    """See `RemoteFile`."""

    def __init__(self, store: WebStore, path: str) -> None:
        self._store, self._path = store, path

    def read_at(self, size: int, offset: int) -> bytes:
        wanted = {"Range": f"bytes={offset}-{offset + size - 1}"}
        status, data = self._store.get(self._path, wanted, size)
        if status != 206 and offset > 0:
            raise ModelError(
                f"{self._store.uri}/{self._path}: the server ignores range requests (HTTP {status}); serve "
                "the files with nginx or the like, or raise models.download.chunk_bytes above their size"
            )
        return data

    def close(self) -> None:
        pass


def _checked(where: str, data: Any) -> dict[str, list[int]]:
    models = data.get("models") if isinstance(data, dict) else None
    if not isinstance(models, dict) or data.get("format") != _INDEX_FORMAT:
        raise ModelError(f'{where}: expected {{"format": 1, "models": {{"name": [1, 2]}}}}')
    for name, versions in models.items():
        if not isinstance(versions, list) or not all(
            type(each) is int and each > 0 for each in versions
        ):
            raise ModelError(f"{where}: models.{name}: expected a list of versions from 1")
    return {name: sorted(versions) for name, versions in models.items()}


def index_of(models: dict[str, list[int]]) -> str:
    """The text of an index."""
    return json.dumps({"format": _INDEX_FORMAT, "models": models}, indent=2) + "\n"


def _basic(uri: RepositoryUri) -> str | None:
    """The header of the host's credentials in the user's netrc file."""
    import base64
    import netrc

    host = uri.host.partition(":")[0]
    try:
        found = netrc.netrc(netrc_file()).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return None
    if found is None:
        return None
    return "Basic " + base64.b64encode(f"{found[0]}:{found[2]}".encode()).decode()
