"""Dead letters read from their topic: list them, or send them to their original topics again.

The topic may have several letters of one message: each node keeps one, and so does a reader that reads the
message again after a restart. They are listed as one, the newest, whose reason is current and which Kafka
deletes last. A letter that was sent again stays in the topic; a note after it, in the same partition, marks
all letters of that message as sent, older or newer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import confluent_kafka as ck

from hps.config.update_settings import KafkaSettings
from hps.errors import Unavailable
from hps.native.twin_codec import HEADER, MAGIC
from hps.updates.codec import hps_table
from hps.updates.kafka.brokers import Brokers
from hps.updates.kafka.client import (
    ATTEMPT_HEADER,
    LARGEST,
    SIZE_HEADER,
    attempt_of,
    kafka_error_text,
)
from hps.updates.kafka.kept_letters import LetterIdentity, Newest

_REQUEUED = "hps-requeued"
_HEADER_BYTES, _NAME_BYTES = 3, 11  # of HEADER's fields
_CHUNK = 500


@dataclass(frozen=True, slots=True)
class StoredDeadLetter:
    """A letter in the topic of dead letters: its place there, its origin and the reason.

    ``unix_ms``: when it was kept; ``at``: the offending byte; ``topic``, ``from_partition``,
    ``from_offset``, ``timestamp_ms`` (Unix ms, -1: unknown): of the original message; ``size``: its
    bytes; ``table``: `model/table`, None if unknown. ``whole``: False for a message that was too large
    for the topic, of which only these fields are kept. ``attempt``: see `DeadLetter`."""

    partition: int
    offset: int
    unix_ms: int
    reason: str
    at: int
    topic: str
    from_partition: int
    from_offset: int
    timestamp_ms: int
    size: int
    table: str | None
    whole: bool = True
    attempt: int = 1

    @property
    def place(self) -> tuple[int, int]:
        return self.partition, self.offset

    @property
    def age_order(self) -> tuple[int, tuple[int, int]]:
        """Sort key: the oldest letter first."""
        return self.unix_ms, self.place

    @property
    def identity(self) -> LetterIdentity:
        """Equal for all letters of one message."""
        at = self.topic, self.from_partition, self.from_offset
        return LetterIdentity(*at, self.timestamp_ms, self.attempt)


class DeadLetterReader:
    """Reads the dead letter topic of ``settings`` on one thread. Raises Unavailable without a broker."""

    def __init__(self, settings: KafkaSettings, answer_s: float = 5.0) -> None:
        self._topic = settings.dead_letters
        self._brokers = Brokers(settings.brokers, settings.client_options(), answer_s)
        own = {
            "group.id": "hps_dead_letters",  # nothing is committed
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.message.max.bytes": max(1 << 20, settings.max_message_bytes),
        }
        self._consumer = self._brokers.connect(ck.Consumer, own)

    def letters(self, *, again: bool = False) -> list[StoredDeadLetter]:
        """The newest letter of each message that was not sent again, oldest message first.

        ``again`` includes those that were. At most the newest ``MOST``."""
        found: Newest[LetterIdentity, StoredDeadLetter] = Newest()
        places: Newest[tuple[int, int], LetterIdentity] = Newest()
        requeued: Newest[LetterIdentity, None] = Newest()
        for message in self._messages(self._bounds()):
            headers = dict(message.headers() or ())
            if (noted := headers.get(_REQUEUED)) is not None:
                for offset in noted.split(b",") if not again else ():
                    if (of := places.get((message.partition(), int(offset)))) is not None:
                        requeued[of] = None
                        found.pop(of, None)
                continue
            letter = _letter(message, headers)
            places[letter.place] = of = letter.identity
            former = found.get(of)
            # Partitions are read in any order.
            if of not in requeued and (former is None or former.age_order < letter.age_order):
                found[of] = letter
        return sorted(found.values(), key=lambda each: each.age_order)

    def requeue(self, letters: Sequence[StoredDeadLetter]) -> list[tuple[StoredDeadLetter, str]]:
        """Send letters to their original topics and partitions, oldest first in each.

        Returns those that Kafka rejected, and why. They keep their timestamps, so rows in HPS's format
        get their original versions except for the offset; native ones contain their versions."""
        chosen = {each.place: each for each in letters}
        bounds = {
            partition: (min(offsets), max(offsets) + 1)
            for partition in {p for p, _ in chosen}
            for offsets in [[o for p, o in chosen if p == partition]]
        }
        own = {"enable.idempotence": True, "message.max.bytes": LARGEST}
        producer = self._brokers.connect(ck.Producer, own)
        failed: dict[tuple[int, int], str] = {}
        done: list[StoredDeadLetter] = []
        for message in self._messages(bounds):
            letter = chosen.pop((message.partition(), message.offset()), None)
            if letter is None:
                continue
            if not letter.whole:
                failed[letter.place] = (
                    "it was too large to be kept: let its producer send smaller messages"
                )
                continue
            self._send(producer, letter, message, failed)
            done.append(letter)
            if len(done) == _CHUNK:
                self._settle(producer, done, failed)
                done = []
        self._settle(producer, done, failed)
        failed |= dict.fromkeys(chosen, "it is no longer in the topic")
        return [(each, failed[each.place]) for each in letters if each.place in failed]

    def close(self) -> None:
        self._consumer.close()

    def _send(
        self,
        producer: Any,
        letter: StoredDeadLetter,
        message: Any,
        failed: dict[tuple[int, int], str],
    ) -> None:
        def delivered(error: Any, _message: Any) -> None:
            if error is not None:
                failed[letter.place] = error.str()

        try:
            producer.produce(
                letter.topic,
                message.value(),
                message.key(),
                partition=letter.from_partition,
                headers={ATTEMPT_HEADER: str(letter.attempt + 1).encode()},
                timestamp=max(0, letter.timestamp_ms),  # 0: now
                on_delivery=delivered,
            )
        except (ck.KafkaException, BufferError) as error:
            failed[letter.place] = kafka_error_text(error)

    def _settle(
        self, producer: Any, sent: Sequence[StoredDeadLetter], failed: dict[tuple[int, int], str]
    ) -> None:
        """Wait until Kafka has the messages, then mark their letters as sent."""
        if producer.flush(2 * self._brokers.answer_s):
            producer.purge()
            producer.flush(1.0)
        taken: dict[int, list[str]] = {}
        for letter in sent:
            if letter.place not in failed:
                taken.setdefault(letter.partition, []).append(str(letter.offset))
        for partition, offsets in taken.items():
            headers: list[tuple[str, str | bytes | None]] = [
                (_REQUEUED, ",".join(offsets).encode())
            ]
            producer.produce(self._topic, None, None, partition=partition, headers=headers)
        if producer.flush(2 * self._brokers.answer_s):
            raise Unavailable(
                f"Kafka at {self._brokers.addresses} accepted {len(sent)} letters, but not the note about it"
                f"{self._brokers.why()}: they remain listed"
            )

    def _bounds(self) -> dict[int, tuple[int, int]]:
        """First offset and end offset of each partition."""
        count = self._brokers.topics(self._consumer).get(self._topic, 0)
        try:
            return {
                p: self._consumer.get_watermark_offsets(
                    ck.TopicPartition(self._topic, p), timeout=self._brokers.answer_s
                )
                for p in range(count)
            }
        except ck.KafkaException as error:
            raise self._unreadable(kafka_error_text(error)) from None

    def _messages(self, bounds: dict[int, tuple[int, int]]) -> Iterator[Any]:
        """Messages between the offsets, in order within each partition."""
        open_ = {p: end for p, (begin, end) in bounds.items() if begin < end}
        self._consumer.assign([ck.TopicPartition(self._topic, p, bounds[p][0]) for p in open_])
        while open_:
            first = self._consumer.poll(2 * self._brokers.answer_s)
            if first is None:
                raise self._unreadable("no message arrived in time")
            # `consume` waits until it has as many as it was asked for.
            for message in (first, *self._consumer.consume(_CHUNK, 0.0)):
                partition, error = message.partition(), message.error()
                if error is not None:
                    if error.code() == ck.KafkaError._PARTITION_EOF:
                        open_.pop(partition, None)
                    continue
                end = open_.get(partition, -1)
                if message.offset() < end:
                    yield message
                if message.offset() >= end - 1:
                    open_.pop(partition, None)
        self._consumer.unassign()

    def _unreadable(self, why: str) -> Unavailable:
        return Unavailable(
            f"{self._topic} cannot be read from Kafka at {self._brokers.addresses}: {why}"
            f"{self._brokers.why()}; check the broker and try again"
        )


def _letter(message: Any, headers: dict[str, bytes]) -> StoredDeadLetter:
    def text(name: str) -> str:
        return (headers.get(name) or b"").decode(errors="replace")

    def number(name: str) -> int:
        return int(text(name)) if text(name).lstrip("-").isdecimal() else -1

    payload, topic = message.value() or b"", text("hps-topic")
    whole = SIZE_HEADER not in headers
    return StoredDeadLetter(
        message.partition(),
        message.offset(),
        message.timestamp()[1],
        text("hps-reason") or "?",
        number("hps-at-byte"),
        topic,
        number("hps-partition"),
        number("hps-offset"),
        number("hps-timestamp"),
        len(payload) if whole else number(SIZE_HEADER),
        _table(topic, payload),
        whole,
        attempt_of(headers),
    )


def _table(topic: str, payload: bytes) -> str | None:
    """The table that a message names, even if the rest of it is damaged."""
    named = hps_table(topic)
    if named is not None:
        return "/".join(named)
    if not payload.startswith(MAGIC) or len(payload) < HEADER.size:
        return None
    fields = HEADER.unpack_from(payload)
    start = fields[_HEADER_BYTES]
    name = payload[start : start + fields[_NAME_BYTES]]
    return name.decode("ascii") if name and all(0x21 <= c <= 0x7E for c in name) else None
