"""Checks of every part that a configuration names, for its role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hps.models.mapped_file import MAPPED_FILE
from hps.tools.doctor.check import DoctorCheck, attempt, catch_errors
from hps.tools.doctor.lookups import lookup_nodes
from hps.tools.doctor.memory import memory
from hps.tools.doctor.models import models
from hps.tools.doctor.networks import configured_networks
from hps.tools.doctor.ports import ports, running_server, url_of
from hps.tools.doctor.servers import server
from hps.tools.doctor.stores import redis, rocksdb
from hps.tools.doctor.streams import directory, kafka
from hps.tools.doctor.triton import triton

if TYPE_CHECKING:
    from hps.client import Tls
    from hps.config import Configuration
    from hps.config.schema import Settings
    from hps.models.repository import ModelVersion


def configured(
    configuration: Configuration, api_key: str | None = None, tls: Tls | None = None
) -> Iterator[DoctorCheck]:
    """Check ports, models, memory, stores, streams and networks, and a server on this machine."""
    settings = configuration.settings
    running = running_server(settings, api_key, tls)
    yield from catch_errors("ports", ports(settings, running, api_key, tls))
    served = None
    if running.is_own:
        served = server(url_of(settings.server.admin), api_key, tls, "this server")
        yield from served.checks
    versions = []
    for check, version in models(configuration):
        versions += [version] if version else []
        yield check
    if served is not None and served.models is not None:
        yield from _as_configured(versions, served.models)
    if settings.server.role == "frontend":
        yield from catch_errors("lookup nodes", lookup_nodes(settings))
    else:
        yield from _rows(settings, versions)
    if settings.dense.provider in ("cuda", "tensorrt") and settings.server.role in (
        "all",
        "frontend",
    ):
        yield attempt("dense.provider", partial(configured_networks, settings))
    if settings.dense.triton is not None and settings.server.role in ("all", "frontend"):
        networks = [version for version in versions if version.spec.dense is not None]
        yield from catch_errors("Triton", triton(settings.dense.triton, networks))


def _as_configured(
    versions: Sequence[ModelVersion], served: Mapping[str, int]
) -> Iterator[DoctorCheck]:
    """Compare the versions that the running server serves with those that a start would serve."""
    for version in versions:
        now = served.get(version.name)
        if now != version.version:
            serves = "no version" if now is None else f"version {now}"
            found = f"it serves {serves}, a start would serve version {version.version}"
            remedy = (
                f"POST /v2/repository/models/{version.name}/load on its admin port, or restart it; to keep "
                f"another version, set models.serve.{version.name}.version"
            )
            yield DoctorCheck(f"this server: {version.name}", "WARN", found, remedy)


def _rows(settings: Settings, versions: Sequence[ModelVersion]) -> Iterator[DoctorCheck]:
    """Check memory, stores and update streams of a process with tiers; ``hps ingest`` has shared stores
    only."""
    own = settings.server.role != "ingest"
    total = sum(files.bytes for version in versions for files in version.tables.values())
    files = {
        table: version.tables[name]
        for version in versions
        for name, table in version.embedding_tables().items()
    }
    tables = list(files)
    if own:
        yield from catch_errors("memory", memory(settings, total, files))
    if own:
        yield attempt("folders", partial(_folders, settings))
    if own and settings.tiers.rocksdb.enabled:
        yield rocksdb(settings.tiers.rocksdb, total - _mapped_bytes(settings, versions))
    if settings.tiers.redis is not None:
        yield from catch_errors("Redis", redis(settings.tiers.redis, tables))
    if settings.updates.kafka is not None:
        found = kafka(settings.updates.kafka, groups(settings), tables)
        yield from catch_errors("Kafka", found)
    if own and settings.updates.directory is not None:
        yield directory(settings.updates.directory)


def _mapped_bytes(settings: Settings, versions: Sequence[ModelVersion]) -> int:
    """Bytes of the rows that need no room in RocksDB, because they are in mapped files."""
    if not settings.tiers.mapped.enabled or settings.tiers.rocksdb.layout != "native":
        return 0
    files = (files for version in versions for files in version.tables.values())
    return sum(each.bytes for each in files if (each.folder / MAPPED_FILE).exists())


def _folders(settings: Settings) -> DoctorCheck:
    """Check the folders that the node writes to at intervals. Raises ConfigError."""
    from hps.config.validation import check_folders

    check_folders(settings)
    return DoctorCheck(
        "folders", "OK", "checkpoints and snapshots can be written, where configured"
    )


def groups(settings: Settings) -> list[str]:
    """The consumer groups of this process and of its deployment."""
    from hps.node.streams import node_group

    updates = settings.updates.kafka
    assert updates is not None
    own = [node_group(updates)] if settings.server.role != "ingest" else []
    shared = [updates.shared_group] if settings.tiers.redis is not None else []
    return [*own, *shared]
