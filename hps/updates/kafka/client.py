"""What readers and writers of Kafka share: settings of librdkafka, its log, and the topic of dead letters."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from typing import Any

import confluent_kafka as ck

from hps.config.update_settings import KafkaSettings
from hps.errors import Unavailable
from hps.updates.source import DeadLetter

client_log = logging.getLogger(f"{__name__}.librdkafka")

ANSWER_S = 10.0
_SAY_AGAIN_S, _MOST_SAID = 60.0, 1000


def client_options(addresses: str) -> dict[str, Any]:
    """What all clients of the brokers at ``addresses`` (`host:port`, with commas) share."""
    return {
        "bootstrap.servers": addresses,
        "client.id": "hps",
        "socket.keepalive.enable": True,
        "reconnect.backoff.max.ms": 2_000,
    }


class DeadLetterTopic:
    """Keeps messages that could not be taken in a topic of their own, as they came; headers say why and where
    from."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._topic = settings.dead_letters
        self._producer = ck.Producer(
            {**client_options(settings.brokers), "enable.idempotence": True, **settings.options},
            logger=client_log,
        )

    def keep(self, letters: Sequence[DeadLetter]) -> None:
        """Raises Unavailable when Kafka does not acknowledge all of them in time."""
        failed: list[str] = []

        def delivered(error: Any, _message: Any) -> None:
            if error is not None:
                failed.append(str(error))

        for letter in letters:
            at = letter.position
            headers: list[tuple[str, str | bytes | None]] = [
                ("hps-reason", letter.reason.name.lower().encode()),
                ("hps-at-byte", str(letter.at).encode()),
                ("hps-topic", at.topic.encode()),
                ("hps-partition", str(at.partition).encode()),
                ("hps-offset", str(at.offset).encode()),
                ("hps-timestamp", str(letter.timestamp_ms).encode()),
            ]
            self._producer.produce(
                self._topic, letter.payload, letter.key, headers=headers, on_delivery=delivered
            )
        if self._producer.flush(ANSWER_S) or failed:
            self._producer.purge()
            why = failed[0] if failed else f"no answer within {ANSWER_S:.0f} s"
            raise Unavailable(f"Kafka does not take dead letters into {self._topic}: {why}")

    def close(self) -> None:
        """End its threads and connections. What `keep` did not return for is given up."""
        self._producer.purge()
        self._producer.close()


class _Once(logging.Filter):
    """Lets a message pass once a minute: librdkafka repeats itself every second while a broker is away."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        # What stands before the last colons is who says it; times and numbers of threads differ.
        text = re.sub(
            r"\d+ms|#\w+-\d+|\d+ identical error\(s\) suppressed", "", record.getMessage()
        )
        now = time.monotonic()
        if now - self._said.get(text, float("-inf")) < _SAY_AGAIN_S:
            return False
        if len(self._said) > _MOST_SAID:
            self._said.clear()
        self._said[text] = now
        return True


client_log.addFilter(_Once())
