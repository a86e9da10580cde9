import threading
import time

import pytest

from hps.errors import TierError
from hps.tiers.background_refresh import BackgroundValue
from tests.support.waiting import until


@pytest.fixture
def remember():
    made = []

    def make(look, every_s=0.0):
        made.append(BackgroundValue(look, every_s, "test"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_reading_value_never_waits(remember):
    gate = threading.Event()
    slow = remember(lambda: gate.wait(60) and 7)
    start = time.monotonic()
    assert [slow.value for _ in range(20)] == [None] * 20
    assert time.monotonic() - start < 5
    gate.set()
    until(lambda: slow.value == 7)


def test_value_is_refreshed_only_when_old(remember):
    looked = []
    young = remember(lambda: looked.append(1) or len(looked), every_s=1000)
    young.refresh()
    assert [young.value for _ in range(5)] == [1] * 5
    time.sleep(0.05)
    assert len(looked) == 1
    old = remember(lambda: looked.append(1) or len(looked))
    until(lambda: (old.value or 0) > 3)


def test_last_value_outlives_reported_failure(remember):
    answers = iter([5, TierError("redis", "gone"), 6])

    def look():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    kept = remember(look, every_s=1000)
    assert (kept._value, kept._error) == (None, None)
    kept.refresh()
    assert (kept.value, kept.error) == (5, None)
    kept.refresh()
    assert (kept.value, kept.error) == (5, "redis: gone")
    kept.refresh()
    assert (kept.value, kept.error) == (6, None)
