"""What a configuration leads to, part by part, for the role that it names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hps.cli.diagnosis.check import Check
from hps.cli.diagnosis.memory import memory
from hps.cli.diagnosis.models import models
from hps.cli.diagnosis.parts import lookup_nodes, triton
from hps.cli.diagnosis.ports import ports, url_of
from hps.cli.diagnosis.servers import server
from hps.cli.diagnosis.stores import redis, rocksdb
from hps.cli.diagnosis.streams import directory, kafka

if TYPE_CHECKING:
    from hps.client import Tls
    from hps.config import Configuration
    from hps.config.schema import Settings
    from hps.models.repository import ModelVersion


def configured(
    configuration: Configuration, api_key: str | None = None, tls: Tls | None = None
) -> Iterator[Check]:
    """Ports, models, memory, stores, streams, networks; the server itself if it runs on this machine."""
    settings = configuration.settings
    here = []
    for check in ports(settings, api_key, tls):
        yield check
        here += [check] if check.name == "admin port" and "served by hps" in check.found else []
    if here:
        yield from server(url_of(settings.server.admin), api_key, tls, "this server")
    versions = []
    for check, version in models(configuration):
        versions += [version] if version else []
        yield check
    if settings.server.role == "frontend":
        yield from lookup_nodes(settings.lookup)
    else:
        yield from _rows(settings, versions)
    if settings.dense.triton is not None and settings.server.role != "lookup":
        names = [version.spec.name for version in versions if version.spec.dense is not None]
        yield from triton(settings.dense.triton, names)


def _rows(settings: Settings, versions: Sequence[ModelVersion]) -> Iterator[Check]:
    """Of a process that has tiers: memory, stores, and what feeds them."""
    total = sum(files.bytes for version in versions for files in version.tables.values())
    tables = [table for version in versions for table in version.embedding_tables().values()]
    yield from memory(settings, total)
    if settings.tiers.rocksdb.enabled:
        yield rocksdb(settings.tiers.rocksdb, total)
    if settings.tiers.redis is not None:
        yield from redis(settings.tiers.redis, tables)
    if settings.updates.kafka is not None:
        yield from kafka(settings.updates.kafka, groups(settings), tables)
    if settings.updates.directory is not None:
        yield directory(settings.updates.directory)


def groups(settings: Settings) -> list[str]:
    """The consumer groups of this node and of its deployment."""
    from hps.streams import node_group

    updates = settings.updates.kafka
    assert updates is not None
    shared = [updates.shared_group] if settings.tiers.redis is not None else []
    return [node_group(updates), *shared]
