"""One file of a store, downloaded for as long as it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hps.config.repository_uri import RepositoryUri
from hps.errors import ConfigError, ModelError, NotFound
from hps.models.remote.download import DownloadLimits, VersionDownload
from hps.models.remote.opening import open_store
from hps.models.remote.partial_file import PartialFile, RemoteEntry
from hps.types import Progress

_TIMEOUT_S = 30.0


@contextmanager
def downloaded_file(uri: RepositoryUri, progress: Progress) -> Iterator[Path]:
    """The file at ``uri`` in a temporary folder, under its name.

    Raises ConfigError, NotFound, StoreUnavailable, or ModelError if the disk is full."""
    folder, _, name = uri.rpartition("/")
    if not uri.path:
        raise ConfigError(f"{uri} names no file; write it as s3://bucket/folder/file.parquet")
    limits = DownloadLimits()
    store = open_store(RepositoryUri.parse(folder), _TIMEOUT_S)
    (size,) = store.sizes([name])
    if size is None:
        raise NotFound(f"{uri} does not exist")
    with TemporaryDirectory(prefix="hps-input-") as local:
        target = Path(local) / name
        try:
            entry = RemoteEntry(size, None)
            file = PartialFile(target, name, entry, limits.chunk_bytes)
            try:
                with progress.task(f"download {name}", size, "bytes") as step:
                    download = VersionDownload(
                        folder, lambda path, _again: store.open(path), limits
                    )
                    download.run([file], step)
            finally:
                file.close()
        except OSError as error:
            raise ModelError(
                f"downloading {uri}, {size} bytes, to {local} failed: {error.strerror}; free some "
                "space, or set TMPDIR to a larger disk"
            ) from error
        yield target
