"""Open the model repository at a location: a local folder, or a remote one by its URI."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hps.config.download_settings import DownloadSettings
from hps.config.repository_uri import WEB_SCHEMES, Location, RepositoryUri
from hps.config.schema import ModelsSettings
from hps.config.secrets import Secret
from hps.errors import ConfigError
from hps.models.repository import Repository
from hps.types import NoProgress, Progress

if TYPE_CHECKING:
    from hps.models.remote.arrow_store import ArrowStore
    from hps.models.remote.peers import PeerAccess
    from hps.models.remote.store import RemoteStore


def open_repository(
    location: Location,
    download: DownloadSettings | None = None,
    progress: Progress | None = None,
    peers: PeerAccess | None = None,
) -> Repository:
    """The repository at ``location``; of a remote one, ``download`` says where its versions go.

    ``peers``: nodes that are asked before the store. Opens no connection. Raises ConfigError."""
    if isinstance(location, Path):
        return Repository(location)
    from hps.models.remote.cache import DownloadCache
    from hps.models.remote.download import DownloadLimits
    from hps.models.remote.repository import RemoteRepository

    chosen = download or DownloadSettings()
    return RemoteRepository(
        open_store(location, chosen.timeout_s),
        DownloadCache(chosen.folder.absolute(), chosen.capacity_bytes),
        DownloadLimits(chosen.parallel, chosen.chunk_bytes, chosen.attempts, chosen.mapped),
        progress or NoProgress(),
        peers,
    )


def repository_of(models: ModelsSettings, progress: Progress | None = None) -> Repository:
    """The repository of the settings; see `open_repository`."""
    peers = None
    if models.peers and not isinstance(models.repository, Path):
        from hps.models.remote.peers import PeerAccess

        key = Secret(None, models.peers_api_key_file, "models.peers_api_key_file", api_key=True)
        peers = PeerAccess(models.peers, key.now, models.download.timeout_s)
    return open_repository(models.repository, models.download, progress, peers)


def open_store(uri: RepositoryUri, timeout_s: float) -> RemoteStore:
    """The store of a URI. Opens no connection. Raises ConfigError."""
    if uri.scheme in WEB_SCHEMES:
        from hps.models.remote.web_store import WebStore

        return WebStore(uri, timeout_s)
    from hps.models.remote.arrow_store import ArrowStore

    return ArrowStore(uri, timeout_s)


def open_writable_store(uri: RepositoryUri, timeout_s: float = 30.0) -> ArrowStore:
    """The store of a URI to publish to. Raises ConfigError."""
    from hps.models.remote.arrow_store import ArrowStore

    if uri.is_read_only:
        raise ConfigError(
            f"{uri}: repositories on web servers are read-only; publish to the store behind it, or copy the "
            "folder there and write index.json with `hps model index`"
        )
    return ArrowStore(uri, timeout_s)
