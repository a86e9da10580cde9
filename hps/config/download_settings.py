"""Settings of `models.download`: how versions of a remote repository reach this machine."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from hps.config.model_schema import StrictModel

PEER_PATTERN = r"^https?://[^/@?#\s]+$"


class DownloadSettings(StrictModel):
    """Download of versions from a remote repository into a local cache."""

    folder: Path = Path("hps-data/models")
    """Folder of the cache; keep it on a disk that survives a restart, or each start downloads again."""
    capacity_bytes: int | None = Field(None, ge=1)
    """Largest size of the cache, from which the version that was served least recently is evicted; null:
    80 % of the folder's file system."""
    parallel: int = Field(8, ge=1, le=128)
    """Ranges of files that are downloaded at a time."""
    chunk_bytes: int = Field(8 << 20, ge=64 << 10, le=1 << 30)
    """Bytes of one range; a cut connection repeats at most so many."""
    mapped: bool = True
    """Download the mapped files of tables, too, which nodes with `tiers.mapped.enabled` off do not
    need."""
    attempts: int = Field(5, ge=1)
    """Attempts for each range, with growing pauses, before a download fails."""
    timeout_s: float = Field(30.0, gt=0)
    """Longest wait for the store's next bytes."""
