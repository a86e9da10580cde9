"""The clock of a table on the device, and the cell from which launches of the compiled core read it."""

import pytest

from hps.cuda.layout import COUNT_BITS, EvictionPolicy
from hps.cuda.table_clock import TableClock


@pytest.mark.parametrize(
    "policy", [EvictionPolicy.LRU, EvictionPolicy.LFU, EvictionPolicy.EPOCH_LRU]
)
def test_cell_follows_clock_and_epoch(policy):
    clock = TableClock(policy, 640)
    cells = []
    for change in (
        lambda: setattr(clock, "ticks", clock.ticks + 5),
        lambda: setattr(clock, "epoch", 3),
        lambda: clock.admit(100),
    ):
        change()
        cells.append(int(clock.cell[0]))
        assert cells[-1] == clock.now
    assert cells[-1] > 1
    if policy is not EvictionPolicy.LRU:
        assert cells[-1] >> COUNT_BITS == 3


def test_cell_of_epochs_that_end_by_time_is_published(monkeypatch):
    clock = TableClock(EvictionPolicy.LFU, 640, epoch_s=10.0)
    assert (clock.is_timed, int(clock.cell[0])) == (True, 0)
    monkeypatch.setattr("hps.cuda.table_clock.time.monotonic", lambda: clock._since + 25)
    clock.publish()
    assert int(clock.cell[0]) == 2 << COUNT_BITS
