"""``hps updates publish``: send rows to Kafka, from files, versions or their difference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hps.cli.command_options import argument, option
from hps.cli.options import DEFAULT_REPOSITORY, RepositoryLocation, repository_option
from hps.cli.progress import ConsoleProgress
from hps.cli.updates_kafka import KafkaOptions
from hps.cli.updates_sources import BLOCK, PublishedRows, from_file, from_versions
from hps.cli.value_parsing import parse_version
from hps.errors import ConfigError
from hps.tools.output import count, plural, print_json, print_line, print_table, warn

if TYPE_CHECKING:
    from hps.config import Configuration
    from hps.config.update_settings import KafkaSettings
    from hps.tiers.positions import TableChanges

EXAMPLES = """\b
Examples:
  hps updates publish ctr --base 3 --new 4 -b kafka:9092     # what 4 changes
  hps updates publish ctr user --new 4 --config hps.yaml --rate 50000
  hps updates publish ctr user --file changes.parquet --brokers kafka:9092
  hps updates publish ctr user --file a.npz -b kafka:9092 --format hps \\
      --key-bits 32
  hps updates publish ctr --base 3 --new 4 --dry-run         # count only
"""
_PAUSES_PER_S = 10


class WireFormat(StrEnum):
    native = "native"
    hps = "hps"


class KeyBits(StrEnum):
    narrow = "32"
    wide = "64"


@dataclass(frozen=True, kw_only=True)
class PublishOptions(KafkaOptions):
    model: str = argument()
    """The model."""
    table: str | None = argument(None)
    """Only this table."""
    new: int | None = option(None, "--new", "-n", min=1)
    """Send the rows of this version of the model."""
    base: int | None = option(None, min=1)
    """Send only the changes from this version to --new."""
    file: list[Path] | None = option(None, "--file", "-f")
    """Send the rows of this .parquet or .npz file; repeatable."""
    repository: RepositoryLocation | None = repository_option(None, "--repository", "-r")
    """Model repository; default: the configuration's, else models."""
    format: WireFormat = option(WireFormat.native)
    """Format of the messages."""
    partitions: int = option(8, min=1)
    """Number of key groups; must be that of HPS's producers."""
    key_bits: KeyBits | None = option(None)
    """Size of keys in HPS's format; default: the table's, 64 for --file."""
    at: str | None = option(None, metavar="VERSION")
    """Version of the rows: a number, a time or now."""
    ttl: int = option(0, min=0, metavar="SECONDS")
    """Nodes skip the rows if they read them later than this after publishing; 0: never."""
    step: int = option(0, min=0)
    """Training step of the rows; 0: none."""
    dense_version: int = option(0, min=0)
    """Version of the model whose network the rows belong to; 0: none."""
    row_format: str | None = option(None, metavar="FORMAT")
    """Convert the rows, to int8 for instance, so that messages are shorter."""
    deletions: bool = option(True, "--deletions/--no-deletions")
    """Send deletions, too."""
    rate: int | None = option(None, min=1)
    """Maximum number of rows per second."""
    dry_run: bool = option(False)
    """Count the rows; send nothing."""


def publish(options: PublishOptions) -> None:
    """Send rows to the nodes that serve a model, through Kafka.

    Rows get the version of the files they come from, so that rows streamed later are kept; --at sets
    another version. --file reads files of `hps store export`. Exit code 0: Kafka has all rows."""
    attributes = options.ttl or options.step or options.dense_version
    if options.format is WireFormat.hps and (options.at is not None or attributes):
        raise ConfigError(
            "--at, --ttl, --step and --dense-version: HPS's format has no such fields; use --format native"
        )
    if options.format is WireFormat.native and options.key_bits is not None:
        raise ConfigError(
            "--key-bits is for --format hps: native messages always have 64-bit keys; remove it"
        )
    if options.format is WireFormat.hps and options.row_format is not None:
        raise ConfigError("--row-format: HPS's format has float32 rows; use --format native")
    configuration = options.read()
    parts = _parts(options, configuration)
    kafka = None if options.dry_run else options.kafka(configuration)
    began = time.monotonic()
    for part in parts:
        with _sender(part, kafka, options) as send:
            _send(part, send, options)
    _show(parts, time.monotonic() - began, options)
    if lost := sum(part.unsent for part in parts):
        warn(
            f"{plural(lost, 'deletion')} not sent: HPS's format has none; use --format native, or give "
            "--no-deletions"
        )
        raise typer.Exit(1)


