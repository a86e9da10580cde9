"""Rounds of `benchmarks.switch`: answers of times that other machines disturbed are not judged."""

import numpy as np

from benchmarks.stolen_time import DRAIN_S, disturbed, inside, share_of, stolen
from benchmarks.switch_rounds import Half, Measured

S = 10**9
DRAIN = int(DRAIN_S * S)


def test_a_disturbed_time_lasts_until_the_queue_has_drained():
    windows = [(0, S, 0.0), (S, 2 * S, 0.3), (2 * S, 3 * S, 0.5), (9 * S, 10 * S, 0.1)]
    times = disturbed(windows)
    assert times == [(S, 3 * S + DRAIN), (9 * S, 10 * S + DRAIN)]
    at = np.array([0, S, 3 * S + DRAIN, 9 * S])
    assert inside(times, at).tolist() == [False, True, False, True]
    assert share_of(times, 0, 2 * S) == 0.5


def test_stolen_share_is_of_all_time():
    assert stolen([0] * 8, [5, 0, 0, 4, 0, 0, 0, 1]) == 0.1
    assert stolen([1] * 8, [1] * 8) == 0


def measured(times, capacities=(10.0, 9.5, 20.0), pairs=1):
    """Two pairs of 10 s halves; a request a second, late by 1 ms, by 9 ms where a half has changes."""
    fields = [("due", "i8"), ("end", "i8"), ("status", "i8"), ("wrong", "i8"), ("value", "i8")]
    records = np.zeros(40, fields)
    records["due"] = np.arange(40) * S
    busy = np.arange(40) // 10 % 2
    records["end"] = records["due"] + (1 + 8 * busy) * 10**6
    records["status"] = 200
    halves = [Half(i * 10 * S, (i + 1) * 10 * S) for i in range(4)]
    for half in halves:
        half.disturbed = share_of(times, half.begin, half.end)
    return Measured(pairs, halves[::2], halves[1::2], records, [], capacities, disturbed=times)


def test_calm_pairs_are_judged_whole():
    judged = measured([]).without_disturbed()
    assert (len(judged.records), judged.ratio(99), len(judged.quiet)) == (40, 9, 2)


def test_answers_of_disturbed_times_and_disturbed_pairs_are_left_out():
    found = measured([(12 * S, 14 * S), (20 * S, 26 * S)])
    found.records["end"][12:14] += S
    found.records["status"][[13, 25]] = 503
    judged = found.without_disturbed()
    assert len(judged.quiet) == 1
    assert len(judged.records) == 18
    assert (judged.ratio(99), judged.failed, found.failed) == (9, 0, 2)
    assert found.ratio(99) > 50


def test_rounds_of_a_machine_that_became_slower_are_left_out():
    found = measured([], (10.0, 8.0, 8.0))
    assert found.slowed == [True, False]
    assert [half.begin for half in found.without_disturbed().quiet] == [20 * S]
    assert not measured([], (10.0, 8.0), pairs=2).without_disturbed().quiet
