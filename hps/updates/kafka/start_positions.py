"""Start offset of a Kafka partition: the stores' position, if Kafka can continue there."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import confluent_kafka as ck

from hps.config.update_settings import KafkaSettings
from hps.errors import Unavailable
from hps.observability.meters import StreamMeter
from hps.tiers.positions import TopicPartition
from hps.updates.kafka.client import ANSWER_S, kafka_error_text
from hps.updates.kafka.cluster import KafkaCluster, Topic
from hps.updates.kafka.hps_group import ReaderGroup, committed_by, committed_offsets
from hps.updates.source import HeldRows
from hps.updates.stream_positions import Readers, StreamPositions

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PartitionProgress:
    """A reader's offsets in one partition.

    ``next``: to be polled next; ``applied``: up to where the stores have it; ``low``: the first that
    Kafka kept when reading started; ``end``: after the last message; ``jumped``: `next` was set by an
    operator or from HPS's position, and everything before it counts as applied. ``held``: rows at `next`
    that wait for their network."""

    topic_id: str
    next: int
    applied: int
    low: int
    end: int
    jumped: bool = False
    held: HeldRows | None = None

    @property
    def waiting(self) -> int:
        """Number of unapplied messages."""
        return max(0, self.end - self.reached)

    def go_to(self, offset: int) -> None:
        """Continue at ``offset``; messages before it count as applied."""
        self.next = self.applied = offset
        self.jumped, self.held = True, None

    @property
    def reached(self) -> int:
        """Offset up to which the stores have the messages that Kafka keeps."""
        return max(self.applied, self.low)


@dataclass(frozen=True, slots=True)
class StartPositions:
    """Finds the start offsets of one reader; called by its thread.

    Where no store has a position, reading starts with the messages of ``since_s`` (Unix seconds), if
    given, else at the offset of HPS's group ``group.hps`` (`KafkaSettings.hps_offsets`), or at the first
    message. A topic that changes none of the ``tables`` has dead letters only, and no store keeps a
    position in it. There reading starts at the offset that the reader's ``group`` has committed:
    letters before it were kept."""

    settings: KafkaSettings
    group: ReaderGroup
    tables: Readers
    positions: StreamPositions
    since_s: float | None
    meter: StreamMeter

    def find(
        self,
        partitions: Mapping[TopicPartition, PartitionProgress | None],
        topics: Mapping[str, Topic],
        broken: Collection[TopicPartition],
        cluster: KafkaCluster,
        consumer: ck.Consumer,
    ) -> dict[TopicPartition, PartitionProgress]:
        """Find the start offset of each of ``partitions``, which have their earlier progress, if any.

        Partitions that Kafka does not answer for are left out. ``broken``: partitions where Kafka could
        not continue. Raises TierError, Unavailable."""
        restarted = {
            partition
            for partition in partitions
            if self._is_of_another_topic(partition, topics, partitions[partition])
        }
        # Read before the end offsets: another member of the group may still apply some.
        furthest = {
            partition: max(
                self.positions.furthest(*partition), 0 if former is None else former.applied
            )
            for partition, former in partitions.items()
            if partition not in restarted
        }
        bounds = cluster.bounds(partitions)
        restarted |= self._restart_interrupted(bounds, furthest, broken)
        starts = self._stored_starts(partitions, bounds, restarted)
        unknown = [partition for partition in bounds if partition not in starts]
        replayable = [partition for partition in unknown if partition not in restarted]
        starts |= self._committed_starts(replayable, bounds, consumer)
        rest = [partition for partition in unknown if partition not in starts]
        starts |= self._first_offsets(rest, bounds, consumer)
        return {
            partition: PartitionProgress(
                _id_of(partition, topics), first, first, *bounds[partition], jumped
            )
            for partition, (first, jumped) in starts.items()
        }

    def _stored_starts(
        self,
        partitions: Mapping[TopicPartition, PartitionProgress | None],
        bounds: Mapping[TopicPartition, tuple[int, int]],
        restarted: Collection[TopicPartition],
    ) -> dict[TopicPartition, tuple[int, bool]]:
        """Start offsets of the partitions of which the stores, or the reader itself, know one."""
        starts = {}
        for partition, (low, _end) in bounds.items():
            former = partitions[partition]
            if former is None or partition in restarted:
                start = self.positions.start_offset(*partition)
            else:  # the stores may not have recorded it yet
                start = former.applied
            if start is None:
                continue
            # `start` even if it is before `low`: a store records a position only if it has everything
            # before it, or if the messages in between no longer exist.
            starts[partition] = start, False
            if start < low:
                _warn_of_gap(partition, start, low)
                self.meter.lost(partition[0], low - start)
        return starts

    def _restart_interrupted(
        self,
        bounds: Mapping[TopicPartition, tuple[int, int]],
        furthest: Mapping[TopicPartition, int],
        broken: Collection[TopicPartition],
    ) -> set[TopicPartition]:
        """Restart partitions that Kafka cannot continue at the position ``furthest``."""
        restarted = set()
        for partition in bounds.keys() & furthest:
            (low, end), position = bounds[partition], furthest[partition]
            # In the latter case the position is in range, but messages before it were lost and others came.
            if position > end or (partition in broken and position >= low):
                self._restart(partition, f"messages before {position} were lost; it ends at {end}")
                restarted.add(partition)
        return restarted

    def _is_of_another_topic(
        self,
        partition: TopicPartition,
        topics: Mapping[str, Topic],
        former: PartitionProgress | None,
    ) -> bool:
        topic_id = _id_of(partition, topics)
        if not topic_id:
            return False
        other = former is not None and former.topic_id not in ("", topic_id)
        if self.positions.identify(*partition, topic_id) or other:
            self._restart(partition, "the topic was deleted and created again")
            return True
        return False

    def _restart(self, partition: TopicPartition, why: str) -> None:
        self.positions.restart(*partition)
        self._note_restart(partition, why)

    def _note_restart(self, partition: TopicPartition, why: str) -> None:
        log.error(
            "%s/%d does not continue what was applied: %s; reading it from its beginning. Rows of messages "
            "that were lost must be sent again", *partition, why,
        )  # fmt: skip
        self.meter.restarted(partition[0])

    def _committed_starts(
        self,
        partitions: Sequence[TopicPartition],
        bounds: Mapping[TopicPartition, tuple[int, int]],
        consumer: ck.Consumer,
    ) -> dict[TopicPartition, tuple[int, bool]]:
        """Start offsets of ``partitions`` in topics that change no table, if the group has committed them."""
        queried = [partition for partition in partitions if not self.tables(partition[0])]
        if not queried:
            return {}
        try:
            found = committed_by(consumer, self.group.name, queried)
        except Unavailable as error:
            log.warning("dead letters of unknown tables are kept again: %s", error)
            return {}
        return {
            partition: (at, True) for partition, at in found.items() if at <= bounds[partition][1]
        }

    def _first_offsets(
        self,
        partitions: Sequence[TopicPartition],
        bounds: Mapping[TopicPartition, tuple[int, int]],
        consumer: ck.Consumer,
    ) -> dict[TopicPartition, tuple[int, bool]]:
        """Find start offsets of partitions without a stored position.

        Also returns for each whether earlier messages count as applied."""
        hps: Mapping[TopicPartition, int] = {}
        if self.settings.hps_offsets and self.since_s is None and partitions:
            hps = committed_offsets(self.settings, self.group.hps, partitions)
        firsts = {}
        for partition in partitions:
            at, end = hps.get(partition), bounds[partition][1]
            if at is not None and at > end:
                self._note_restart(partition, f"it ends at {end}, before {at} of {self.group.hps}")
                at = None
            jumped = at is not None
            firsts[partition] = (
                (at if at is not None else self._since(partition, end, consumer)),
                jumped,
            )
        return firsts

    def _since(self, partition: TopicPartition, end: int, consumer: ck.Consumer) -> int:
        if self.since_s is None:
            return 0
        queried = ck.TopicPartition(*partition, int(self.since_s * 1e3))
        try:
            (found,) = consumer.offsets_for_times([queried], timeout=ANSWER_S)
        except ck.KafkaException as error:
            raise Unavailable(f"Kafka: {partition[0]}: {kafka_error_text(error)}") from None
        return int(found.offset) if found.offset >= 0 else end


def _id_of(partition: TopicPartition, topics: Mapping[str, Topic]) -> str:
    topic = topics.get(partition[0])
    return "" if topic is None else topic.id


def _warn_of_gap(partition: TopicPartition, offset: int, low: int) -> None:
    log.error(
        "%s/%d: Kafka keeps messages from %d on, but %d to %d were not applied yet and are gone; "
        "load the model's files again, or raise the topic's retention",
        *partition, low, offset, low - 1,
    )  # fmt: skip
