"""Pauses between attempts."""

from hps.backoff import Backoff, CallBackoff


def test_pauses_double_up_to_the_maximum():
    backoff = Backoff(0.1, 1.0, jitter=0)
    assert [backoff.pause_s(n) for n in (1, 2, 3, 4, 5, 10_000)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_jitter_spreads_pauses_but_not_past_the_maximum():
    pauses = {Backoff(1.0, 1.2).pause_s(1) for _ in range(1000)}
    assert len(pauses) > 100
    assert 0.5 <= min(pauses) < 0.6
    assert max(pauses) == 1.2


def test_call_backoff_skips_more_calls_after_each_failure():
    backoff = CallBackoff()
    skipped = []
    for _ in range(8):
        calls = 0
        while not backoff.is_due():
            calls += 1
        skipped.append(calls)
        backoff.record(worked=False)
    assert skipped == [0, 1, 3, 7, 15, 31, 63, 64]
    backoff.record(worked=True)
    assert backoff.is_due()
