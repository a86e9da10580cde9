"""Open the model repository at a location: a local folder, or a remote one by its URI."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hps.config.download_settings import DownloadSettings
from hps.config.repository_uri import Location, RepositoryUri
from hps.models.repository import Repository
from hps.types import NoProgress, Progress

if TYPE_CHECKING:
    from hps.models.remote.store import RemoteStore


def open_repository(
    location: Location,
    download: DownloadSettings | None = None,
    progress: Progress | None = None,
) -> Repository:
    """The repository at ``location``; of a remote one, ``download`` says where its versions go.

    Opens no connection. Raises ConfigError."""
    if isinstance(location, Path):
        return Repository(location)
    from hps.models.remote.cache import DownloadCache
    from hps.models.remote.download import DownloadLimits
    from hps.models.remote.repository import RemoteRepository

    chosen = download or DownloadSettings()
    return RemoteRepository(
        open_store(location, chosen.timeout_s),
        DownloadCache(chosen.folder.absolute(), chosen.capacity_bytes),
        DownloadLimits(chosen.parallel, chosen.chunk_bytes, chosen.attempts),
        progress or NoProgress(),
    )


def open_store(uri: RepositoryUri, timeout_s: float) -> RemoteStore:
    """The store of a URI. Opens no connection. Raises ConfigError."""
    from hps.models.remote.arrow_store import ArrowStore

    return ArrowStore(uri, timeout_s)
