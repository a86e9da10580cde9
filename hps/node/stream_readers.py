"""Readers of a node's update streams: started with the node, restarted when models change."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hps.config.update_settings import DirectorySettings, KafkaSettings
from hps.observability.meters import StreamMeter, UpdateMeter
from hps.observability.metrics import Metrics
from hps.types import EmbeddingTable
from hps.updates.arrival_times import PendingUpdates
from hps.updates.cache_writer import CacheWriter
from hps.updates.files.applied_files import AppliedFiles
from hps.updates.files.directory import DirectorySource, PendingFiles
from hps.updates.followed_store import FollowedStore
from hps.updates.ingest_thread import IngestThread
from hps.updates.ingestor import Ingestor
from hps.updates.kafka.client import DeadLetterTopic
from hps.updates.kafka.end_offsets import PendingMessages
from hps.updates.kafka.hps_group import HpsProgress, ReaderGroup, hps_group
from hps.updates.kafka.kept_letters import KeptLetters
from hps.updates.kafka.source import KafkaSource
from hps.updates.source import UpdateSource
from hps.updates.stream_positions import FedStore, Readers, StoreStreamPositions, StreamPositions
from hps.updates.topics import TopicTables

# How far back reading starts where HPS feeds the store, which then has no positions: updates that HPS may
# not have written yet when the caches were filled.
_OVERLAP_S = 600.0

Watermarks = Mapping[EmbeddingTable, Mapping[str, Mapping[str, int]]]
"""Stream offsets that each table's files contain (`Manifest.watermark`)."""


@dataclass(frozen=True, slots=True)
class UpdateReader:
    """One reader: its ``group``, source, ingestor and their thread.

    ``pending``: its unapplied updates; ``readers``: tables that a topic may change; ``began_s``: start of
    reading (Unix seconds)."""

    group: str
    kind: str
    source: UpdateSource
    ingestor: Ingestor
    thread: IngestThread
    pending: PendingUpdates
    readers: Readers
    began_s: float = field(default_factory=time.time)

    @property
    def problem(self) -> str | None:
        """Reason why no updates are applied, if there is one."""
        return self.ingestor.problem or self.source.problem

    def status(self) -> dict[str, Any]:
        """Status for JSON. ``lag`` is null while unknown.

        ``state`` is ``starting`` while partitions or their start offsets are unknown."""
        lag = self.source.lag()
        state = "paused" if self.thread.paused else "starting" if lag is None else "running"
        return {
            "group": self.group,
            "source": self.kind,
            "state": state,
            "problem": self.problem,
            "stores": self.ingestor.store_names,
            "caches": self.ingestor.refreshes,
            "lag": None if lag is None else sum(lag.values()),
            "partitions": [
                {"topic": topic, "partition": partition, "lag": messages}
                for (topic, partition), messages in sorted((lag or {}).items())
            ],
        }


