"""Stores of remote repositories: the protocol, and the errors that a store's failures become."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from hps.config.repository_uri import RepositoryUri
from hps.errors import ModelError, NotFound, Unavailable


class StoreUnavailable(Unavailable):
    """A store that does not respond, or failed for now; a retry may succeed."""


class FileMissing(NotFound):
    """A file or folder that the store does not have."""


class RemoteFile(Protocol):
    """An open file of a store. Thread-safe."""

    def read_at(self, size: int, offset: int) -> bytes:
        """Read up to ``size`` bytes at ``offset``; fewer only at the end of the file."""
        ...

    def close(self) -> None: ...


class RemoteStore(Protocol):
    """Files below the URI of a repository; paths are relative, with slashes. Thread-safe.

    Raises StoreUnavailable, FileMissing, or ModelError for what a retry would not change."""

    uri: RepositoryUri

    def models(self) -> list[str]:
        """Return the models, in alphabetical order: folders with a ``model.yaml``."""
        ...

    def versions(self, model: str) -> list[int]:
        """Return the complete versions of a model, ascending: those with a ``manifest.json``."""
        ...

    def read(self, path: str) -> bytes:
        """Read a small file."""
        ...

    def open(self, path: str) -> RemoteFile: ...

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        """Return the files' sizes in bytes; None for one that does not exist."""
        ...


_CREDENTIALS: Mapping[str, str] = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role of the instance",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or use the instance's service account",
    "abfs": "set AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET, or use a managed identity",
    "hdfs": "get a Kerberos ticket (kinit), or set HADOOP_USER_NAME",
    "https": "put the host's credentials into ~/.netrc or the file that NETRC names",
}
_CREDENTIALS_OF = {"abfss": "abfs", "http": "https"}
# The first pattern that an error's text contains decides.
_EXPIRED = re.compile(
    r"expired.?token|token.{0,20}expired|expired|invalid_grant|TokenRefreshRequired", re.I
)
_UNKNOWN_KEY = re.compile(
    r"invalid.?access.?key.?id|signature.?does.?not.?match|invalid.?client.?token|unauthenticated"
    r"|status 401|unrecognized.?client|AuthenticationFailed|no.?credential|could not.{0,20}credentials",
    re.I,
)
_DENIED = re.compile(
    r"access.?denied|forbidden|status 403|permission.?denied|AuthorizationFailure", re.I
)
_NO_BUCKET = re.compile(
    r"no.?such.?bucket|bucket does not exist|ContainerNotFound|container does not exist", re.I
)
# Arrow's other file systems have no FileNotFoundError.
_MISSING = re.compile(r"No such file or directory '|Path does not exist '")
_REGION = re.compile(
    r"PermanentRedirect|AuthorizationHeaderMalformed|status 301|wrong region", re.I
)


def credentials_remedy(scheme: str) -> str:
    """How the SDK of a store reads credentials, as a remedy."""
    fallback = "set the credentials that the store's SDK reads"
    return _CREDENTIALS.get(_CREDENTIALS_OF.get(scheme, scheme), fallback)


def store_error(uri: RepositoryUri, path: str, error: Exception) -> Exception:
    """The error to raise for a failure of a store's library at ``path``."""
    where = f"{uri}/{path}" if path else str(uri)
    text = " ".join(str(error).split())
    remedy = credentials_remedy(uri.scheme)
    if _NO_BUCKET.search(text):
        return ModelError(f"{where}: '{uri.host}' does not exist; create it, or correct the URI")
    if isinstance(error, FileNotFoundError) or _MISSING.search(text):
        return FileMissing(f"{where} does not exist")
    if _EXPIRED.search(text):
        return ModelError(
            f"{where}: the credentials have expired; renew them ({remedy}), then try again; a download "
            f"resumes where it stopped ({_short(text)})"
        )
    if _UNKNOWN_KEY.search(text):
        return ModelError(
            f"{where}: the credentials are missing or wrong; {remedy} ({_short(text)})"
        )
    if _DENIED.search(text):
        return ModelError(
            f"{where}: access denied; allow listing and reading (and writing, to publish) for the "
            f"credentials in use, or {remedy} ({_short(text)})"
        )
    if _REGION.search(text):
        return ModelError(
            f"{where}: the bucket is in another region; set AWS_REGION ({_short(text)})"
        )
    return StoreUnavailable(f"{where}: the store failed or does not respond: {_short(text)}")


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:299]}…"