def _parts(options: PublishOptions, configuration: Configuration | None) -> list[PublishedRows]:
    """The rows to send, by table."""
    version = None if options.at is None else _version(options.at)
    model, table = options.model, options.table
    if options.file:
        if options.new is not None or options.base is not None:
            raise ConfigError("--file and --new exclude each other; remove one")
        parts = [from_file(path, model, table, version) for path in options.file]
    elif options.new is None:
        raise ConfigError("nothing to send: give --new VERSION, --base and --new, or --file")
    else:
        repository = options.repository
        if repository is None:
            repository = (
                configuration.settings.models.repository if configuration else DEFAULT_REPOSITORY
            )
        parts = list(from_versions(repository, model, table, options.base, options.new, version))
    if options.key_bits is not None:
        for part in parts:
            part.key_bits = 32 if options.key_bits is KeyBits.narrow else 64
    return parts


def _version(text: str) -> int:
    from hps.updates.version_clock import VersionClock

    return VersionClock().now() if text == "now" else parse_version(text)


# -- sending ---------------------------------------------------------------------------------------


Send = Callable[["TableChanges"], None]


@contextmanager
def _sender(
    part: PublishedRows, kafka: KafkaSettings | None, options: PublishOptions
) -> Iterator[Send]:
    """Yield a function that sends changes; it does nothing without ``kafka``. Raises Unavailable."""
    if kafka is None:
        yield lambda _changes: None
        return
    import numpy as np

    from hps.updates import Producer

    with Producer(
        kafka.brokers,
        model=options.model,
        format=options.format.value,
        partitions=options.partitions,
        key_bits=part.key_bits,
        options=kafka.client_options(),
    ) as producer:

        def send(some: TableChanges) -> None:
            rows = some.vectors
            if options.format is WireFormat.hps:
                producer.send(
                    part.table, some.keys, rows.astype(np.float32, copy=False), ttl_s=options.ttl
                )
            else:
                versions = np.concatenate([some.versions, some.deleted_versions])
                producer.send(
                    part.table,
                    some.keys,
                    rows,
                    versions,
                    some.deleted,
                    ttl_s=options.ttl,
                    step=options.step,
                    dense_version=options.dense_version,
                    row_format=options.row_format,
                )

        yield send


def _send(part: PublishedRows, send: Send, options: PublishOptions) -> None:
    rate = options.rate
    piece = BLOCK if rate is None else max(1, min(BLOCK, rate // _PAUSES_PER_S))
    began = time.monotonic()
    with ConsoleProgress().task(f"sending {part.table}", part.total) as step:
        for changes in part.changes(step):
            kept = changes
            if options.format is WireFormat.hps or not options.deletions:
                part.unsent += len(changes.deleted) if options.deletions else 0
                none = slice(0)
                kept = replace(
                    changes,
                    deleted=changes.deleted[none],
                    deleted_versions=changes.deleted_versions[none],
                )
            for some in _pieces(kept, piece):
                send(some)
                part.rows += len(some.keys)
                part.deleted += len(some.deleted)
                if rate is not None:
                    due = began + (part.rows + part.deleted) / rate
                    time.sleep(max(0.0, due - time.monotonic()))


def _pieces(changes: TableChanges, size: int) -> Iterator[TableChanges]:
    """Split the changes, rows and then deletions, into pieces of ``size``."""
    from hps.tiers.positions import TableChanges

    for start in range(0, max(len(changes.keys), len(changes.deleted)), size):
        part = slice(start, start + size)
        yield TableChanges(
            changes.keys[part],
            changes.vectors[part],
            changes.versions[part],
            changes.deleted[part],
            changes.deleted_versions[part],
        )


def _show(parts: list[PublishedRows], seconds: float, options: PublishOptions) -> None:
    model, dry_run = options.model, options.dry_run
    if options.as_json:
        print_json(
            [
                {
                    "model": model,
                    "table": part.table,
                    "rows": part.rows,
                    "deleted": part.deleted,
                    "unsent_deletions": part.unsent,
                    "sent": not dry_run,
                    "seconds": seconds,
                }
                for part in parts
            ]
        )
        return
    print_table(
        ("table", "rows", "deletions"),
        [(f"{model}/{part.table}", count(part.rows), count(part.deleted)) for part in parts],
    )
    rows = sum(part.rows + part.deleted for part in parts)
    if dry_run:
        print_line(f"Would send {plural(rows, 'change')}")
    else:
        rate = f", {round(rows / seconds):,} a second" if seconds > 1 else ""
        print_line(f"Sent {plural(rows, 'change')}{rate}")
