"""Settings of `updates`: rows that change while they are served."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from hps.config.checks import ConfigFinding, finding
from hps.config.model_schema import StrictModel
from hps.config.secrets import read_secret

NODE = "hps.node."
"""Prefix of the groups of nodes; the node's name follows, by default its host's."""

_OURS = (
    "bootstrap.servers",
    "metadata.broker.list",
    "group.id",
    "enable.auto.commit",
    "enable.auto.offset.store",
)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    return text


class _SourceSettings(StrictModel):
    """Settings of every update source."""

    models: list[Annotated[str, AfterValidator(_pattern)]] = [".+"]
    """Models that are updated: regular expressions, one of which must match the whole name."""
    max_ahead_s: float = Field(3600.0, ge=0, le=1e9)
    """Versions further ahead of this machine's clock are dead letters: they would win until that time."""

    def takes(self, model: str) -> bool:
        """True if ``model`` is updated."""
        return any(re.fullmatch(pattern, model) for pattern in self.models)


class KafkaSettings(_SourceSettings):
    """Updates from Kafka: topics `hps_updates.<model>` in the native format, and HPS's
    `hps_et.<model>.<table>`."""

    brokers: str = Field(min_length=1)
    """`host:port`, several separated by commas."""
    group: str | None = Field(None, pattern=r"^[a-zA-Z0-9_.\-]{1,200}$")
    """Name of this reader, unique and the same after each restart; null: the host's name."""
    shared_writer: Literal["nodes", "ingest"] = "nodes"
    """Writer of Redis: the nodes, or only `hps ingest`; the same in all configurations."""
    shared_group: str = Field("hps.shared", pattern=r"^[a-zA-Z0-9_.\-]{1,200}$")
    """Consumer group of the writers of Redis; deployments with other Redis servers need other groups."""
    hps_offsets: bool = False
    """Without stored positions, start at the offsets of HPS's consumer groups, not at the beginning."""
    dead_letters: str = Field("hps_dead_letters", pattern=r"^[a-zA-Z0-9_.\-]{1,249}$")
    """Topic of dead letters, each with the reason."""
    max_message_bytes: int = Field(16 << 20, ge=1024, le=1_000_000_000)
    """Larger messages are dead letters."""
    prefetch_kb: int = Field(65_536, ge=1024, le=2_097_151)
    """Memory for prefetched messages, in kilobytes."""
    options: dict[str, str | int | float | bool] = Field({}, repr=False)
    """Options of librdkafka, such as `security.protocol`; never shown, since some are secrets."""
    options_files: dict[str, Path] = {}
    """Files with further such options, as `sasl.password`; user and password are read again."""

    def violations(self) -> Iterator[ConfigFinding]:
        for where, names in (("options", self.options), ("options_files", self.options_files)):
            for name in names:
                if name in _OURS:
                    yield ConfigFinding((where, name), "is set by hps; remove it")
        for name in self.options_files:
            if name in self.options:
                message = "is also in options; remove one of them"
                yield ConfigFinding(("options_files", name), message)

    def client_options(self) -> dict[str, str | int | float | bool]:
        """All of `options`, including those in files. Raises ConfigError if one cannot be read."""
        read = {
            name: read_secret(path, f"updates.kafka.options_files.{name}")
            for name, path in self.options_files.items()
        }
        return {**self.options, **read}


class DirectorySettings(_SourceSettings):
    """Updates from files that appear in a folder: native messages, Parquet and npz."""

    path: Path
    """The folder; files are applied in the order of their names."""
    keep_applied: bool = True
    """Move applied files to `applied/` in the folder; off: remove them."""


class UpdatesSettings(StrictModel):
    """Updates of rows while they are served."""

    max_staleness_s: float | None = Field(None, gt=0)
    """Age of unapplied updates from which served rows count as stale; null: never."""
    on_stale: Literal["flag", "refuse"] = "flag"
    """Treatment of requests while rows are stale: answered with `hps_stale_s`, or rejected (503)."""
    max_lag_at_switch: int = Field(0, ge=0)
    """Messages that a version may miss when it is loaded or switched to, besides those of the last second."""
    hold_for_dense: bool = False
    """Let rows of a newer network than the current version's wait until that version is the current one."""
    hold_at_most_s: float = Field(3600.0, gt=0)
    """The longest such wait; then the rows are applied, logged and counted."""
    promote_queue_keys: int = Field(1 << 20, ge=1)
    """Queued keys for promotion into the caches; more are dropped and counted."""
    kafka: KafkaSettings | None = None
    """Updates from Kafka; null: none."""
    directory: DirectorySettings | None = None
    """Updates from files in a folder; null: none."""

    def violations(self) -> Iterator[ConfigFinding]:
        has_streams = self.kafka is not None or self.directory is not None
        if self.max_staleness_s is not None and not has_streams:
            cause = "without them there are no updates to wait for"
            message = f"needs updates.kafka or updates.directory; {cause}"
            yield finding("max_staleness_s", message, "kafka", "directory")
        elif self.max_staleness_s is None and self.on_stale != "flag":
            needed = "needs max_staleness_s: the age from which rows are stale"
            yield finding("on_stale", f"is {self.on_stale}, which {needed}", "max_staleness_s")
        if self.hold_for_dense and self.kafka is None:
            message = "needs updates.kafka: rows wait in the topic; files are applied as they come"
            yield finding("hold_for_dense", message, "kafka")
        elif (
            self.hold_for_dense and self.kafka is not None and self.kafka.shared_writer == "ingest"
        ):
            message = "needs the writer nodes: `hps ingest` does not know which version is live"
            yield finding("hold_for_dense", message, "kafka.shared_writer")
