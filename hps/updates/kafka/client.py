"""Shared by Kafka clients: librdkafka's settings, its log, and the topic of dead letters."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import confluent_kafka as ck

from hps.bounded_memo import memoize
from hps.config.update_settings import KafkaSettings
from hps.errors import ConfigError, Unavailable
from hps.tiers.positions import StreamPosition
from hps.updates.kafka.credentials import SaslCredentials
from hps.updates.kafka.kept_letters import KeptLetters
from hps.updates.source import DeadLetter, Reason

log = logging.getLogger(__name__)
client_log = logging.getLogger(f"{__name__}.librdkafka")

ANSWER_S = 10.0
SIZE_HEADER = "hps-size"
"""Header with the size of a message that was too large to be kept."""
ATTEMPT_HEADER = "hps-attempt"
"""Header of a message that was sent again, and of its dead letter: 2, and one more each time."""
LARGEST = 1_000_000_000
"""librdkafka's limit for the bytes of a message."""
# A broker answers after so many bytes or ms: each answer costs it and us half a millisecond.
_FETCH_BYTES, _FETCH_MS = 256 << 10, 25
_NEW_TOPICS_MS = 10_000
_REPEAT_S, _MAX_REMEMBERED = 60.0, 1000
_LOG_LETTERS_S = 30.0
_ATTEMPT_DIGITS = 10


def client_options(addresses: str) -> dict[str, Any]:
    """Options of every client of the brokers at ``addresses`` (`host:port`, separated by commas)."""
    return {
        "bootstrap.servers": addresses,
        "client.id": "hps",
        "socket.keepalive.enable": True,
        "reconnect.backoff.max.ms": 2_000,
    }


def reader_options(settings: KafkaSettings) -> dict[str, Any]:
    """Options of a reader's consumer: hps assigns partitions and offsets itself."""
    return {
        **client_options(settings.brokers),
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "session.timeout.ms": 10_000,
        "max.poll.interval.ms": 300_000,
        "topic.metadata.refresh.interval.ms": _NEW_TOPICS_MS,
        "fetch.message.max.bytes": max(1 << 20, settings.max_message_bytes),
        "queued.max.messages.kbytes": settings.prefetch_kb,
        "fetch.min.bytes": _FETCH_BYTES,
        "fetch.wait.max.ms": _FETCH_MS,
        "partition.assignment.strategy": "range,roundrobin",
        **settings.client_options(),
        # Deleted messages must be noticed, whatever the options say.
        "auto.offset.reset": "error",
    }


def check_options(settings: KafkaSettings) -> None:
    """Raise ConfigError for options that librdkafka rejects; connects to no broker."""
    options = reader_options(settings)
    del options["bootstrap.servers"]
    try:
        ck.Consumer({**options, "group.id": "hps"}, logger=client_log).close()
    except ck.KafkaException as error:
        raise ConfigError(
            f"updates.kafka: {kafka_error_text(error)}; correct updates.kafka.options, whose names are "
            "librdkafka's"
        ) from None


def kafka_error_text(error: Exception) -> str:
    """librdkafka's text of a KafkaException or KafkaError."""
    first: Any = error.args[0] if error.args else error
    return str(first.str() if isinstance(first, ck.KafkaError) else first)


class BrokerErrors:
    """The ``error_cb`` of a client; ``text`` is librdkafka's last error about the brokers.

    The error that all brokers are down replaces none: those before it are more specific."""

    def __init__(self) -> None:
        self.text = ""

    def __call__(self, error: Any) -> None:
        if error.code() != ck.KafkaError._ALL_BROKERS_DOWN or not self.text:
            self.text = error.str()


