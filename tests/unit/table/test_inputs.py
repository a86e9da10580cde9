"""Bad input is refused with both sides named, before anything changes; arrays of other libraries."""

import numpy as np
import pytest

from hps.errors import BadRequest
from tests.support.tables import BACKENDS, DIM, everything, make, rows_of

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


class OnDevice:
    """An array on CUDA device 3, as far as its caller can tell."""

    def __dlpack_device__(self):
        return 2, 3

    def __dlpack__(self, **_):
        raise AssertionError("must not be read")


class Tensor:
    """An array that is not NumPy's, read through DLPack."""

    def __init__(self, array):
        self.array = np.asarray(array)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


def table_of_two(backend):
    table = make(backend)
    table.insert_or_assign([1, 2], rows_of([1, 2]), [1, 2])
    return table


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((2, DIM)), r"rows are float64 \(2, 4\), but 2 keys .* have float32 \(2, 4\)"),
        (np.zeros((2, 5), np.float32), r"rows are float32 \(2, 5\), .* \(2, 4\)"),
        (np.zeros((3, DIM), np.float32), r"rows are float32 \(3, 4\), .* \(2, 4\)"),
        (np.zeros(DIM, np.float32), r"rows are float32 \(4,\), .* \(2, 4\)"),
        ("rows", "rows are <U4"),
        (OnDevice(), "rows are on CUDA device 3, but this table is (in host memory|on device 0)"),
    ],
)
def test_rows_that_do_not_fit_are_refused(backend, rows, message):
    table = table_of_two(backend)
    before = everything(table)
    calls = [table.insert_or_assign, table.insert_and_evict, table.find_or_insert, table.assign]
    for write in calls:
        with pytest.raises(BadRequest, match=message):
            write([1, 3], rows, [1, 2])
    with pytest.raises(BadRequest, match=message):
        table.accum_or_assign([1, 3], rows, [True, False], [1, 2])
    with pytest.raises(BadRequest, match=message):
        table.assign_values([1, 3], rows)
    assert everything(table) == before


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([1.5, 2.0], "keys must be integers"),
        ([[1, 2]], r"keys must be \(n,\), not \(1, 2\)"),
        (["a"], "keys must be integers"),
        (OnDevice(), "keys are on CUDA device 3, but this table is (in host memory|on device 0)"),
    ],
)
def test_keys_that_do_not_fit_are_refused(backend, keys, message):
    table = table_of_two(backend)
    for call in (table.find, table.contains, table.find_rows, table.erase):
        with pytest.raises(BadRequest, match=message):
            call(keys)
    with pytest.raises(BadRequest, match=message):
        table.insert_or_assign(keys, rows_of([1, 2]), [1, 2])
    assert table.size == 2


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([1, 2, 3], r"scores are int64 \(3,\), but there are 2 keys"),
        ([1.0, 2.0], "scores are float64, but a table takes uint64"),
        ([1, -2], "a score is -2, but scores are at least 0"),
    ],
)
def test_scores_that_do_not_fit_are_refused(backend, scores, message):
    table = table_of_two(backend)
    before = everything(table)
    for write in (table.insert_or_assign, table.find_or_insert, table.assign):
        with pytest.raises(BadRequest, match=message):
            write([1, 3], rows_of([1, 3]), scores)
    assert everything(table) == before


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (
            np.zeros((2, DIM)),
            r"out is float64 \(2, 4\), but the rows of 2 keys are float32 \(2, 4\)",
        ),
        (np.zeros((1, DIM), np.float32), r"out is float32 \(1, 4\), .* \(2, 4\)"),
        (np.zeros((DIM, 2), np.float32).T, "out must be C-contiguous"),
        ([[0.0] * DIM] * 2, "must be an array|are in host memory"),
        (OnDevice(), "out rows are on CUDA device 3"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(backend, out, message):
    table = table_of_two(backend)
    with pytest.raises(BadRequest, match=message):
        table.find([1, 2], out=out)
    with pytest.raises(BadRequest, match=message):
        table.find_or_insert([5, 6], rows_of([5, 6]), [1, 2], out=out)
    assert table.size == 2


def test_flags_and_predicates_that_do_not_fit_are_refused(backend):
    table = table_of_two(backend)
    for flags in ([True], [1, 0]):
        with pytest.raises(BadRequest, match=r"but 2 keys take bool \(2,\)"):
            table.accum_or_assign([1, 3], rows_of([1, 3]), flags, [1, 2])
    for predicate in (lambda keys, scores: True, lambda keys, scores: keys):
        for call in (table.erase_if, table.size_if):
            with pytest.raises(BadRequest, match=r"the predicate returned .*bool \(2,\)"):
                call(predicate)
    with pytest.raises(BadRequest, match="n and offset are -1 and 0"):
        table.export_batch(-1)
    with pytest.raises(BadRequest, match="n and offset are 1 and -2"):
        table.export_batch_if(lambda keys, scores: scores > 0, 1, -2)
    assert table.size == 2


def test_arrays_of_other_libraries_are_taken_through_dlpack(backend):
    table = make(backend)
    keys, scores = Tensor(np.array([7, 8])), Tensor(np.array([1, 2], np.uint64))
    table.insert_or_assign(keys, Tensor(rows_of([7, 8])), scores)
    out = np.zeros((2, DIM), np.float32)
    if backend.startswith("cuda"):
        with pytest.raises(BadRequest, match="out rows are in host memory"):
            table.find(keys, out=Tensor(out))
    else:
        assert table.find(keys, out=Tensor(out)).found.all()
        np.testing.assert_array_equal(out, rows_of([7, 8]))
    assert table.accum_or_assign(keys, Tensor(rows_of([7, 8])), Tensor([True, True]), scores).all()


def test_arrays_that_are_not_contiguous_and_lists_are_taken(backend):
    table = make(backend)
    keys, rows = np.arange(20)[::2], rows_of(np.arange(20))[::2]
    table.insert_or_assign(keys, rows, np.arange(20, dtype=np.uint64)[::2])
    assert table.find(keys, with_scores=True).scores.tolist() == keys.tolist()
    np.testing.assert_array_equal(table.find(keys).rows, rows)
    table.insert_or_assign([100], [[1, 2, 3, 4]], [5])
    assert table.find(np.array([100], np.uint32)).rows.tolist() == [[1, 2, 3, 4]]
