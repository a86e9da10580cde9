"""Decodes Kafka messages to updates, or to dead letters if they can never be applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hps.tiers.positions import StreamPosition, TopicPartition
from hps.tracing import traceparent_of
from hps.updates.codec import ConsumerRecords, decode_hps, decode_native, hps_table
from hps.updates.future_versions import drop_future_versions
from hps.updates.kafka.client import attempt_of
from hps.updates.source import DeadLetter, HeldRows, Reason, TableUpdate
from hps.updates.topics import TopicTables, misfit

Fault = tuple[int, Reason, int]
"""Number of a message, the reason why it cannot be applied, and the offending byte."""

# The largest number of links that OpenTelemetry keeps per span.
_LINKS = 128


@dataclass(frozen=True, slots=True)
class DecodedPoll:
    """Updates, messages that can never be applied, and where a partition has rows of a newer network."""

    updates: list[TableUpdate]
    dead: list[DeadLetter]
    held: dict[TopicPartition, HeldRows]


class MessageDecoder:
    """Decoder for messages of ``topics``.

    ``longest``: bytes of the largest message that is read; ``ahead_s``: how far versions may be ahead
    of the clock."""

    def __init__(self, topics: TopicTables, longest: int, ahead_s: float) -> None:
        self._topics = topics
        self._longest = longest
        self._ahead_s = ahead_s

    def decoded(self, messages: Sequence[Any]) -> DecodedPoll:
        """Decode ``messages`` of any topics."""
        by_topic: dict[str, list[Any]] = {}
        for message in messages:
            by_topic.setdefault(message.topic(), []).append(message)
        updates: list[TableUpdate] = []
        dead: list[DeadLetter] = []
        held: dict[TopicPartition, HeldRows] = {}
        for topic, some in by_topic.items():
            decoded = self._decode(topic, some)
            if decoded is None:
                dead += [_letter(message, Reason.UNKNOWN_TABLE, 0) for message in some]
                continue
            faults, decoded_updates = decoded
            dead += [_letter(some[i], reason, at) for i, reason, at in faults]
            for update in decoded_updates:
                fault = misfit(self._topics.served(update.table), update)
                if fault is not None:
                    dead += [_letter(some[i], fault, 0) for i in update.numbers.tolist()]
                    continue
                kept, ahead = drop_future_versions(update, self._ahead_s)
                dead += [_letter(some[i], Reason.AHEAD, 0) for i in ahead]
                if kept is not None:
                    self._find_held(kept, some, held)
                    ends = _ends([some[i] for i in kept.numbers.tolist()])
                    updates.append(replace(kept, ends=ends))
        return DecodedPoll(updates, dead, held)

    def _find_held(
        self, update: TableUpdate, messages: list[Any], held: dict[TopicPartition, HeldRows]
    ) -> None:
        """Add the first message of each partition whose rows belong to a network that is not live yet."""
        for i in self._topics.newer(update):
            message = messages[update.numbers[i]]
            at, offset = (message.topic(), message.partition()), message.offset()
            if at not in held or offset < held[at].offset:
                version = int(update.messages["dense_version"][i])
                held[at] = HeldRows(offset, update.table, version)

    def _decode(
        self, topic: str, messages: list[Any]
    ) -> tuple[list[Fault], list[TableUpdate]] | None:
        """Decode messages of one topic; None for an HPS topic of an unknown table.

        The dim of such a table is unknown, and the messages do not contain it."""
        payloads = [message.value() for message in messages]
        named = hps_table(topic)
        if named is None:
            decoded = decode_native(payloads, longest=self._longest)
            return decoded.faults(), list(decoded.updates)
        name = "/".join(named)
        # Versions of a model may differ in a table's shape, which the messages do not contain.
        shapes = dict.fromkeys((t.dim, t.key_bits) for t in self._topics.served(name))
        if not shapes:
            return None
        records = ConsumerRecords(
            payloads,
            np.array([message.timestamp()[1] for message in messages], np.int64),
            np.array([message.offset() for message in messages], np.int64),
            [message.key() for message in messages],
        )
        faults: dict[int, Fault] | None = None
        updates: list[TableUpdate] = []
        for dim, bits in shapes:
            decoded = decode_hps(records, name, dim, key_bits=bits, longest=self._longest)
            found = {fault[0]: fault for fault in decoded.faults()}
            faults = found if faults is None else {i: faults[i] for i in faults.keys() & found}
            updates += [replace(each, key_bits=bits) for each in decoded.updates]
        return sorted((faults or {}).values()), updates


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
