"""Arguments and options of ``hps predict``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hps.cli.command_options import argument, option
from hps.cli.options import (
    HTTP,
    Credentials,
    LocalNode,
    ReportOptions,
    RepositoryLocation,
    location_argument,
)


class EmptyCells(StrEnum):
    """Treatment of a feature's empty cells."""

    empty = "empty"
    default = "default"


@dataclass(frozen=True, kw_only=True)
class PredictOptions(ReportOptions):
    model: str = argument()
    """The model to score with."""
    file: RepositoryLocation | None = location_argument(None)
    """File of samples to score: *.parquet, *.csv, *.tsv or *.jsonl; or its URI, such as
    s3://bucket/day.parquet."""
    out: Path | None = option(None)
    """File to write the scores to: *.parquet, *.csv, *.jsonl or *.npz."""
    json_text: str | None = option(None, "--json")
    """One request as JSON; - reads it from stdin."""
    inputs: list[str] | None = option(None, "--input", "-i", metavar="NAME=VALUES")
    """One input of a single request; repeat for each input."""
    explain: bool = option(False)
    """Also show the vectors, the tiers of their rows, and the dense inputs."""
    top_k: int | None = option(None, min=1)
    """Return only the k samples with the highest scores."""
    batch_size: int = option(1024, min=1)
    """Samples per request, for a file."""
    columns: str | None = option(None, metavar="NAME[,NAME...]")
    """Names of all columns, for a CSV or TSV file without a header line."""
    hex_keys: bool = option(False)
    """Keys in text are hexadecimal, with or without 0x."""
    missing: EmptyCells = option(EmptyCells.empty)
    """Treat an empty cell or null of a feature as a sample without keys (empty), or as an unknown
    key (default)."""
    server: str = option(HTTP, "--server", "-s", metavar="URL")
    """The server's address for requests."""
    local: LocalNode
    credentials: Credentials
