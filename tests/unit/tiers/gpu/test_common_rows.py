"""Writes of tables that share arrays: which rows are common, and their versions. No device is needed."""

from types import SimpleNamespace

import numpy as np

from hps.cuda.table import TableState
from hps.tiers.gpu.tables import GpuTables
from hps.types import EmbeddingTable

ONE, TWO = (EmbeddingTable.make("t", 4, model="m", version=n) for n in (1, 2))
OWN = {ONE: [1, 2], TWO: [2, 3]}
"""Keys of rows that the others have not."""


def common_rows(table, keys):
    return ~np.isin(keys, OWN[table]), 100 * table.version


def tables():
    made = GpuTables.__new__(GpuTables)
    made._cupy, made._common_rows = np, common_rows
    return made


def held(table, common_version, alone=False):
    members = {0: ONE} if alone else {0: ONE, 1: TWO}
    return SimpleNamespace(table=table, state=TableState(members, common_version=common_version))


def written(keys, version):
    keys = np.array(keys)
    return {
        "keys": keys,
        "vectors": np.zeros((len(keys), 4)),
        "versions": np.full(len(keys), version, np.uint64),
    }


def test_rows_without_own_ones_are_for_both_members_with_the_lowest_version():
    found = tables()._with_members(held(TWO, 100), written([0, 1, 2, 3], 200))
    assert found["members"].tolist() == [1, 0, 0, 0]
    assert found["versions"].tolist() == [100, 100, 200, 200]
    found = tables()._with_members(held(ONE, 100), written([0, 1, 2, 3], 100))
    assert found["members"].tolist() == [2, 0, 0, 0]


def test_changes_that_the_stores_have_rejected_are_left_out():
    found = tables()._without_common(held(TWO, 100), written([0, 3, 1, 2], 150))
    assert found["keys"].tolist() == [3, 2]
    assert found["vectors"].shape == (2, 4)
    unchanged = written([2, 3], 250)
    assert tables()._without_common(held(TWO, 100), unchanged) is unchanged


def test_a_table_that_never_shared_its_arrays_is_written_as_given():
    given = written([0, 1], 100)
    assert tables()._with_members(held(ONE, None, alone=True), given) is given
    assert tables()._without_common(held(ONE, None, alone=True), given) is given


def test_version_of_common_rows_stays_when_the_table_with_older_files_leaves():
    both = held(TWO, None)
    assert tables()._with_members(both, written([0], 200))["versions"].tolist() == [100]
    assert both.state.common_version == 100
    del both.state.members[0]
    found = tables()._with_members(both, written([0, 3], 200))
    assert (found["versions"].tolist(), found["members"].tolist()) == ([100, 200], [0, 0])


def test_rows_of_tables_without_mapped_files_are_never_common():
    made, both = tables(), held(TWO, None)
    made._common_rows = lambda _table, keys: (np.zeros(len(keys), bool), 0)
    found = made._with_members(both, written([0], 200))
    assert (found["versions"].tolist(), found["members"].tolist()) == ([200], [0])
    assert both.state.common_version is None
