"""Rules over settings of `updates`, like those of `hps.config.checks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hps.config.checks import ConfigFinding


def kafka_options(
    options: Mapping[str, object], files: Mapping[str, object], ours: Sequence[str]
) -> list[ConfigFinding]:
    """Options of librdkafka, in the settings or in files: none that hps sets, none in both."""
    findings = [
        ConfigFinding((where, name), "is set by hps; remove it")
        for where, names in (("options", options), ("options_files", files))
        for name in names
        if name in ours
    ]
    message = "is also in options; remove one of them"
    return findings + [
        ConfigFinding(("options_files", name), message) for name in files if name in options
    ]


def staleness(limit_s: float | None, on_stale: str, *, streams: bool) -> list[ConfigFinding]:
    if limit_s is not None and not streams:
        message = "needs updates.kafka or updates.directory; without them there are no updates to wait for"
        return [ConfigFinding(("max_staleness_s",), message, (("kafka",), ("directory",)))]
    if limit_s is None and on_stale != "flag":
        message = f"is {on_stale}, which needs max_staleness_s: the age from which rows are stale"
        return [ConfigFinding(("on_stale",), message, (("max_staleness_s",),))]
    return []


def updates(
    rocksdb: str | None, *, redis: bool, kafka: bool, directory: bool
) -> list[ConfigFinding]:
    """Updates need a store (``rocksdb``: its access): caches evict rows and fetch them again from there."""
    if redis or rocksdb in (None, "primary"):
        return []
    also = (("tiers", "rocksdb", "access"),)
    findings = []
    if directory:
        message = (
            f"needs a store to write, but tiers.rocksdb.access is {rocksdb} and there is no tiers.redis: let "
            "the primary read the folder"
        )
        findings.append(ConfigFinding(("updates", "directory"), message, also))
    if kafka and rocksdb == "read_only":
        message = (
            "needs a store that gets the updates, but tiers.rocksdb.access is read_only and there is no "
            "tiers.redis: rows that leave a cache would come back as they were before; take access primary, "
            "or secondary beside a primary that reads the same stream"
        )
        findings.append(ConfigFinding(("updates", "kafka"), message, also))
    return findings
