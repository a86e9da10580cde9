"""Object stores and HDFS through PyArrow's file systems; others through fsspec."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from pyarrow import fs

from hps.config.model_schema import NAME_PATTERN
from hps.config.repository_uri import ARROW_SCHEMES, RepositoryUri
from hps.environment import gs_endpoint, s3_endpoint, s3_region
from hps.errors import ConfigError, HpsError
from hps.models.manifest import FILE_NAME
from hps.models.remote.store import store_error

_SPEC_FILE = "model.yaml"
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_WITHOUT_FOLDERS = ("s3", "gs")  # a folder there is a prefix of names
_REFUSED_HEAD = re.compile(r"(ACCESS_DENIED|HTTP status 40[013]).* HeadObject ")
_S3_ATTEMPTS = 2  # further ones are the download's


class ArrowStore:
    """A repository on a `pyarrow.fs.FileSystem`; see `RemoteStore`."""

    def __init__(self, uri: RepositoryUri, timeout_s: float) -> None:
        """Opens no connection. Raises ConfigError if the file system is not available."""
        self.uri = uri
        self._fs, self._root = open_filesystem(uri, timeout_s)
        self._has_folders = uri.scheme not in _WITHOUT_FOLDERS
        self._complete: set[tuple[str, int]] = set()

    def models(self) -> list[str]:
        names = [each for each in self._folders("") if re.fullmatch(NAME_PATTERN, each)]
        with self._errors(""):
            found = self._fs.get_file_info([self._at(f"{name}/{_SPEC_FILE}") for name in names])
        return sorted(n for n, info in zip(names, found, strict=True) if info.is_file)

    def versions(self, model: str) -> list[int]:
        """One listing, and a check of each version that was not complete before."""
        there = [int(each) for each in self._folders(model) if _VERSION.fullmatch(each)]
        known = {each for each in there if (model, each) in self._complete}
        new = [each for each in there if each not in known]
        with self._errors(model):
            found = self._fs.get_file_info([self._at(f"{model}/{v}/{FILE_NAME}") for v in new])
        known |= {version for version, info in zip(new, found, strict=True) if info.is_file}
        self._complete |= {(model, version) for version in known}
        return sorted(known)

    def read(self, path: str) -> bytes:
        with self._errors(path), self._fs.open_input_stream(self._at(path)) as file:
            return bytes(file.read())

    def open(self, path: str) -> _ArrowFile:
        with self._errors(path):
            return _ArrowFile(self, path, self._fs.open_input_file(self._at(path)))

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        with self._errors(""):
            found = self._fs.get_file_info([self._at(path) for path in paths])
        return [info.size if info.is_file else None for info in found]

    def exists(self, path: str) -> bool:
        with self._errors(path):
            return bool(self._fs.get_file_info(self._at(path)).is_file)

    def write(self, path: str, data: bytes) -> None:
        """Write a small file; object stores show it whole or not at all."""
        with self.create(path) as file:
            file.write(data)

    @contextmanager
    def create(self, path: str) -> Iterator[Any]:
        """A file opened for writing, complete at the end of the context."""
        with self._errors(path):
            if self._has_folders:
                self._fs.create_dir(self._at(path).rpartition("/")[0], recursive=True)
            with self._fs.open_output_stream(self._at(path)) as file:
                yield file

    def copy(self, path: str, target: str, size: int) -> bool:
        """Copy a file within the store, which most stores do by themselves; False if that fails.

        ``size``: that the file must have."""
        try:
            with self._errors(target):
                if self._has_folders:
                    self._fs.create_dir(self._at(target).rpartition("/")[0], recursive=True)
                self._fs.copy_file(self._at(path), self._at(target))
            return self.sizes([target]) == [size]
        except HpsError:
            return False

    def delete(self, path: str) -> None:
        with self._errors(path):
            self._fs.delete_file(self._at(path))

    def modified(self, folder: str) -> dict[str, float | None]:
        """The files of a folder, with their times of modification in Unix seconds; None if unknown."""
        with self._errors(folder):
            found = self._fs.get_file_info(fs.FileSelector(self._at(folder)))
        return {
            info.base_name: None if info.mtime is None else info.mtime.timestamp()
            for info in found
            if info.is_file
        }

    def _folders(self, path: str) -> list[str]:
        base = self._at(path)
        # Google's file system lists a folder only if an object has its name, so all files are listed there.
        recursive = self.uri.scheme == "gs"
        with self._errors(path):
            found = self._fs.get_file_info(fs.FileSelector(base, recursive=recursive))
        if recursive:
            below = (info.path.removeprefix(f"{base}/") for info in found if info.is_file)
            return sorted({each.partition("/")[0] for each in below if "/" in each})
        return sorted(info.base_name for info in found if info.type == fs.FileType.Directory)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # Arrow's errors are one or the other
            raise store_error(self.uri, path, self._explained(error)) from None

    def _explained(self, error: Exception) -> Exception:
        """The error of a listing instead of S3's HEAD, whose answer has no reason for a refusal."""
        if not _REFUSED_HEAD.search(str(error)):
            return error
        try:
            self._fs.get_file_info(fs.FileSelector(self._root))
        except (OSError, ValueError) as reason:
            return reason
        return error


