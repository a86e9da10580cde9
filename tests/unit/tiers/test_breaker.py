import pytest

from hps.tiers.breaker import CircuitBreaker


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return CircuitBreaker(failures_to_open=3, retry_after_s=10.0, clock=clock)


def fail(breaker, times):
    for _ in range(times):
        breaker.failed(breaker.admit())


def test_circuit_opens_after_failures_in_a_row(breaker):
    fail(breaker, 2)
    breaker.succeeded(breaker.admit())
    fail(breaker, 2)
    assert breaker.state == "closed"
    fail(breaker, 1)
    assert breaker.state == "open"
    assert breaker.admit() is None


def test_one_probe_is_admitted_after_pause(breaker, clock):
    fail(breaker, 3)
    clock.now = 9.9
    assert breaker.admit() is None
    clock.now = 10.0
    assert breaker.state == "half-open"
    probe = breaker.admit()
    assert probe is not None
    assert breaker.admit() is None
    breaker.succeeded(probe)
    assert breaker.state == "closed"
    assert breaker.admit() is not None


def test_failed_probe_reopens_circuit(breaker, clock):
    fail(breaker, 3)
    clock.now = 10.0
    breaker.failed(breaker.admit())
    assert breaker.state == "open"
    clock.now = 19.9
    assert breaker.admit() is None
    clock.now = 20.0
    assert breaker.admit() is not None


def test_inconclusive_probe_admits_next_probe(breaker, clock):
    fail(breaker, 3)
    clock.now = 10.0
    breaker.inconclusive(breaker.admit())
    assert breaker.state == "half-open"
    assert breaker.admit() is not None
    assert breaker.admit() is None


def test_outcomes_of_calls_before_a_state_change_are_ignored(breaker, clock):
    early = [breaker.admit() for _ in range(3)]
    fail(breaker, 3)
    breaker.succeeded(early[0])
    assert breaker.state == "open"
    clock.now = 10.0
    probe = breaker.admit()
    breaker.failed(early[1])
    breaker.inconclusive(early[2])
    assert breaker.admit() is None
    breaker.succeeded(probe)
    assert breaker.state == "closed"
