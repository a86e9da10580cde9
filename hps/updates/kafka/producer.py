"""Producer: sends rows and deletions to Kafka, for trainers and tools.

    with Producer("kafka:9092", model="ctr") as producer:
        producer.send("user", keys, rows)      # (n,) int64, (n, dim) float32
        producer.send("user", [], rows[:0], deleted=gone)

Rows are in Kafka when `flush` returns. After an error, send again what may be missing: readers keep the
newest version of each key, so that repeating is harmless."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self

import confluent_kafka as ck

from hps.errors import BadRequest, ConfigError, HpsError, Unavailable
from hps.tiers.positions import TableChanges
from hps.updates.codec import FULL, MessageAttributes, hps_table, hps_topic
from hps.updates.kafka.brokers import Brokers
from hps.updates.kafka.message_encoder import (
    Format,
    check_changes,
    encode,
    format_named,
    split_by_partition,
    unix_ms,
)
from hps.updates.topics import native_topic
from hps.updates.version_clock import VersionClock

log = logging.getLogger(__name__)

GROUPS = 8
"""Default number of key groups of HPS's producers."""
Compression = Literal["none", "lz4", "zstd", "snappy", "gzip"]
_OURS = ("enable.idempotence", "acks")
_NAME = re.compile(r"[a-zA-Z0-9_\-]{1,120}")
_BATCH = 1_000_000
_POLL_S = 0.1