class _ArrowFile:
    """An open file; see `RemoteFile`."""

    def __init__(self, store: ArrowStore, path: str, file: Any) -> None:
        self._store, self._path, self._file = store, path, file

    def read_at(self, size: int, offset: int) -> bytes:
        with self._store._errors(self._path):
            return bytes(self._file.read_at(size, offset))

    def close(self) -> None:
        self._file.close()


def open_filesystem(uri: RepositoryUri, timeout_s: float) -> tuple[fs.FileSystem, str]:
    """The file system of a URI, and the URI's path in it. Raises ConfigError."""
    try:
        if uri.scheme == "s3":
            return _s3(uri, timeout_s), _joined(uri.host, uri.path)
        if uri.scheme == "gs":
            return _gs(uri, timeout_s), _joined(uri.host.rpartition("@")[2], uri.path)
        if uri.scheme in ARROW_SCHEMES:
            found, path = fs.FileSystem.from_uri(str(uri))
            return found, path
    except (OSError, ValueError, ImportError) as error:
        first = str(error).partition("\n")[0]
        needs = "; install Java and Hadoop, and set JAVA_HOME, HADOOP_HOME and CLASSPATH"
        remedy = needs if uri.scheme == "hdfs" else ""
        raise ConfigError(f"{uri}: PyArrow cannot open its file system: {first}{remedy}") from None
    return _fsspec(uri)


def _s3(uri: RepositoryUri, timeout_s: float) -> fs.FileSystem:
    """Credentials, as the AWS SDK finds them; the endpoint of another store from the environment."""
    endpoint, region = s3_endpoint(), s3_region()
    if region is None and endpoint is None:
        try:
            region = fs.resolve_s3_region(uri.host)
        except OSError:
            region = None  # the first request fails with the reason
    return fs.S3FileSystem(
        region=region or "us-east-1",
        endpoint_override=endpoint,
        connect_timeout=min(timeout_s, 5.0),
        request_timeout=timeout_s,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_S3_ATTEMPTS),
    )


def _gs(uri: RepositoryUri, timeout_s: float) -> fs.FileSystem:
    """Credentials, as Google's SDK finds them; it would retry for 15 minutes by default."""
    endpoint = gs_endpoint()
    scheme, _, host = endpoint.rpartition("://") if endpoint else ("", "", None)
    return fs.GcsFileSystem(
        anonymous=uri.host.startswith("anonymous@") or host is not None,
        scheme=scheme or ("https" if host is None else "http"),
        endpoint_override=host,
        retry_time_limit=timedelta(seconds=max(1.0, timeout_s)),
    )


def _fsspec(uri: RepositoryUri) -> tuple[fs.FileSystem, str]:
    try:
        import fsspec

        found, path = fsspec.core.url_to_fs(str(uri))
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError(
            f"{uri}: fsspec cannot open a store '{uri.scheme}': {error}; install the package that "
            "it names, or correct the URI"
        ) from None
    handler: Any = fs.FSSpecHandler
    return fs.PyFileSystem(handler(found)), path.rstrip("/")


def _joined(*parts: str) -> str:
    return "/".join(part for part in parts if part)
