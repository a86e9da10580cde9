"""KafkaSource: update messages of HPS's and of our format from Kafka.

Reading of a partition starts at the stores' positions (`hps.updates.kafka.start_positions`), which they keep
beside the rows. The group's committed offsets are for Kafka's tools alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import confluent_kafka as ck

from hps.config.update_settings import KafkaSettings
from hps.errors import BadRequest, ConfigError, Unavailable
from hps.tiers.positions import Place, StreamPosition
from hps.tracing import recorder
from hps.updates.kafka.assignment import AllPartitions, GroupMember, PartitionAssignment
from hps.updates.kafka.brokers import kafka_error_text
from hps.updates.kafka.client import client_log, reader_options
from hps.updates.kafka.cluster import KafkaCluster, Topic
from hps.updates.kafka.credentials import SaslCredentials
from hps.updates.kafka.hps_group import hps_group
from hps.updates.kafka.message_decoder import MessageDecoder, traceparents
from hps.updates.kafka.partition_progress import AssignedPartitions
from hps.updates.kafka.start_positions import StartPositions, StorePositions, StreamObserver
from hps.updates.source import UpdateBatch
from hps.updates.topics import TopicTables

log = logging.getLogger(__name__)

_MOST_MESSAGES = 256
# A broker's answers bring several partitions one after the other; a batch costs more than a wait.
_GATHER_S = 0.002
_LOOK_EVERY_S = 0.2
_AGAIN_S = 0.5  # until Kafka is asked again for what it did not tell
_SLOW_START_S = 5.0
_STATIC_ID = "group.instance.id"


class KafkaSource:
    """An `UpdateSource`. ``member``: None reads every partition, and ``group`` is only where offsets are
    committed; else the group's members share them, and this is the name of one, the same after a restart.
    ``since_s``, ``hps``: see `StartPositions`; HPS's group, if it is another than `hps_group` says.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        group: str,
        topics: TopicTables,
        positions: StorePositions,
        observe: StreamObserver,
        *,
        member: str | None = None,
        since_s: float | None = None,
        hps: str | None = None,
    ) -> None:
        self._group = group
        self._topics = topics
        self._options = {"error_cb": self._report, "group.id": group, **reader_options(settings)}
        self._is_member = member is not None
        if member is not None:
            self._options.setdefault(_STATIC_ID, member)
        self._readings = AssignedPartitions(
            StartPositions(
                settings,
                group,
                hps or hps_group(group),
                topics.readers,
                positions,
                since_s,
                observe,
            )
        )
        self._untold: dict[Place, int] = {}  # applied, and not committed yet for Kafka's tools
        self._resting = False
        self._there: dict[str, Topic] | None = None  # not known yet
        self._heard: str | None = None  # what Kafka said last, until messages come again
        self._unreachable: str | None = None
        self._is_placed = False  # whether it is known which partitions are read, and from where on
        self._placed_at = time.monotonic()
        self._refresh_at = self._look_at = 0.0
        self._messages = MessageDecoder(topics, settings.max_message_bytes, settings.max_ahead_s)
        self._credentials = SaslCredentials(settings)
        self._consumer, self._assignment = self._connect()
        self.cluster = KafkaCluster(settings)
        every_ms = float(self._options["topic.metadata.refresh.interval.ms"])
        self._refresh_s = every_ms / 1e3 if every_ms > 0 else float("inf")
        if not topics.tables:
            self._assignment.follow({})
            log.warning(
                "%s reads nothing: no model is served that updates.kafka.models names", group
            )

    def _connect(self) -> tuple[ck.Consumer, PartitionAssignment]:
        try:
            consumer = ck.Consumer(self._options, logger=client_log)
        except ck.KafkaException as error:
            raise ConfigError(f"updates.kafka: {kafka_error_text(error)}") from None
        if self._is_member:
            return consumer, GroupMember(consumer, self._taken_back)
        return consumer, AllPartitions()

    @property
    def problem(self) -> str | None:
        """Reason why no messages arrive, if there is one."""
        if self._heard or self._unreachable:
            return self._heard or self._unreachable
        waited_s = time.monotonic() - self._placed_at
        if not self._is_placed and waited_s > _SLOW_START_S:
            return f"{self._group} has been waiting for its partitions for {waited_s:.0f} s"
        return None

    def poll(self, timeout_s: float) -> UpdateBatch | None:
        """See `UpdateSource`. Raises Unavailable while it cannot be told where to begin."""
        self._credentials.renew(self._consumer)
        self._refresh()
        self._assign()
        self._look()
        first = self._consumer.poll(timeout_s)
        if first is None:
            return None
        # To consume several waits until there are as many, or for all of the timeout.
        return self._batch([first, *self._consumer.consume(_MOST_MESSAGES - 1, _GATHER_S)])

    def commit(self, batch: UpdateBatch) -> None:
        for position in batch.positions:
            place = position.topic, position.partition
            # The group may have given some to others meanwhile, or back: these begin where the stores are.
            if (reading := self._readings.get(place)) is not None:
                reading.applied, reading.jumped = position.offset, False
                self._untold[place] = position.offset

    def keep_alive(self) -> None:
        """Nothing is taken, but the group is told that this member lives."""
        self._tell_group()
        if not self._resting and self._assignment.places is not None:
            self._consumer.assign([])
            self._resting = True
        if (event := self._consumer.poll(0.0)) is not None and event.error() is not None:
            self._failed(event)

    def begin_again(self) -> None:
        """See `UpdateSource`."""
        self._readings.begin_again()

    def rewind(self) -> None:
        """Poll again what was not committed."""
        self._readings.rewind()

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on at ``offset``, forwards or backwards. What the stores have of it they keep. Raises BadRequest
        when it is behind the partition's end."""
        place = topic, partition
        reading, bounds = self._readings.get(place), self.cluster.bounds([place]).get(place)
        if reading is None or bounds is None:
            raise Unavailable(f"{topic}/{partition} is not read here at the moment; try again")
        reading.low, end = bounds
        if offset > end:
            raise BadRequest(
                f"{topic}/{partition} ends at {end}, before {offset}; seek to {end} at most"
            )
        reading.go_to(offset)
        self._readings.moved = True

    def lag(self) -> dict[Place, int] | None:
        """Messages per partition that are there and not applied yet, a moment ago; see `UpdateSource`. Any
        thread may ask."""
        is_known = self._is_placed and self._readings.complete
        return self._readings.waiting() if is_known else None

    def saw(self, ends: Mapping[Place, int]) -> None:
        """The partitions end there, as was asked beside this reader, which may be paused or wait for a store
        and so hear nothing. Any thread may call."""
        self._readings.saw(ends)

    def applied(self) -> dict[Place, int]:
        """The offset up to which each partition is in the stores, of those that are read here; what Kafka
        keeps no more is not waited for. Any thread may ask."""
        return self._readings.applied()

    def close(self) -> None:
        with suppress(ck.KafkaException, RuntimeError):
            self._tell_group()
            self._assignment.leave()
        with suppress(ck.KafkaException, RuntimeError):
            self._consumer.close()
        self.cluster.close()

    def _tell_group(self) -> None:
        """Not with each batch, and not waited for: the stores keep their own positions, and a lost commit
        repeats work at most."""
        if self._untold:
            offsets = [ck.TopicPartition(*place, offset) for place, offset in self._untold.items()]
            self._untold = {}
            with suppress(ck.KafkaException):
                self._consumer.commit(offsets=offsets, asynchronous=True)

    def _look(self) -> None:
        """Note where partitions end. The consumer lets one thread in at a time, so only this one may ask."""
        now = time.monotonic()
        self._is_placed = self._assignment.places is not None and self._readings.complete
        if not self._is_placed or now < self._look_at:
            return
        self._placed_at, self._look_at = now, now + _LOOK_EVERY_S
        self._tell_group()
        for place, reading in self._readings.items():
            with suppress(ck.KafkaException):
                at = ck.TopicPartition(*place)
                _low, high = self._consumer.get_watermark_offsets(at, cached=True)
                # Before the first answer to a fetch it is negative; it may be of a former fetch.
                reading.end = max(reading.end, high)

    # -- which partitions are read, and where they begin -------------------------------------------

    def _refresh(self) -> None:
        """Learn now and then of topics that were created, deleted, or created again."""
        now = time.monotonic()
        if now < self._refresh_at or not self._topics.tables:
            return
        try:
            found = self.cluster.topics(self._topics.wanted, self._consumer)
        except Unavailable as error:
            self._unreachable, self._refresh_at = str(error), now + _AGAIN_S
            return
        self._unreachable, self._refresh_at = None, now + self._refresh_s
        if self._there is None or found.keys() != self._there.keys():
            names = ", ".join(sorted(found)) or "nothing yet: no topic of its models exists"
            log.info("%s reads %s", self._group, names)
        self._there = found
        self._assignment.follow(found)
        self._readings.verify(self._there)

    def _assign(self) -> None:
        """Have the consumer fetch from where each partition is to be polled next."""
        readings, places = self._readings, self._assignment.places
        if places is None:
            return
        readings.follow(places)
        for place in readings.place(self._there or {}, self.cluster, self._consumer):
            self._untold.pop(place, None)
        if readings.moved or self._resting:
            self._consumer.assign(readings.assignment())
            readings.moved = self._resting = False

    def _taken_back(self) -> None:
        """The group may give the partitions to other members."""
        self._tell_group()
        self._is_placed = False
        self._readings.clear()

    # -- messages ----------------------------------------------------------------------------------

    def _batch(self, polled: list[Any]) -> UpdateBatch | None:
        """Of messages, ends of partitions and errors."""
        messages: list[Any] = []
        ends: dict[Place, int] = {}
        for each in polled:
            place, error = (each.topic(), each.partition()), each.error()
            reading = self._readings.get(place)
            if error is not None and error.code() != ck.KafkaError._PARTITION_EOF:
                self._failed(each)
            elif reading is None:
                pass  # the group gave it to another, or back: it begins where the stores are
            elif error is None:
                messages.append(each)
                ends[place] = each.offset() + 1
            elif each.offset() > ends.get(place, reading.next):
                # No message has those between, but a transaction's marker.
                ends[place] = each.offset()
        if not ends:
            return None
        self._heard = None
        positions = []
        for place, end in ends.items():
            if (reading := self._readings.get(place)) is not None:
                positions.append(StreamPosition(*place, end, 0 if reading.jumped else reading.next))
                reading.next = end
        updates, dead = self._messages.decoded(messages)
        traces = () if recorder() is None else traceparents(messages)
        return UpdateBatch(updates, positions, dead, traces)

    def _failed(self, event: Any) -> None:
        error = event.error()
        if error.code() == ck.KafkaError._AUTO_OFFSET_RESET:
            self._readings.interrupt((event.topic(), event.partition()))
            self._refresh_at = 0.0  # it may be of another topic of that name
        elif error.code() == ck.KafkaError._FATAL:
            self._reconnect(error)
        else:
            self._report(error)

    def _report(self, error: Any) -> None:
        """Consumer errors mend themselves or are for the operator; none ends the stream."""
        if error.code() == ck.KafkaError.UNKNOWN_TOPIC_OR_PART:  # it was deleted
            log.info("Kafka: %s", error.str())
            return
        if error.code() != ck.KafkaError._ALL_BROKERS_DOWN:  # said of each before
            self._heard = f"Kafka: {error.str()}"

    def _reconnect(self, error: Any) -> None:
        """Continue with another consumer, which is no static member."""
        log.error(
            "Kafka refused %s in the group %s: %s; give each reader an updates.kafka.group of its own. It "
            "continues, but waits for its partitions after a crash",
            self._options.pop(_STATIC_ID, "this reader"), self._group, error.str(),
        )  # fmt: skip
        with suppress(ck.KafkaException, RuntimeError):
            self._consumer.close()
        self._taken_back()
        self._consumer, self._assignment = self._connect()
        self._refresh_at = 0.0
