"""Times of the phases of a load."""

from hps.node import phase_times
from hps.node.phase_times import PhaseTimes


def test_phases_that_took_long_are_named(monkeypatch):
    now = 10.0
    monkeypatch.setattr(phase_times.time, "monotonic", lambda: now)
    times = PhaseTimes()
    for phase, at in (("stores", 10.01), ("caches", 12.31), ("switch", 12.4)):
        now = at
        times.end(phase)
    assert str(times) == "2.4 s (caches 2.3, switch 0.1)"


def test_fast_loads_have_no_phases():
    times = PhaseTimes()
    times.end("stores")
    assert str(times) == "0.0 s"