class StreamReaders:
    """The readers of one node, which ``resources`` closes.

    The first reader registers them there, so that they end before the stores and caches that they write
    to. One thread at a time starts readers or calls `restart`; any may read ``streams`` and ``tables``."""

    def __init__(
        self,
        tables: Iterable[EmbeddingTable],
        watermarks: Watermarks,
        metrics: Metrics,
        resources: ExitStack,
    ) -> None:
        self.streams: list[UpdateReader] = []
        self.tables = list(tables)
        self._watermarks = watermarks
        self._metrics = metrics
        self._meter = UpdateMeter(metrics)
        self._kept = KeptLetters()
        self._resources = resources
        self.applied_files: AppliedFiles | None = None
        self._begin: list[Callable[[], None]] = []
        self._paused: Collection[str] = ()  # groups that start paused
        self._generation = ExitStack()  # resources of the running readers

    def read_kafka(
        self,
        settings: KafkaSettings,
        group: str,
        stores: Sequence[FedStore],
        caches: CacheWriter | None,
        *,
        followed: FollowedStore | None = None,
        member: str | None = None,
    ) -> None:
        """Start a reader of all partitions or, as ``member`` of the ``group``, of a share of them.

        Without ``stores`` the caches are refreshed once ``followed`` has the updates. Raises
        ConfigError; never because Kafka is unavailable."""
        self._add(partial(self._read_kafka, settings, group, stores, caches, followed, member))

    def read_folder(
        self, settings: DirectorySettings, stores: Sequence[FedStore], caches: CacheWriter
    ) -> None:
        """Start a reader of a folder's files. Raises ConfigError."""
        self.applied_files = AppliedFiles(settings, stores, caches)
        self._add(partial(self._read_folder, settings, stores, caches))

    def restart(self, tables: Iterable[EmbeddingTable], watermarks: Watermarks) -> None:
        """Restart the readers for ``tables``, at the stores' positions. A paused reader stays paused."""
        ended, self.streams = self.streams, []
        self._generation.close()
        self.tables, self._watermarks = list(tables), watermarks
        self._paused = {stream.group for stream in ended if stream.thread.paused}
        for begin in self._begin:
            begin()

    def _add(self, begin: Callable[[], None]) -> None:
        if not self._begin:
            self._resources.callback(self._generation.close)
        self._begin.append(begin)
        begin()

    def _read_kafka(
        self,
        settings: KafkaSettings,
        group: str,
        stores: Sequence[FedStore],
        caches: CacheWriter | None,
        followed: FollowedStore | None,
        member: str | None,
    ) -> None:
        topics = TopicTables(self.tables, settings.takes)
        fed_by = settings.shared_group if followed and followed.info.shared else group
        hps = self._hps_progress(settings, fed_by, followed)
        if followed is None:
            positions: StreamPositions = StoreStreamPositions(
                stores, topics.readers, self._contained
            )
        else:
            other_writer = None if hps is None else hps.applied
            positions = followed.positions(topics.readers, self._contained, other_writer)
        source = KafkaSource(
            settings,
            ReaderGroup(group, hps_group(fed_by), member),
            topics,
            positions,
            StreamMeter(self._metrics, group),
            since_s=None if hps is None else time.time() - _OVERLAP_S,
        )
        dead_letters = DeadLetterTopic(settings, self._kept)
        self._generation.callback(dead_letters.close)
        ingestor = Ingestor(source, topics.tables, positions, caches, dead_letters, self._meter)
        pending = PendingMessages(source.cluster, source, topics.names)
        self._start(group, "kafka", source, ingestor, pending, topics.readers)

    def _hps_progress(
        self, settings: KafkaSettings, group: str, followed: FollowedStore | None
    ) -> HpsProgress | None:
        """HPS's offsets in the streams, if HPS may feed ``followed`` instead of our ``group``.

        It may if the store has HPS's layout and no node of ours writes it."""
        if followed is None or followed.versioned:
            return None
        if followed.info.shared and settings.shared_writer == "nodes":
            return None
        progress = HpsProgress(settings, hps_group(group))
        self._generation.callback(progress.close)
        return progress

    def _read_folder(
        self, settings: DirectorySettings, stores: Sequence[FedStore], caches: CacheWriter
    ) -> None:
        topics = TopicTables(self.tables, settings.takes)
        source = DirectorySource(settings, topics.tables)
        positions = StoreStreamPositions(stores, topics.readers)
        ingestor = Ingestor(source, topics.tables, positions, caches, source, self._meter)
        tables = list(topics.tables.values())
        assert self.applied_files is not None
        source.on_applied = partial(self.applied_files.record, tables)
        pending = PendingFiles(settings.path)
        self._start("directory", "directory", source, ingestor, pending, lambda _folder: tables)

    def _start(
        self,
        group: str,
        kind: str,
        source: UpdateSource,
        ingestor: Ingestor,
        pending: PendingUpdates,
        readers: Readers,
    ) -> None:
        thread = IngestThread(ingestor, source, f"hps-ingest-{len(self.streams)}")
        if group in self._paused:
            thread.pause()
        self.streams.append(UpdateReader(group, kind, source, ingestor, thread, pending, readers))
        self._generation.callback(thread.close)
        thread.start()

    def _contained(self, table: EmbeddingTable, topic: str, partition: int) -> int | None:
        return self._watermarks.get(table, {}).get(topic, {}).get(str(partition))