class Producer:
    """Sends rows of the tables of ``model``. Any thread may call any method.

    If several threads send one key, the call that took its versions last wins, in any order of arrival;
    in HPS's format, which has no versions, the message that arrives last.

    ``brokers``: `host:port`, several separated by commas. ``format``: ``native`` messages go to one
    topic per model, ``hps`` ones to HPS's topic of each table, without versions and deletions.
    ``partitions``: number of key groups, and of partitions of a topic that is created; all producers of
    a topic must use the same. ``message_bytes``: the largest message that is made. ``buffer_bytes``:
    memory for messages that Kafka has not acknowledged; `send` waits up to ``wait_s`` for space in it.
    ``key_bits``: 32 for tables of `key_dtype: uint32`. ``delivery_s``: how long delivery is tried
    before a message counts as failed. ``options``: more settings of librdkafka, as `security.protocol`.

    Raises Unavailable within ``connect_s`` when no broker responds, ConfigError for wrong options."""

    # Public API: the settings are keyword arguments, of which trainers pass two or three.
    def __init__(
        self,
        brokers: str,
        *,
        model: str,
        format: Format = "native",
        partitions: int = GROUPS,
        compression: Compression = "lz4",
        key_bits: Literal[32, 64] = 64,
        message_bytes: int = FULL,
        buffer_bytes: int = 64 << 20,
        linger_ms: float = 5.0,
        wait_s: float = 30.0,
        delivery_s: float = 120.0,
        connect_s: float = 5.0,
        options: Mapping[str, str | int | float | bool] | None = None,
    ) -> None:
        _check_settings(format, model, partitions, options or {})
        self._model, self._format = model, format
        self._groups, self._key_bits, self._full = partitions, key_bits, message_bytes
        self._wait_s = wait_s
        self._clock = VersionClock()
        self._lock = threading.Lock()
        self._failed, self._failure = 0, ""
        self._partitions: dict[str, int] = {}
        self._closed = False
        self._brokers = Brokers(brokers, options, connect_s)
        batch_bytes = max(_BATCH, message_bytes + 1024)  # topics take 1 MiB by default
        own = {
            "enable.idempotence": True,
            "compression.type": compression,
            "linger.ms": linger_ms,
            "batch.size": batch_bytes,
            "message.max.bytes": batch_bytes,
            "queue.buffering.max.kbytes": max(buffer_bytes, 2 * message_bytes) >> 10,
            "message.timeout.ms": round(delivery_s * 1000),
        }
        self._producer: ck.Producer = self._brokers.connect(ck.Producer, own)

    def send(
        self,
        table: str,
        keys: Any,
        rows: Any,
        versions: Any = None,
        deleted: Any = None,
        *,
        event_time: float | None = None,
        ttl_s: int = 0,
        step: int = 0,
        dense_version: int = 0,
        row_format: str | None = None,
    ) -> int:
        """Send ``rows (n, dim)`` of ``keys (n,)`` and deletions of ``deleted (m,)``; returns n + m.

        Rows are float32 or float16; arrays are NumPy's or anything on the host with ``__dlpack__``. For
        deletions alone, ``rows`` is (0, dim) of the table.

        ``row_format``: of the rows in the messages, such as ``"int8"`` (docs/row-formats.md). Rows are
        converted to it, unless they are rows of this format, (n, width) uint8, already.

        ``versions (n + m,)`` uint64, Unix ms << 20 | sequence, of the rows and then of the deletions.
        By default they come from ``event_time`` (Unix seconds when the rows were made; now), and never
        decrease within this producer, even when the clock does: what is sent later wins. To send old
        rows that must not replace newer ones, pass their versions. ``ttl_s``: a node drops rows that
        arrive more than so many seconds after the event time, 0: never; stored rows stay. ``step``,
        ``dense_version``: training step and dense network that the rows belong to, 0 for none.

        Returns when the messages are in memory. Raises BadRequest for arrays that do not match, and
        Unavailable when earlier messages failed, or there was no space for ``wait_s``: some rows of
        this call may have been sent then. After Unavailable call `flush`, and send again what was sent
        since the last flush that returned."""
        self._check(table)
        attributes = MessageAttributes(unix_ms(event_time), ttl_s, step, dense_version)
        if self._format == "hps" and versions is not None:
            raise BadRequest("HPS's format has no versions; leave them out")
        if self._format == "hps" and row_format not in (None, "float32"):
            raise BadRequest(f"HPS's format has no rows of {row_format}; use the native format")
        stored = None if row_format is None else format_named(row_format)
        changes = check_changes(
            keys, rows, versions, deleted, self._clock, attributes.event_ms, stored
        )
        self._send(table, changes, attributes)
        return len(changes.keys) + len(changes.deleted)

    def flush(self, timeout_s: float = 30.0) -> None:
        """Wait until Kafka has acknowledged everything sent so far.

        Raises Unavailable when it has not within ``timeout_s`` (delivery continues: flush again), or
        when messages failed since the last flush."""
        waiting = self._producer.flush(timeout_s)
        with self._lock:
            failed, why = self._failed, self._failure
            self._failed = 0
        if failed:
            raise _lost(failed, why)
        if waiting:
            raise Unavailable(
                f"Kafka at {self._brokers.addresses} has not acknowledged {waiting} messages within "
                f"{timeout_s:g} s{self._brokers.why()}; flush again, or check the broker"
            )

    def watermark(self) -> dict[str, dict[str, int]]:
        """End offsets of the model's topics, `{topic: {partition: offset}}`. Raises Unavailable.

        They belong in the manifest of a version whose tables contain everything sent so far: nodes that
        load it continue there. Creates the topic of native messages if it does not exist."""
        if self._format == "native":
            self._count(native_topic(self._model))
        topics = {
            topic: partitions
            for topic, partitions in self._brokers.topics(self._producer).items()
            if topic == native_topic(self._model)
            or ((named := hps_table(topic)) is not None and named[0] == self._model)
        }
        return {
            topic: {str(partition): offset for partition, offset in ends.items()}
            for topic, ends in self._brokers.ends(topics).items()
        }

    def close(self, timeout_s: float = 30.0) -> None:
        """`flush`, then drop what is still queued. Idempotent; `send` fails afterwards."""
        if self._closed:
            return
        self._closed = True
        try:
            self.flush(timeout_s)
        finally:
            self._producer.purge()
            self._producer.flush(1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:  # the first error is the one to raise
            self.close(1.0)
        except HpsError as late:
            log.warning("%s", late)

    # -- messages ----------------------------------------------------------------------------------

    def _check(self, table: str) -> None:
        if self._closed:
            raise BadRequest("the producer is closed")
        if not _NAME.fullmatch(table):
            raise BadRequest(f"table {table!r}: a name has letters, digits, _ and - only")
        self._producer.poll(0)
        with self._lock:
            if self._failed:
                raise _lost(self._failed, self._failure)

    def _send(self, table: str, changes: TableChanges, attributes: MessageAttributes) -> None:
        """Encode all of ``changes``, then pass the messages to librdkafka."""
        native = self._format == "native"
        topic = native_topic(self._model) if native else hps_topic(self._model, table)
        name = f"{self._model}/{table}" if native else table
        deadline = time.monotonic() + self._wait_s
        parts = [
            (
                partition,
                encode(
                    self._format, name, part, attributes, key_bits=self._key_bits, full=self._full
                ),
            )
            for partition, part in split_by_partition(changes, self._groups, self._count(topic))
        ]
        for partition, messages in parts:
            for message in messages:
                self._produce(topic, partition, message, deadline)
        self._producer.poll(0)

    def _produce(self, topic: str, partition: int, message: bytes, deadline: float) -> None:
        while True:
            try:
                self._producer.produce(
                    topic, message, partition=partition, on_delivery=self._delivered
                )
                return
            except BufferError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Unavailable(
                        f"Kafka at {self._brokers.addresses} accepts no more: {len(self._producer)} messages "
                        f"are queued, no space within {self._wait_s:g} s{self._brokers.why()}; check the "
                        "broker, or send fewer rows at a time"
                    ) from None
                self._producer.poll(min(_POLL_S, left))
            except ck.KafkaException as error:
                raise self._refused(topic, len(message), error.args[0]) from None

    def _refused(self, topic: str, size: int, error: Any) -> HpsError:
        """The error for a message that librdkafka does not even queue."""
        if error.code() == ck.KafkaError.MSG_SIZE_TOO_LARGE:
            return BadRequest(_failure(error, topic, size))
        return Unavailable(f"Kafka at {self._brokers.addresses}: {_failure(error, topic, size)}")

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None and error.code() != ck.KafkaError._PURGE_QUEUE:
            with self._lock:
                if not self._failed:
                    self._failure = _failure(error, message.topic(), len(message.value() or b""))
                self._failed += 1

    def _count(self, topic: str) -> int:
        """Number of partitions of the topic, which is created if it does not exist.

        Read once: partitions added during this producer's life get no rows from it."""
        known = self._partitions.get(topic)
        if known is None:
            known = self._brokers.topics(self._producer).get(topic)
            if known is None:
                known = self._brokers.create(self._producer, topic, self._groups)
            self._partitions[topic] = known
        return known


def _check_settings(
    format: str, model: str, partitions: int, options: Mapping[str, object]
) -> None:
    """Raise ConfigError for wrong settings of a producer."""
    if format not in ("native", "hps"):
        raise ConfigError(f"format must be native or hps, not {format!r}")
    if not _NAME.fullmatch(model):
        raise ConfigError(f"model {model!r}: a name has letters, digits, _ and - only")
    if not 1 <= partitions <= 100_000:  # librdkafka's limit for a topic
        raise ConfigError(f"partitions must be from 1 to 100,000, not {partitions}")
    for name in set(_OURS) & set(options):
        raise ConfigError(f"options: {name!r} is set by hps itself; remove it")


def _lost(failed: int, why: str) -> Unavailable:
    return Unavailable(
        f"Kafka did not accept {failed} messages: {why}; send again what was sent since the "
        "last flush that returned"
    )


def _failure(error: Any, topic: str, size: int) -> str:
    text = f"a message of {size} bytes to {topic}: {error.str()}"
    if error.code() == ck.KafkaError.MSG_SIZE_TOO_LARGE:
        text += "; raise the topic's max.message.bytes, or lower message_bytes and batch.size in options"
    elif error.code() == ck.KafkaError._MSG_TIMED_OUT:
        text += "; the broker was unreachable, or too slow"
    return text
