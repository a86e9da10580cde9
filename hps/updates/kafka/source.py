"""KafkaSource: update messages from Kafka, native and HPS's.

Reading of a partition starts at the stores' positions (`hps.updates.kafka.start_positions`), which they
keep with the rows. The group's committed offsets are for Kafka's tools alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import confluent_kafka as ck

from hps.config.update_settings import KafkaSettings
from hps.errors import BadRequest, ConfigError, Unavailable
from hps.observability.meters import StreamMeter
from hps.tiers.positions import StreamPosition, TopicPartition
from hps.tracing import recorder
from hps.updates.kafka.assignment import AllPartitions, GroupMember
from hps.updates.kafka.client import client_log, kafka_error_text, reader_options
from hps.updates.kafka.cluster import KafkaCluster, Topic
from hps.updates.kafka.credentials import SaslCredentials
from hps.updates.kafka.hps_group import ReaderGroup
from hps.updates.kafka.message_decoder import MessageDecoder, traceparents
from hps.updates.kafka.partition_progress import AssignedPartitions
from hps.updates.kafka.start_positions import StartPositions
from hps.updates.source import HeldRows, UpdateBatch
from hps.updates.stream_positions import StreamPositions
from hps.updates.topics import TopicTables

log = logging.getLogger(__name__)

_MOST_MESSAGES = 256
# A broker answers for several partitions one after the other; a batch costs more than this wait.
_GATHER_S = 0.002
_CHECK_EVERY_S = 0.2
_RETRY_S = 0.5  # retry interval for what Kafka did not answer
_SLOW_START_S = 5.0
_STATIC_ID = "group.instance.id"
_READS_NOTHING = "%s reads nothing: no model is served that updates.kafka.models names"


class KafkaSource:
    """An `UpdateSource` on Kafka. ``since_s``: see `StartPositions`."""

    def __init__(
        self,
        settings: KafkaSettings,
        group: ReaderGroup,
        topics: TopicTables,
        positions: StreamPositions,
        meter: StreamMeter,
        *,
        since_s: float | None = None,
    ) -> None:
        self._group = group.name
        self._topics = topics
        self._meter = meter
        self._options = {
            "error_cb": self._report,
            "group.id": group.name,
            **reader_options(settings),
        }
        self._is_member = group.member is not None
        if self._is_member:
            self._options.setdefault(_STATIC_ID, group.member)
        starts = StartPositions(settings, group, topics.readers, positions, since_s, meter)
        self._readings = AssignedPartitions(starts)
        # Applied offsets, not yet committed for Kafka's tools.
        self._uncommitted: dict[TopicPartition, int] = {}
        self._is_resting = False
        self._known_topics: dict[str, Topic] | None = None  # not known yet
        self._last_error: str | None = None  # Kafka's last error, until messages arrive again
        self._unreachable: str | None = None
        self._is_started = False  # partitions and their start offsets are known
        self._started_at = time.monotonic()
        self._refresh_at = self._ends_at = 0.0
        self._messages = MessageDecoder(topics, settings.max_message_bytes, settings.max_ahead_s)
        self._credentials = SaslCredentials(settings)
        self._consumer, self._assignment = self._connect()
        self.cluster = KafkaCluster(settings)
        refresh_ms = float(self._options["topic.metadata.refresh.interval.ms"])
        self._refresh_s = refresh_ms / 1e3 if refresh_ms > 0 else float("inf")
        if not topics.tables:
            self._assignment.set_topics({})
            log.warning(_READS_NOTHING, self._group)

    def _connect(self) -> tuple[ck.Consumer, AllPartitions]:
        try:
            consumer = ck.Consumer(self._options, logger=client_log)
        except ck.KafkaException as error:
            raise ConfigError(f"updates.kafka: {kafka_error_text(error)}") from None
        if self._is_member:
            return consumer, GroupMember(consumer, self._release_partitions)
        return consumer, AllPartitions()

    @property
    def problem(self) -> str | None:
        """Reason why no messages arrive, while there is one."""
        if self._last_error or self._unreachable:
            return self._last_error or self._unreachable
        waited_s = time.monotonic() - self._started_at
        if not self._is_started and waited_s > _SLOW_START_S:
            return f"{self._group} has been waiting for its partitions for {waited_s:.0f} s"
        return None

    def poll(self, timeout_s: float) -> UpdateBatch | None:
        """See `UpdateSource`. Raises Unavailable while the start positions are unknown."""
        self._credentials.renew(self._consumer)
        self._refresh()
        self._assign()
        self._record_ends()
        first = self._consumer.poll(timeout_s)
        if first is None:
            return None
        # `consume` waits until it has as many as it was asked for, or for all of the timeout.
        return self._batch([first, *self._consumer.consume(_MOST_MESSAGES - 1, _GATHER_S)])

    def commit(self, batch: UpdateBatch) -> None:
        for position in batch.positions:
            partition = position.topic, position.partition
            # The group may have moved partitions meanwhile: these start at the stores' positions.
            if (reading := self._readings.get(partition)) is not None:
                reading.applied, reading.jumped = position.offset, False
                self._uncommitted[partition] = position.offset

    def keep_alive(self) -> None:
        """Keep the group membership alive without polling messages."""
        self._commit_to_group()
        if not self._is_resting and self._assignment.partitions is not None:
            self._consumer.assign([])
            self._is_resting = True
        if (event := self._consumer.poll(0.0)) is not None and event.error() is not None:
            self._failed(event)

    def restart(self) -> None:
        """See `UpdateSource`."""
        self._readings.restart()

    def rewind(self) -> None:
        """Poll again what was not committed."""
        self._readings.rewind()

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Continue at ``offset``, forwards or backwards; the stores keep their rows.

        Raises BadRequest when it is after the partition's end."""
        at = topic, partition
        reading, bounds = self._readings.get(at), self.cluster.bounds([at]).get(at)
        if reading is None or bounds is None:
            raise Unavailable(f"{topic}/{partition} is not read here at the moment; try again")
        reading.low, end = bounds
        if offset > end:
            raise BadRequest(
                f"{topic}/{partition} ends at {end}, before {offset}; seek to {end} at most"
            )
        reading.go_to(offset)
        self._readings.moved = True

    def lag(self) -> dict[TopicPartition, int] | None:
        """Unapplied messages by partition, a moment ago; see `UpdateSource`. Any thread may call."""
        is_known = self._is_started and self._readings.complete
        return self._readings.waiting() if is_known else None

    def held(self) -> dict[TopicPartition, HeldRows]:
        """See `UpdateSource`. Any thread may call."""
        return self._readings.held()

    def record_ends(self, ends: Mapping[TopicPartition, int]) -> None:
        """Record end offsets that were read in parallel. Any thread may call.

        The consumer receives none while this reader is paused or waits for a store."""
        self._readings.record_ends(ends)

    def applied(self) -> dict[TopicPartition, int]:
        """Offset up to which the stores have each partition that is read here. Any thread may call.

        Messages that Kafka no longer keeps count as applied."""
        return self._readings.applied()

    def close(self) -> None:
        with suppress(ck.KafkaException, RuntimeError):
            self._commit_to_group()
            self._assignment.leave()
        with suppress(ck.KafkaException, RuntimeError):
            self._consumer.close()
        self.cluster.close()

    def _commit_to_group(self) -> None:
        """Commit applied offsets, without waiting and not with each batch.

        The stores keep their own positions; a lost commit only repeats work."""
        if self._uncommitted:
            offsets = [
                ck.TopicPartition(*partition, offset)
                for partition, offset in self._uncommitted.items()
            ]
            self._uncommitted = {}
            with suppress(ck.KafkaException):
                self._consumer.commit(offsets=offsets, asynchronous=True)

    def _record_ends(self) -> None:
        """Record end offsets from the consumer.

        It allows one thread at a time, so only the polling thread may call."""
        now = time.monotonic()
        self._is_started = self._assignment.partitions is not None and self._readings.complete
        if not self._is_started or now < self._ends_at:
            return
        self._started_at, self._ends_at = now, now + _CHECK_EVERY_S
        self._commit_to_group()
        for partition, reading in self._readings.items():
            with suppress(ck.KafkaException):
                at = ck.TopicPartition(*partition)
                _low, high = self._consumer.get_watermark_offsets(at, cached=True)
                # `high` is negative before the first answer to a fetch, and may be older than
                # `reading.end`.
                reading.end = max(reading.end, high)

    # -- partitions and their start offsets --------------------------------------------------------

    def _refresh(self) -> None:
        """Detect topics that were created, deleted, or created again; every few seconds."""
        now = time.monotonic()
        if now < self._refresh_at or not self._topics.tables:
            return
        try:
            found = self.cluster.topics(self._topics.wanted, self._consumer)
        except Unavailable as error:
            self._unreachable, self._refresh_at = str(error), now + _RETRY_S
            return
        self._unreachable, self._refresh_at = None, now + self._refresh_s
        if self._known_topics is None or found.keys() != self._known_topics.keys():
            names = ", ".join(sorted(found)) or "nothing yet: no topic of its models exists"
            log.info("%s reads %s", self._group, names)
        self._known_topics = found
        self._assignment.set_topics(found)
        self._readings.verify(self._known_topics)

    def _assign(self) -> None:
        """Assign each partition to the consumer, with the offset to poll next."""
        readings, partitions = self._readings, self._assignment.partitions
        if partitions is None:
            return
        readings.set_partitions(partitions)
        for partition in readings.find_starts(
            self._known_topics or {}, self.cluster, self._consumer
        ):
            self._uncommitted.pop(partition, None)
        self._release_held()
        if readings.moved or self._is_resting:
            self._consumer.assign(readings.assignment())
            readings.moved = self._is_resting = False

    def _release_held(self) -> None:
        """Continue partitions whose rows wait for a network that is live now, or have waited long enough."""
        for partition, rows in self._readings.held().items():
            waited_s, longest_s = time.monotonic() - rows.since_s, self._topics.hold_s
            if not self._topics.may_apply(rows.table, rows.dense_version):
                if waited_s < longest_s:
                    continue
                log.error(
                    "%s/%d: rows of network %d have waited for %.0f s (updates.hold_at_most_s) and are "
                    "applied, although it is not live: load that version of the model, or stop its trainer",
                    *partition, rows.dense_version, waited_s,
                )  # fmt: skip
                self._topics.let_pass(rows.table, rows.dense_version)
                self._meter.hold_expired(partition[0])
            self._readings.release(partition)

    def _hold(self, messages: list[Any], held: Mapping[TopicPartition, HeldRows]) -> list[Any]:
        """Stop partitions at rows of a newer network; returns the messages before these."""
        for partition, rows in held.items():
            log.info(
                "%s/%d: rows from %d on wait: they belong to network %d of %s, which is not live",
                *partition, rows.offset, rows.dense_version, rows.table.partition("/")[0],
            )  # fmt: skip
        self._readings.hold(held)
        return [
            each
            for each in messages
            if (first := held.get((each.topic(), each.partition()))) is None
            or each.offset() < first.offset
        ]

    def _release_partitions(self) -> None:
        """Release all partitions: the group may give them to other members."""
        self._commit_to_group()
        self._is_started = False
        self._readings.clear()

    # -- messages ----------------------------------------------------------------------------------

    def _batch(self, polled: list[Any]) -> UpdateBatch | None:
        """A batch from polled messages, ends of partitions and errors; None without messages."""
        messages: list[Any] = []
        ends: dict[TopicPartition, int] = {}
        for each in polled:
            partition, error = (each.topic(), each.partition()), each.error()
            reading = self._readings.get(partition)
            if error is not None and error.code() != ck.KafkaError._PARTITION_EOF:
                self._failed(each)
            elif reading is None:
                pass  # revoked, or assigned again: it starts at the stores' positions
            elif error is None:
                messages.append(each)
                ends[partition] = each.offset() + 1
            elif each.offset() > ends.get(partition, reading.next):
                # Offsets in between have no message, only a transaction's marker.
                ends[partition] = each.offset()
        if not ends:
            return None
        self._last_error = None
        decoded = self._messages.decoded(messages)
        if decoded.held:
            messages = self._hold(messages, decoded.held)
            ends |= {partition: rows.offset for partition, rows in decoded.held.items()}
            decoded = self._messages.decoded(messages)
        positions = []
        for partition, end in ends.items():
            if (reading := self._readings.get(partition)) is not None:
                positions.append(
                    StreamPosition(*partition, end, 0 if reading.jumped else reading.next)
                )
                reading.next = end
        traces = () if recorder() is None else traceparents(messages)
        return UpdateBatch(decoded.updates, positions, decoded.dead, traces)

    def _failed(self, event: Any) -> None:
        error = event.error()
        if error.code() == ck.KafkaError._AUTO_OFFSET_RESET:
            self._readings.interrupt((event.topic(), event.partition()))
            self._refresh_at = 0.0  # the topic may have been created again
        elif error.code() == ck.KafkaError._FATAL:
            self._reconnect(error)
        else:
            self._report(error)

    def _report(self, error: Any) -> None:
        """Record a consumer error. It passes, or the operator must act; none ends the stream."""
        if error.code() == ck.KafkaError.UNKNOWN_TOPIC_OR_PART:  # it was deleted
            log.info("Kafka: %s", error.str())
            return
        if error.code() != ck.KafkaError._ALL_BROKERS_DOWN:  # each broker's own error came before
            self._last_error = f"Kafka: {error.str()}"

    def _reconnect(self, error: Any) -> None:
        """Continue with a new consumer that is not a static member."""
        log.error(
            "Kafka refused %s in the group %s: %s; set another updates.kafka.group for each reader. It "
            "continues, but waits for its partitions after a crash",
            self._options.pop(_STATIC_ID, "this reader"), self._group, error.str(),
        )  # fmt: skip
        with suppress(ck.KafkaException, RuntimeError):
            self._consumer.close()
        self._uncommitted = {}  # neither the closed consumer nor the group takes them
        self._release_partitions()
        self._consumer, self._assignment = self._connect()
        self._refresh_at = 0.0
