"""The cell from which launches of the compiled core read the score after a hit."""

from types import SimpleNamespace

import pytest

from hps.cuda.layout import COUNT_BITS, EvictionPolicy
from hps.cuda.table import GpuTable, GpuTableOptions


def table_of(policy, **options):
    """A table's clock, without memory on a device."""
    table = GpuTable.__new__(GpuTable)
    table.policy, table.shape = policy, SimpleNamespace(scored=False, capacity=640)
    table.evicted = table.dropped = table._admitted = 0
    table._start_clock(GpuTableOptions(policy, **options))
    return table


@pytest.mark.parametrize(
    "policy", [EvictionPolicy.LRU, EvictionPolicy.LFU, EvictionPolicy.EPOCH_LRU]
)
def test_cell_follows_clock_and_epoch(policy):
    table = table_of(policy)
    cells = []
    for change in (
        lambda: setattr(table, "clock", table.clock + 5),
        lambda: setattr(table, "epoch", 3),
        lambda: table.account(100, 0, 0),
    ):
        change()
        cells.append(int(table.now_cell[0]))
        assert cells[-1] == table.now
    assert cells[-1] > 1
    if policy is not EvictionPolicy.LRU:
        assert cells[-1] >> COUNT_BITS == 3


def test_cell_of_epochs_that_end_by_time_is_published(monkeypatch):
    table = table_of(EvictionPolicy.LFU, epoch_s=10.0)
    assert (table.is_timed, int(table.now_cell[0])) == (True, 0)
    monkeypatch.setattr("hps.cuda.table.time.monotonic", lambda: table._since + 25)
    table.publish_now()
    assert int(table.now_cell[0]) == 2 << COUNT_BITS
