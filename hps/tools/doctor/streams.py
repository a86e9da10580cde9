"""Checks of update streams: Kafka with its topics, rights and lag, and the folder of files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hps.errors import HpsError
from hps.tools.doctor.check import DoctorCheck, failed
from hps.tools.doctor.clocks import ClockSkew, clock
from hps.tools.output import count, plural

if TYPE_CHECKING:
    from hps.config.update_settings import DirectorySettings, KafkaSettings
    from hps.tiers.positions import TopicPartition
    from hps.types import EmbeddingTable
    from hps.updates.kafka.overview import GroupView, KafkaReport, TopicView
    from hps.updates.topics import TopicTables

# Readers that keep up have a smaller lag.
LAG_WARN = 100_000


def kafka(
    settings: KafkaSettings, groups: Sequence[str], tables: Sequence[EmbeddingTable]
) -> Iterator[DoctorCheck]:
    """Check Kafka; ``groups``: the consumer groups of this deployment. Raises nothing."""
    from hps.updates.kafka.overview import KafkaReport
    from hps.updates.topics import TopicTables

    try:
        view = KafkaReport(settings)
        brokers = view.brokers()
        yield DoctorCheck(
            "Kafka", "OK", f"{plural(len(brokers), 'broker')}: {', '.join(sorted(brokers))}"
        )
        topics = TopicTables(tables, settings.takes)
        found = view.topics([*topics.names, settings.dead_letters])
        dead = found.pop(settings.dead_letters)
        found = _wanted(found, topics)
        yield from _topics(found)
        yield _dead_letters(settings.dead_letters, dead)
        there = {name: topic for name, topic in found.items() if topic and not topic.problem}
        yield from _groups(view, groups, there)
    except HpsError as error:
        yield failed("Kafka", error, "see updates.kafka")


def _wanted(found: dict[str, TopicView | None], topics: TopicTables) -> dict[str, TopicView | None]:
    """Leave out invisible topics that need not exist: those of our format if HPS's exist, and vice versa."""
    from hps.updates.topics import native_topic

    def kind(name: str) -> tuple[str, bool]:
        model = topics.readers(name)[0].model
        return model, name == native_topic(model)

    seen = {kind(name) for name, topic in found.items() if topic and not topic.problem}
    models = {model for model, _ in seen}

    def is_wanted(name: str, topic: TopicView | None) -> bool:
        denied = topic is not None and bool(topic.problem)
        return not denied or kind(name) in seen or kind(name)[0] not in models

    return {name: topic for name, topic in found.items() if is_wanted(name, topic)}


def _topics(found: dict[str, TopicView | None]) -> Iterator[DoctorCheck]:
    there = {name: topic for name, topic in found.items() if topic is not None}
    for name, topic in there.items():
        if topic.problem or (topic.rights is not None and "READ" not in topic.rights):
            why = topic.problem or "it may not be read"
            remedy = f"give the user the rights DESCRIBE and READ on the topic {name}"
            yield DoctorCheck(f"topic {name}", "FAIL", why, remedy)
        elif topic.leaderless:
            found_ = f"{plural(topic.leaderless, 'partition')} without a leader"
            yield DoctorCheck(f"topic {name}", "FAIL", found_, "look after the brokers")
        else:
            yield DoctorCheck(f"topic {name}", "OK", plural(topic.partitions, "partition"))
    if found and not there:
        shown = ", ".join(list(found)[:3])
        remedy = (
            "make it, with as many partitions as readers are to share; or give the user the right DESCRIBE; "
            "or correct updates.kafka.models"
        )
        yield DoctorCheck("topics", "WARN", f"no model has one: not {shown}", remedy)


def _dead_letters(name: str, topic: TopicView | None) -> DoctorCheck:
    label = f"topic {name}"
    if topic is None:
        return DoctorCheck(
            label, "OK", "not there yet; made when it is first needed, if brokers allow that"
        )
    if topic.problem or (topic.rights is not None and "WRITE" not in topic.rights):
        remedy = f"give the user the right WRITE on {name}: else a damaged message stops its stream"
        return DoctorCheck(label, "FAIL", topic.problem or "it may not be written", remedy)
    return DoctorCheck(label, "OK", plural(topic.partitions, "partition"))


def _groups(
    view: KafkaReport, groups: Sequence[str], topics: dict[str, TopicView]
) -> Iterator[DoctorCheck]:
    places = [(name, at) for name, topic in topics.items() for at in range(topic.partitions)]
    begins, ends = view.begins(places), view.ends(places)
    for group in groups:
        yield _lag(group, view.group(group), begins, ends)
    newest = view.newest(places)
    if newest is not None and newest > time.time():  # an older one says nothing of a clock
        yield clock("clock of Kafka's messages", ClockSkew(newest - time.time(), 0.0))


def _lag(
    group: str, found: GroupView, begins: dict[TopicPartition, int], ends: dict[TopicPartition, int]
) -> DoctorCheck:
    """Check a group's lag; ``begins`` and ``ends``: offsets of the messages kept in each partition."""
    from hps.config.update_settings import NODE

    name = f"group {group}"
    if found.problem:
        remedy = f"give the user the rights DESCRIBE and READ on the group {group}"
        return DoctorCheck(name, "FAIL", found.problem, remedy)
    if not found.committed:
        remedy = "nothing, if no server of this group was started yet; else see hps updates status"
        waits = sum(end - begins[place] for place, end in ends.items())
        return DoctorCheck(
            name, "WARN" if waits else "OK", "has not read anything yet", remedy if waits else ""
        )
    at = {place: found.committed.get(place, begin) for place, begin in begins.items()}
    lag = sum(max(0, end - max(at[place], begins[place])) for place, end in ends.items())
    reads = f"{count(lag)} messages behind"
    if is_shared := not group.startswith(
        NODE
    ):  # a node's reader assigns partitions itself and is no member
        reads = f"{plural(found.members, 'member')}, {reads}"
    beyond = sum(at[place] > end for place, end in ends.items())
    if beyond:
        found_ = f"{plural(beyond, 'partition')} ended before what was applied: its topic was created again"
        return DoctorCheck(
            name, "WARN", found_, "start the servers of this group: they read it anew"
        )
    lost = sum(max(0, begin - at[place]) for place, begin in begins.items())
    if lost:
        remedy = "load the models' files again (hps store load), and keep messages for longer: retention.ms"
        gone = f"{count(lost)} messages were deleted before they were read; {reads}"
        return DoctorCheck(name, "FAIL", gone, remedy)
    if is_shared and not found.members and lag:
        return DoctorCheck(name, "WARN", f"no readers; {reads}", "start the servers of this group")
    if lag > LAG_WARN:
        remedy = "see hps updates status: is a store slow, a reader paused?"
        return DoctorCheck(name, "WARN", reads, remedy)
    return DoctorCheck(name, "OK", reads)


def directory(settings: DirectorySettings) -> DoctorCheck:
    """The folder that files appear in."""
    return folder("updates.directory", settings.path, "updates.directory.path")


def folder(name: str, path: Path, setting: str) -> DoctorCheck:
    if not path.is_dir():
        return DoctorCheck(name, "FAIL", f"{path} is not a folder", f"make it, or set {setting}")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        remedy = f"give this user the right to write there, or set {setting}"
        return DoctorCheck(name, "FAIL", f"{path} cannot be written", remedy)
    return DoctorCheck(name, "OK", str(path))
