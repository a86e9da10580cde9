"""Decodes Kafka messages to updates, or to dead letters if they can never be applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hps.tiers.positions import StreamPosition
from hps.tracing import traceparent_of
from hps.updates.codec import ConsumerRecords, DecodedMessages, decode_hps, decode_native, hps_table
from hps.updates.future_versions import drop_future_versions
from hps.updates.kafka.client import attempt_of
from hps.updates.source import DeadLetter, Reason, TableUpdate
from hps.updates.topics import TopicTables

# The largest number of links that OpenTelemetry keeps per span.
_LINKS = 128


class MessageDecoder:
    """Decoder for messages of ``topics``.

    ``longest``: bytes of the largest message that is read; ``ahead_s``: how far versions may be ahead
    of the clock."""

    def __init__(self, topics: TopicTables, longest: int, ahead_s: float) -> None:
        self._topics = topics
        self._longest = longest
        self._ahead_s = ahead_s

    def decoded(self, messages: Sequence[Any]) -> tuple[list[TableUpdate], list[DeadLetter]]:
        """Updates in ``messages`` of any topics, and messages that can never be applied."""
        by_topic: dict[str, list[Any]] = {}
        for message in messages:
            by_topic.setdefault(message.topic(), []).append(message)
        updates: list[TableUpdate] = []
        dead: list[DeadLetter] = []
        for topic, some in by_topic.items():
            decoded = self._decode(topic, some)
            if decoded is None:
                dead += [_letter(message, Reason.UNKNOWN_TABLE, 0) for message in some]
                continue
            dead += [_letter(some[i], reason, at) for i, reason, at in decoded.faults()]
            for update in decoded.updates:
                fault = self._fault(update)
                if fault is not None:
                    dead += [_letter(some[i], fault, 0) for i in update.numbers.tolist()]
                    continue
                kept, ahead = drop_future_versions(update, self._ahead_s)
                dead += [_letter(some[i], Reason.AHEAD, 0) for i in ahead]
                if kept is not None:
                    ends = _ends([some[i] for i in kept.numbers.tolist()])
                    updates.append(replace(kept, ends=ends))
        return updates, dead

    def _decode(self, topic: str, messages: list[Any]) -> DecodedMessages | None:
        """Decode messages of one topic; None for an HPS topic of an unknown table.

        The dim of such a table is unknown, and the messages do not contain it."""
        payloads = [message.value() for message in messages]
        named = hps_table(topic)
        if named is None:
            return decode_native(payloads, longest=self._longest)
        name = "/".join(named)
        table = self._topics.tables.get(name)
        if table is None:
            return None
        records = ConsumerRecords(
            payloads,
            np.array([message.timestamp()[1] for message in messages], np.int64),
            np.array([message.offset() for message in messages], np.int64),
            [message.key() for message in messages],
        )
        return decode_hps(records, name, table.dim, key_bits=table.key_bits, longest=self._longest)

    def _fault(self, update: TableUpdate) -> Reason | None:
        table = self._topics.tables.get(update.table)
        if table is None:
            return Reason.UNKNOWN_TABLE
        return None if update.changes.vectors.shape[1] == table.dim else Reason.ROW_SIZE


def traceparents(messages: Sequence[Any]) -> list[str]:
    """Distinct ``traceparent`` headers of the messages, up to a limit."""
    found: dict[str, None] = {}
    for message in messages:
        for name, value in message.headers() or ():
            if name == "traceparent" and value is not None and len(found) < _LINKS:
                found[traceparent_of(bytes(value).decode("latin-1"))] = None
    return [parent for parent in found if parent]


def _ends(messages: Sequence[Any]) -> list[StreamPosition]:
    """The offset after the last message of each partition."""
    ends = {(each.topic(), each.partition()): each.offset() + 1 for each in messages}
    return [StreamPosition(*place, end) for place, end in ends.items()]


def _letter(message: Any, reason: Reason, at: int) -> DeadLetter:
    position = StreamPosition(message.topic(), message.partition(), message.offset())
    payload = message.value() or b""
    headers, timestamp_ms = dict(message.headers() or ()), message.timestamp()[1]
    return DeadLetter(
        reason, at, position, payload, message.key(), timestamp_ms, attempt_of(headers)
    )
