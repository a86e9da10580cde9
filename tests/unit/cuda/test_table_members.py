"""Tables that use the arrays of another one: their numbers, and when there are none. No device is needed."""

from hps.cuda.layout import MEMBER, MOST_MEMBERS, plan_table_shape
from hps.cuda.table import GpuTable, TableState
from hps.types import EmbeddingTable


def table_of(version, dim=4):
    return EmbeddingTable.make("t", dim, model="m", version=version)


def arrays_of(rows=1000, static=False):
    """A table without memory on a device."""
    made = GpuTable.__new__(GpuTable)
    made.table, made.static, made.member = table_of(0), static, 0
    made.shape = plan_table_shape(made.table, rows)
    made.state = TableState({0: made.table})
    return made


def test_members_have_numbers_and_bits_of_their_own():
    first = arrays_of()
    others = [first.share(table_of(n)) for n in range(1, MOST_MEMBERS)]
    assert [each.member for each in others] == list(range(1, MOST_MEMBERS))
    assert len({each.hidden for each in (first, *others)}) == MOST_MEMBERS
    assert all(each.state is first.state for each in others)
    assert first.share(table_of(9)) is None


def test_number_of_a_table_that_left_is_given_again():
    first = arrays_of()
    second = first.share(table_of(1))
    del first.state.members[0]
    assert second.share(table_of(2)).member == 0


def test_arrays_that_cannot_be_shared():
    assert arrays_of().share(table_of(1, dim=8)) is None
    assert arrays_of(static=True).share(table_of(1)) is None
    assert arrays_of(rows=MEMBER).share(table_of(1)) is None
    dropped = arrays_of()
    dropped.state.members.clear()
    assert dropped.share(table_of(1)) is None