class DeadLetterTopic:
    """Topic of messages that cannot be applied, as they arrived; headers hold the reason and origin.

    Of a message larger than the topic allows, only the headers are kept, with its size. Letters in
    ``kept`` are not kept again."""

    def __init__(self, settings: KafkaSettings, kept: KeptLetters) -> None:
        self._topic = settings.dead_letters
        self._kept = kept
        self._log = _LetterLog(self._topic)
        self._credentials = SaslCredentials(settings)
        self._producer = ck.Producer(
            {
                **client_options(settings.brokers),
                "enable.idempotence": True,
                "message.max.bytes": LARGEST,  # the topic limits them, after compression
                "compression.type": "lz4",
                **settings.client_options(),
            },
            logger=client_log,
        )

    def keep(self, letters: Sequence[DeadLetter]) -> Sequence[DeadLetter]:
        """Keep ``letters``; returns those that were not kept before.

        Raises Unavailable when Kafka does not acknowledge all of these in time."""
        with self._kept.lock:
            if new := self._kept.missing(letters):
                self._keep(new)
                self._kept.add(new)
        self._log.add(new)
        self._log.flush(_LOG_LETTERS_S)
        return new

    def report(self) -> None:
        """Log what was kept since the last log line, if due."""
        self._log.flush(_LOG_LETTERS_S)

    def _keep(self, letters: Sequence[DeadLetter]) -> None:
        self._credentials.renew(self._producer)
        for letter in self._send(letters):
            # Kafka rejects a whole batch of messages for its size.
            for large in self._send([letter]):
                log.warning(
                    "%s rejected a letter of %d bytes: only its headers are kept; raise the topic's "
                    "max.message.bytes", self._topic, len(large.payload),
                )  # fmt: skip
                if self._send([replace(large, payload=b"", key=None)], len(large.payload)):
                    raise Unavailable(
                        f"{self._topic}: its max.message.bytes is too small for any letter"
                    )

    def _send(self, letters: Sequence[DeadLetter], size: int | None = None) -> list[DeadLetter]:
        """Send ``letters``; returns those that are too large.

        ``size``: of the message that a letter replaces."""
        large: list[DeadLetter] = []
        failed: list[str] = []
        for letter in letters:

            def delivered(error: Any, _message: Any, letter: DeadLetter = letter) -> None:
                if error is None:
                    return
                if error.code() == ck.KafkaError.MSG_SIZE_TOO_LARGE:
                    large.append(letter)
                else:
                    failed.append(str(error))

            headers = _headers(letter)
            if size is not None:
                headers.append((SIZE_HEADER, str(size).encode()))
            try:
                self._produce(letter, headers, delivered)
            except ck.KafkaException as error:
                delivered(error.args[0], None)
        if self._producer.flush(ANSWER_S) or failed:
            self._producer.purge()
            why = failed[0] if failed else f"no answer within {ANSWER_S:.0f} s"
            raise Unavailable(f"Kafka did not accept dead letters in {self._topic}: {why}")
        return large

    def _produce(self, letter: DeadLetter, headers: Any, delivered: Any) -> None:
        deadline = time.monotonic() + ANSWER_S
        while True:
            try:
                self._producer.produce(
                    self._topic, letter.payload, letter.key, headers=headers, on_delivery=delivered
                )
            except BufferError as error:  # librdkafka's queue is full
                if time.monotonic() > deadline:
                    self._producer.purge()
                    raise Unavailable(
                        f"timed out sending dead letters to {self._topic}: {error}"
                    ) from None
                self._producer.poll(0.1)
            else:
                return

    def close(self) -> None:
        """End its threads and connections; letters that `keep` has not returned for are dropped."""
        self._log.flush(0.0)
        self._producer.purge()
        self._producer.close()


class _LetterLog:
    """Logs many dead letters in one line: their number by reason and where the first of each was."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._unlogged: dict[Reason, tuple[StreamPosition, int]] = {}
        self._logged_at = float("-inf")

    def add(self, letters: Sequence[DeadLetter]) -> None:
        for letter in letters:
            first, number = self._unlogged.get(letter.reason, (letter.position, 0))
            self._unlogged[letter.reason] = first, number + 1

    def flush(self, every_s: float) -> None:
        """Log what was added, unless the last line is younger than ``every_s``."""
        now = time.monotonic()
        if not self._unlogged or now - self._logged_at < every_s:
            return
        reasons = ", ".join(
            f"{number} {reason.name.lower()} (first: {at.topic}/{at.partition} at {at.offset})"
            for reason, (at, number) in self._unlogged.items()
        )
        log.warning(
            "dead letters kept in %s: %s; list them with hps updates dlq", self._topic, reasons
        )
        self._unlogged, self._logged_at = {}, now


def attempt_of(headers: Mapping[str, bytes | None]) -> int:
    """Number of times that a message was sent, from its headers."""
    text = headers.get(ATTEMPT_HEADER) or b""
    return int(text) if text.isdigit() and len(text) < _ATTEMPT_DIGITS else 1


def _headers(letter: DeadLetter) -> list[tuple[str, str | bytes | None]]:
    at = letter.position
    headers: list[tuple[str, str | bytes | None]] = [
        ("hps-reason", letter.reason.name.lower().encode()),
        ("hps-at-byte", str(letter.at).encode()),
        ("hps-topic", at.topic.encode()),
        ("hps-partition", str(at.partition).encode()),
        ("hps-offset", str(at.offset).encode()),
        ("hps-timestamp", str(letter.timestamp_ms).encode()),
    ]
    if letter.attempt > 1:
        headers.append((ATTEMPT_HEADER, str(letter.attempt).encode()))
    return headers


class _LogRateLimit(logging.Filter):
    """Passes each message once a minute: librdkafka repeats errors every second without a broker."""

    def __init__(self) -> None:
        super().__init__()
        self._logged: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        # Times and thread numbers differ between repetitions.
        text = re.sub(
            r"\d+ms|#\w+-\d+|\d+ identical error\(s\) suppressed", "", record.getMessage()
        )
        now = time.monotonic()
        if now - self._logged.get(text, float("-inf")) < _REPEAT_S:
            return False
        memoize(self._logged, text, now, _MAX_REMEMBERED)
        return True


client_log.addFilter(_LogRateLimit())
