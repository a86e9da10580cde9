"""Ages of unapplied messages, from end offsets of a stream at several instants."""

from __future__ import annotations

import os
import random
import time

import pytest

from hps.config.update_settings import KafkaSettings
from hps.updates.arrival_times import POLL_EVERY_S, ArrivalTimes
from hps.updates.files.directory import PendingFiles
from hps.updates.kafka.cluster import KafkaCluster
from hps.updates.kafka.end_offsets import PendingMessages

PLACE = ("topic", 0)


def test_age_is_unknown_for_messages_before_the_first_poll():
    arrivals = ArrivalTimes()
    assert arrivals.age_s(PLACE, 0, 0.0) is None
    arrivals.record_ends({PLACE: 10}, 1.0)
    assert arrivals.age_s(PLACE, 9, 2.0) is None
    assert arrivals.age_s(PLACE, 10, 2.0) == 0.0


def test_age_is_that_of_the_first_unapplied_message():
    arrivals = ArrivalTimes()
    for at_s, end in ((1.0, 10), (2.0, 10), (3.0, 12), (4.0, 15)):
        arrivals.record_ends({PLACE: end}, at_s)
    assert arrivals.age_s(PLACE, 10, 5.0) == 3.0, "what is missing came after the look at 2"
    assert arrivals.age_s(PLACE, 11, 5.0) == 3.0
    assert arrivals.age_s(PLACE, 12, 5.0) == 2.0
    assert arrivals.age_s(PLACE, 15, 5.0) == 0.0
    arrivals.record_ends({PLACE: 15}, 5.0)
    assert arrivals.age_s(PLACE, 15, 6.0) == 0.0


def test_reader_that_keeps_up_is_fresh_despite_pending_messages():
    arrivals = ArrivalTimes()
    for second in range(100):
        arrivals.record_ends({PLACE: 1000 * (second + 1)}, float(second))
        age_s = arrivals.age_s(PLACE, 1000 * (second + 1) - 1, second + 0.5)
        assert second == 0 or age_s == 1.5


def test_age_grows_when_polls_fail():
    arrivals = ArrivalTimes()
    arrivals.record_ends({PLACE: 10}, 1.0)
    assert arrivals.age_s(PLACE, 10, 1.0 + 2 * POLL_EVERY_S) == 0.0
    assert arrivals.age_s(PLACE, 10, 61.0) == 60.0
    arrivals.record_ends({PLACE: 10}, 62.0)
    assert arrivals.age_s(PLACE, 10, 62.1) == 0.0


def test_partition_that_was_created_again_is_not_behind_its_former_end():
    arrivals = ArrivalTimes()
    arrivals.record_ends({PLACE: 100}, 1.0)
    assert arrivals.age_s(PLACE, 100, 1.0) == 0.0
    arrivals.record_ends({PLACE: 5}, 2.0)
    assert arrivals.age_s(PLACE, 0, 3.0) == 2.0
    assert arrivals.age_s(PLACE, 5, 3.0) == 0.0


def test_long_wait_takes_bounded_memory_and_never_seems_shorter():
    arrivals = ArrivalTimes()
    arrivals.record_ends({PLACE: 0}, 0.0)
    assert arrivals.age_s(PLACE, 0, 0.0) == 0.0
    ends = [(0.0, 0)]
    for second in range(1, 5000):
        ends.append((float(second), second))
        arrivals.record_ends({PLACE: second}, float(second))
    assert len(arrivals._polls[PLACE]) <= 256
    for applied in sorted(random.Random(1).sample(range(4990), 50)):
        true_s = 5000.0 - max(at_s for at_s, end in ends if end <= applied)
        found = arrivals.age_s(PLACE, applied, 5000.0)
        assert true_s <= found <= 1.125 * true_s + 1


def test_each_partition_has_its_own_age():
    arrivals = ArrivalTimes()
    arrivals.record_ends({("t", 0): 5, ("t", 1): 5}, 1.0)
    assert arrivals.age_s(("t", 0), 5, 1.5) == 0.0
    assert arrivals.age_s(("t", 1), 4, 1.5) is None


def test_files_are_pending_until_moved_away(tmp_path):
    waits = PendingFiles(tmp_path)
    place = (str(tmp_path), 0)
    assert waits.ages_s() == {place: 0.0}
    (tmp_path / ".hidden.npz").touch()
    (tmp_path / "notes.txt").touch()
    waits.poll()
    assert waits.ages_s() == {place: 0.0}
    one = tmp_path / "m.t.one.npz"
    one.touch()
    os.utime(one, (0, 0))  # modification time is not arrival time
    waits.poll()
    assert 0.0 <= waits.ages_s()[place] < 3600
    one.unlink()
    waits.poll()
    assert waits.ages_s() == {place: 0.0}
    tmp_path.rename(tmp_path.with_name("gone"))
    with pytest.raises(FileNotFoundError):
        waits.poll()


class Reader:
    """A Kafka reader with fixed offsets."""

    def __init__(self) -> None:
        self.at: dict[tuple[str, int], int] = {}
        self.placed = False

    def applied(self):
        return self.at

    def lag(self):
        return dict.fromkeys(self.at, 0) if self.placed else None

    def record_ends(self, ends):
        pass


def test_former_offsets_count_while_partitions_are_reassigned():
    reader = Reader()
    waits = PendingMessages(KafkaCluster(KafkaSettings(brokers="127.0.0.1:9")), reader, [PLACE[0]])
    assert waits.ages_s() == {PLACE: None}, "the end of the stream is unknown"
    reader.at, reader.placed = {("topic", 3): 10}, True
    assert waits.ages_s() == {("topic", 3): None}
    waits._arrivals.record_ends({("topic", 3): 10}, time.monotonic())
    assert waits.ages_s() == {("topic", 3): 0.0}
    waits._arrivals.record_ends({("topic", 3): 12}, time.monotonic())
    reader.at, reader.placed = {}, False
    assert waits.ages_s()["topic", 3] > 0, "two messages are not applied"
    reader.placed = True
    assert waits.ages_s() == {}, "the group gave the partition to another reader"
