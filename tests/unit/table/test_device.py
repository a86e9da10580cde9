"""A table on a CUDA device with arrays that are there."""

import numpy as np
import pytest

from hps.errors import BadRequest
from tests.support.tables import DIM, make, rows_of


@pytest.mark.gpu
def test_a_table_on_a_device_takes_and_returns_its_arrays():
    table = make("cuda").table
    xp = table._memory.xp
    keys, rows = xp.arange(5), xp.asarray(rows_of(np.arange(5)))
    table.insert_or_assign(keys, rows, xp.arange(5))
    out = xp.zeros((5, DIM), np.float32)
    found = table.find(keys.astype(np.uint32), out=out, with_scores=True)
    assert found.rows is out
    assert bool(found.found.all())
    assert (found.scores.get() == np.arange(5)).all()
    assert table.size_if(lambda keys, scores: keys < 2) == 2
    with pytest.raises(BadRequest, match="keys are float64"):
        table.find(xp.zeros(3))


@pytest.mark.gpu
def test_calls_on_different_streams_are_done_one_after_the_other():
    table = make("cuda", 1 << 16, dim=64).table
    xp = table._memory.xp
    keys = xp.arange(1 << 15)
    streams = [xp.cuda.Stream(non_blocking=True) for _ in range(3)]
    batches = [xp.full((len(keys), 64), value, np.float32) for value in range(3)]
    xp.cuda.get_current_stream().synchronize()
    for turn in range(60):
        with streams[turn % 3]:
            table.insert_or_assign(keys, batches[turn % 3], keys)
        with streams[(turn + 1) % 3]:
            rows = table.find(keys).rows
            assert bool((rows == turn % 3).all())
            assert table.size == len(keys)
