"""Versions from the clock: they only increase, and those of two clocks differ."""

from __future__ import annotations

import threading
import time

import numpy as np

from hps.types import make_version, version_unix_ms
from hps.updates.version_clock import OFFSETS, VersionClock

NOW = int(time.time() * 1000)


def test_versions_grow_when_the_clock_goes_back():
    clock = VersionClock(0)
    before = clock.take(NOW, 3)
    after = clock.take(NOW - 60_000, 3)
    assert after.min() == before.max() + 1
    assert version_unix_ms(int(clock.take(NOW + 5, 1)[0])) == NOW + 5


def test_versions_continue_after_more_rows_than_sequences_in_a_millisecond():
    clock = VersionClock()
    many = clock.take(NOW, (1 << 20) + 5)
    assert clock.take(NOW, 1)[0] == many[-1] + 1
    assert int(many[-1]) - int(many[0]) == len(many) - 1


def test_threads_get_distinct_versions():
    clock, taken = VersionClock(), []

    def take() -> None:
        taken.extend([clock.take(NOW, 7) for _ in range(200)])

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = np.concatenate(taken)
    assert len(np.unique(together)) == len(together) == 4 * 200 * 7


def test_clock_set_back_still_makes_increasing_versions(monkeypatch):
    clock = VersionClock()
    before = clock.now()
    earlier_ns = time.time_ns() - 3600 * 10**9
    monkeypatch.setattr("hps.updates.version_clock.time.time_ns", lambda: earlier_ns)
    assert clock.now() == before + 1


def test_two_clocks_make_different_versions_in_one_millisecond():
    taken = [VersionClock().take(NOW, 10) for _ in range(8)]
    assert len(np.unique(np.concatenate(taken))) == 80
    assert {version_unix_ms(int(each[0])) for each in taken} == {NOW}


def test_versions_keep_the_millisecond_for_every_offset():
    taken = VersionClock(OFFSETS - 1).take(NOW, OFFSETS)
    assert {version_unix_ms(int(taken[i])) for i in (0, -1)} == {NOW}


def test_two_clocks_make_different_versions_above_stored_ones():
    now, ahead = make_version(NOW), make_version(NOW + 1_800_000)
    stored = np.array([0, now - 1, now, ahead, 2**64 - 1], np.uint64)
    one, two = (VersionClock(offset).above(now, stored).tolist() for offset in (3, 4))
    assert one == [now, now, now + 4, ahead + 4, 0]
    assert two == [now, now, now + 5, ahead + 5, 0]
