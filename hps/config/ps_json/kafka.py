"""``update_source`` of a ``ps.json`` with type ``kafka_message_queue``, as ``updates.kafka``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hps.config.checks import Path as KeyPath
from hps.config.ps_json.keys import FILTERS, P, U, V
from hps.config.ps_json.values import PsJsonReader, PsJsonSection

Setting = tuple[KeyPath, Any, str]
"""A path below ``updates.kafka``, its value, and the key behind it."""

# The minima of librdkafka and of our settings.
_LEAST = {"metadata_refresh_interval_ms": 10, "receive_buffer_size": 1024}
_ALL = ".+"


def kafka_settings(
    reader: PsJsonReader, source: PsJsonSection, memory: PsJsonSection, disk: PsJsonSection
) -> Iterator[Setting]:
    """Convert the keys; ``reader`` records the errors."""
    brokers = [part.strip() for part in re.split("[,;]", str(source["brokers"])) if part.strip()]
    if not brokers:
        reader.wrong((U, "brokers"), "is empty; expected host:port")
    yield ("brokers",), ",".join(brokers) or "-", f"{U}.brokers"
    yield ("models",), *_models(reader, memory, disk)
    refresh, longest = _LEAST
    if _given(reader, source, refresh):
        options = {"topic.metadata.refresh.interval.ms": int(source[refresh])}
        yield ("options",), options, f"{U}.{refresh}"
    if _given(reader, source, longest):
        yield ("max_message_bytes",), int(source[longest]), f"{U}.{longest}"


def _given(reader: PsJsonReader, source: PsJsonSection, name: str) -> bool:
    if name in source and source[name] < _LEAST[name]:
        found = f"expected a whole number from {_LEAST[name]}, found {source[name]}"
        reader.wrong((U, name), found)
        return False
    return name in source


def _models(
    reader: PsJsonReader, memory: PsJsonSection, disk: PsJsonSection
) -> tuple[list[str], str]:
    """The filters of both databases, and the key of the first.

    HPS matches each with the whole name of a model, between ``hps_et.`` and the table."""
    stated = [(name, list(s["update_filters"])) for name, s in ((V, memory), (P, disk))
              if "update_filters" in s]  # fmt: skip
    found: list[str] = []
    for name, filters in stated:
        for each in filters:
            try:
                re.compile(each)
            except re.error as error:
                message = f"{each!r} is not a regular expression: {error}"
                reader.wrong((name, "update_filters"), message)
                continue
            found.append(_ALL if [each] == FILTERS else each)
    if len(stated) == 2 and stated[0][1] != stated[1][1]:
        reason = "a model of either list is updated in every store"
        for name, _filters in stated:
            reader.differs((name, "update_filters"), reason)
    if not stated:
        return [_ALL], f"{V}.update_filters"
    return list(dict.fromkeys(found)), f"{stated[0][0]}.update_filters"
