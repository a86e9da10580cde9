"""KafkaSource: update messages of HPS's and of our format from Kafka.

Where a partition is read from is told by whoever applies the updates (``begin``): the position that the
stores themselves keep. The group's committed offsets are for Kafka's tools, and for readers without a store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import confluent_kafka as ck

from hps.config.update_settings import KafkaSettings
from hps.errors import BadRequest, ConfigError, Unavailable
from hps.tiers.positions import StreamPosition
from hps.tracing import recorder
from hps.updates.kafka.client import ANSWER_S, client_log, reader_options
from hps.updates.kafka.credentials import Credentials
from hps.updates.kafka.hps_group import committed, hps_group
from hps.updates.kafka.messages import Messages, traceparents
from hps.updates.source import UpdateBatch
from hps.updates.topics import Topics

log = logging.getLogger(__name__)

Begin = Callable[[str, int], int | None]
"""``begin(topic, partition)``: the first offset that may not be applied yet; None: of none is it certain."""

Lost = Callable[[str, int], None]
"""``lost(topic, messages)``."""

_MOST_MESSAGES = 256
# A broker's answers bring several partitions one after the other; a batch costs more than a wait.
_GATHER_S = 0.002
_LOOK_EVERY_S = 0.2


class KafkaSource:
    """An `UpdateSource`. ``group``: who shares the partitions, and whose offsets are committed. Where
    ``begin`` is not certain of anything, reading begins with the messages of ``since_s`` (Unix seconds), if
    given, else where HPS was (`KafkaSettings.hps_offsets`), or with all there are.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        group: str,
        topics: Topics,
        begin: Begin,
        since_s: float | None = None,
        lost: Lost = lambda _topic, _messages: None,
        hps: str | None = None,
    ) -> None:
        """``lost`` is told of messages that Kafka has dropped before they were applied. ``hps``: HPS's group
        in the place of ``group``, if it is another than `hps_group` says."""
        self._settings = settings
        after_hps = settings.hps_offsets and since_s is None
        self._hps_group = (hps or hps_group(group)) if after_hps else None
        self._hps_offsets: Mapping[tuple[str, int], int] | None = None
        self.problem: str | None = None
        """What Kafka said last, until messages come again."""
        self._begin = begin
        self._since_s = since_s
        self._tell_lost = lost
        self._next: dict[tuple[str, int], int] = {}  # what is polled next
        self._jumped: set[tuple[str, int]] = set()  # by an operator's seek, until committed
        self._committed: dict[tuple[str, int], int] = {}
        self._kept: dict[tuple[str, int], int] = {}  # the first that Kafka had when reading began
        self._untold: dict[tuple[str, int], int] = {}  # of these, what the group does not know yet
        self._resting = False
        self._patterns = patterns = topics.patterns()
        # Whether it is known which partitions are read here: the group says it, which is not asked before
        # there is a topic.
        self._joined = not patterns
        self._absent: set[str] = set()  # patterns that no topic has
        self._lag: dict[tuple[str, int], int | None] | None = None
        self._looked_at = 0.0
        self._unplaced: list[ck.TopicPartition] = []
        self._messages = Messages(topics, settings.max_message_bytes, settings.max_ahead_s)
        self._credentials = Credentials(settings)
        try:
            self._consumer = ck.Consumer(
                {
                    "error_cb": self._report,
                    "group.id": group,
                    **reader_options(settings),
                },
                logger=client_log,
            )
        except ck.KafkaException as error:
            raise ConfigError(f"updates.kafka: {_text(error)}") from None
        if patterns:
            self._consumer.subscribe(
                patterns, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
            )
        else:
            log.warning(
                "%s reads nothing: no model is served that updates.kafka.models names", group
            )

    def poll(self, timeout_s: float) -> UpdateBatch | None:
        """See `UpdateSource`. Raises Unavailable while it cannot be told where to begin."""
        self._credentials.renew(self._consumer)
        self._place()
        self._rise()
        self._look()
        first = self._consumer.poll(timeout_s)
        if first is None:
            return None
        # To consume several waits until there are as many, or for all of the timeout.
        return self._batch([first, *self._consumer.consume(_MOST_MESSAGES - 1, _GATHER_S)])

    def commit(self, batch: UpdateBatch) -> None:
        reached = {(p.topic, p.partition): p.offset for p in batch.positions}
        # The group may have given some to others meanwhile, or back: then they begin where the stores are.
        reached = {place: offset for place, offset in reached.items() if place in self._next}
        self._committed |= reached
        self._untold |= reached
        self._jumped -= reached.keys()

    def keep_alive(self) -> None:
        """Nothing is taken, but the group is told that this member lives."""
        self._tell_group()
        if not self._resting:
            self._consumer.pause(self._consumer.assignment())
            self._resting = True
        for message in self._consumer.consume(1, 0.0):
            place = message.topic(), message.partition()
            if place in self._next:  # it was in the queue already
                self._seek(*place, self._next[place])

    def _rise(self) -> None:
        """Take messages again."""
        if self._resting:
            self._consumer.resume(self._consumer.assignment())
            self._resting = False

    def begin_again(self) -> None:
        """See `UpdateSource`."""
        self._unplaced = self._consumer.assignment()
        self._consumer.pause(self._unplaced)
        self._lag = None
        self._next.clear()
        self._committed.clear()
        self._untold.clear()

    def rewind(self) -> None:
        """Poll again what was not committed."""
        for place, offset in self._committed.items():
            if place in self._next:
                self._seek(*place, offset)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on at ``offset``, forwards or backwards. What the stores have of it they keep. Raises BadRequest
        when it is behind the partition's end."""
        if (topic, partition) not in self._next:
            raise Unavailable(f"{topic}/{partition} is not read here at the moment; try again")
        end = self._watermarks(ck.TopicPartition(topic, partition))[1]
        if offset > end:  # Kafka's client would begin at the beginning
            raise BadRequest(
                f"{topic}/{partition} ends at {end}, before {offset}; seek to {end} at most"
            )
        self._seek(topic, partition, offset)
        self._jumped.add((topic, partition))
        self._committed[topic, partition] = offset

    def lag(self) -> dict[tuple[str, int], int | None] | None:
        """Messages per partition that are there and not polled yet, a moment ago; see `UpdateSource`. Any
        thread may ask."""
        return self._lag

    def applied(self) -> dict[tuple[str, int], int]:
        """The offset up to which each partition is in the stores, of those that are read here; what Kafka
        keeps no more is not waited for. Any thread may ask."""
        committed = dict(self._committed)
        return {place: max(at, self._kept.get(place, 0)) for place, at in committed.items()}

    def _tell_group(self) -> None:
        """Not with each batch, and not waited for: the stores keep their own positions, and a lost commit
        repeats work at most."""
        if self._untold:
            offsets = [ck.TopicPartition(*place, offset) for place, offset in self._untold.items()]
            self._untold = {}
            with suppress(ck.KafkaException):
                self._consumer.commit(offsets=offsets, asynchronous=True)

    def _look(self) -> None:
        """Note the lag. The consumer lets one thread in at a time, so only this one may ask it."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        self._tell_group()
        behind: dict[tuple[str, int], int | None] = {}
        for place, offset in self._next.items():
            with suppress(ck.KafkaException):
                low, high = self._consumer.get_watermark_offsets(
                    ck.TopicPartition(*place), cached=True
                )
                # Before the first answer to a fetch no end is known: it is negative then.
                polled = max(low, offset, self._committed.get(place, 0))
                behind[place] = max(0, high - polled) if high >= 0 else None
        known = self._joined or self._absent.issuperset(self._patterns)
        self._lag = behind if known else None

    def _report(self, error: Any) -> None:
        """Consumer errors mend themselves or are for the operator; none ends the stream."""
        if error.code() == ck.KafkaError.UNKNOWN_TOPIC_OR_PART:  # nobody has written to it yet
            log.info("Kafka: %s", error.str())
            return
        if error.code() != ck.KafkaError._ALL_BROKERS_DOWN:  # said of each before
            self.problem = f"Kafka: {error.str()}"

    def close(self) -> None:
        with suppress(ck.KafkaException, RuntimeError):
            self._tell_group()
            self._consumer.close()

    # -- where partitions begin ------------------------------------------------------------------

    def _assigned(self, consumer: Any, partitions: list[ck.TopicPartition]) -> None:
        consumer.assign(partitions)
        consumer.pause(partitions)
        self._unplaced, self._hps_offsets = list(partitions), None
        self._joined = True
        self._absent.clear()
        self._lag = None  # until it is told where they begin
        self._next.clear()
        self._committed.clear()

    def _revoked(self, consumer: Any, partitions: list[ck.TopicPartition]) -> None:
        self._tell_group()
        self._left()

    def _lost(self, consumer: Any, partitions: list[ck.TopicPartition]) -> None:
        self._untold.clear()
        self._left()
        log.warning("the group gave %d partitions to others", len(partitions))

    def _left(self) -> None:
        """Nothing is read until the group says anew what is."""
        self._joined, self._lag = False, None
        self._unplaced = []
        self._next.clear()

    def _place(self) -> None:
        """Have each new partition begin where the stores say."""
        while self._unplaced:
            each = self._unplaced[-1]
            offset = self._begin(each.topic, each.partition)
            low = self._watermarks(each)[0]
            gap = 0 if offset is None else max(0, low - offset)
            if gap:
                _warn_of_gap(each, low - gap, low)
            place = each.topic, each.partition
            self._jumped.discard(place)
            self._seek(*place, self._first(each) if offset is None else offset)
            self._kept[place] = low
            # Not from `low` on: a store notes a position only if it has what is before it, or what
            # there was between is gone.
            self._committed[place] = self._next[place]
            self._consumer.resume([each])
            self._unplaced.pop()
            if gap:
                self._tell_lost(each.topic, gap)

    def _first(self, partition: ck.TopicPartition) -> int:
        """Where to begin when nobody knows."""
        hps = self._after_hps(partition)
        if hps is not None:
            # What is before it is in the store, as after a jump.
            self._jumped.add((partition.topic, partition.partition))
            return hps
        if self._since_s is None:
            return ck.OFFSET_BEGINNING
        asked = ck.TopicPartition(partition.topic, partition.partition, int(self._since_s * 1e3))
        try:
            (found,) = self._consumer.offsets_for_times([asked], timeout=ANSWER_S)
        except ck.KafkaException as error:
            raise Unavailable(f"Kafka: {partition.topic}: {_text(error)}") from None
        return int(found.offset) if found.offset >= 0 else self._watermarks(partition)[1]

    def _after_hps(self, partition: ck.TopicPartition) -> int | None:
        if self._hps_group is None:
            return None
        if self._hps_offsets is None:
            self._hps_offsets = committed(self._settings, self._hps_group, self._unplaced)
        return self._hps_offsets.get((partition.topic, partition.partition))

    def _watermarks(self, partition: ck.TopicPartition) -> tuple[int, int]:
        """The first offset that is there, and the one behind the last."""
        try:
            low, high = self._consumer.get_watermark_offsets(partition, timeout=ANSWER_S)
        except ck.KafkaException as error:
            raise Unavailable(f"Kafka: {partition.topic}: {_text(error)}") from None
        return low, high

    def _seek(self, topic: str, partition: int, offset: int) -> None:
        try:
            self._consumer.seek(ck.TopicPartition(topic, partition, offset))
        except ck.KafkaException as error:
            raise Unavailable(f"Kafka: {topic}/{partition} at {offset}: {_text(error)}") from None
        self._next[topic, partition] = max(0, offset)

    # -- messages ----------------------------------------------------------------------------------

    def _batch(self, polled: list[Any]) -> UpdateBatch | None:
        """Of messages, ends of partitions and errors."""
        messages: list[Any] = []
        ends: dict[tuple[str, int], int] = {}
        for each in polled:
            place, error = (each.topic(), each.partition()), each.error()
            if error is not None and error.code() != ck.KafkaError._PARTITION_EOF:
                if error.code() == ck.KafkaError.UNKNOWN_TOPIC_OR_PART:
                    self._absent.add(each.topic())
                self._report(error)
            elif place not in self._next:
                pass  # the group gave it to another, or back: it begins where the stores are
            elif error is None:
                messages.append(each)
                ends[place] = each.offset() + 1
            elif each.offset() > ends.get(place, self._next[place]):
                ends[place] = (
                    each.offset()
                )  # no message has those between, but a transaction's marker
        if not ends:
            return None
        self.problem = None
        positions = [
            StreamPosition(*p, end, 0 if p in self._jumped else self._next[p])
            for p, end in ends.items()
        ]
        self._next |= ends
        updates, dead = self._messages.decoded(messages)
        traces = () if recorder() is None else traceparents(messages)
        return UpdateBatch(updates, positions, dead, traces)


def _warn_of_gap(partition: ck.TopicPartition, offset: int, low: int) -> None:
    log.error(
        "%s/%d: Kafka keeps messages from %d on, but %d to %d were not applied yet and are gone; "
        "load the model's files again, or raise the topic's retention",
        partition.topic, partition.partition, low, offset, low - 1,
    )  # fmt: skip


def _text(error: Exception) -> str:
    first = error.args[0] if error.args else error
    return str(first.str() if isinstance(first, ck.KafkaError) else first)
