"""Writing mapped files: which rows they hold, in bounded memory, complete or not at all."""

import numpy as np
import pytest

from hps.errors import ModelError
from hps.models import external_sort, mapped_file
from hps.models.mapped_file import MappedOptions, write_mapped
from hps.models.tables import open_table
from hps.native.mapped_format import open_mapped
from hps.row_format import row_format


def files_of(folder, keys, dim=3, seed=0):
    folder.mkdir(parents=True, exist_ok=True)
    np.asarray(keys, np.int64).tofile(folder / "key")
    vectors = np.random.default_rng(seed).normal(0, 10, (len(keys), dim)).astype(np.float32)
    vectors.tofile(folder / "emb_vector")
    return open_table(folder, "t", dim, None)


def rows_of(path, keys, dim=3, dtype=np.float32):
    """Return the rows of ``keys``, and which of these the file has."""
    table = open_mapped(path, 1, 1).table
    out, source = np.zeros((len(keys), dim), dtype), np.zeros(len(keys), np.uint8)
    table.fetch(keys, np.arange(len(keys)), out, np.zeros(len(keys), np.uint64), source)
    return out, source == 1


@pytest.fixture(params=["gathered", "bucketed"])
def method(request, monkeypatch):
    """The way of sorting, and many small parts."""
    monkeypatch.setattr(mapped_file, "PART_KEYS", 300)
    monkeypatch.setattr(external_sort, "_BLOCK_BYTES", 12 * 256)
    if request.param == "bucketed":
        monkeypatch.setattr(external_sort, "SORT_ROWS", 0)
        monkeypatch.setattr(external_sort, "BUCKET_BYTES", 20 * 500)


@pytest.mark.usefixtures("method")
@pytest.mark.parametrize("threads", [1, 3])
def test_of_rows_with_the_same_key_the_last_is_kept(tmp_path, threads):
    keys = np.random.default_rng(1).integers(0, 2000, 5000)
    files = files_of(tmp_path / "t", keys)
    done = []
    report = write_mapped(files, tmp_path / "mapped", MappedOptions(threads=threads), done.append)
    last = {key: row for row, key in enumerate(keys.tolist())}
    assert (report.rows, report.duplicates) == (len(last), 5000 - len(last))
    assert sum(done) == len(last)
    found, held = rows_of(tmp_path / "mapped", np.arange(-100, 2100))
    assert held.tolist() == [key in last for key in range(-100, 2100)]
    expected = files.vectors()[[last[key] for key in np.arange(-100, 2100)[held].tolist()]]
    assert (found[held] == expected).all()
    mapped = open_mapped(tmp_path / "mapped", 1, 1)
    assert mapped.damaged_blocks() == []
    assert mapped.header.digest == files.digest
    assert [p.name for p in tmp_path.iterdir() if p.name != "t"] == ["mapped"]


def test_narrow_keys_are_told_by_their_low_32_bits(tmp_path):
    files = files_of(tmp_path, [1, 2**32 + 1, -1, 2**32 - 1, 7])
    report = write_mapped(files, tmp_path / "mapped", MappedOptions(key_bits=32))
    assert (report.rows, report.duplicates) == (3, 2)
    found, held = rows_of(tmp_path / "mapped", np.array([1, 2**32 - 1, 7, -1, 2**32 + 1]))
    assert held.tolist() == [True, True, True, False, False]
    assert (found[:3] == files.vectors()[[1, 3, 4]]).all()


def test_rows_of_float16_are_rounded_as_numpy_does(tmp_path):
    files = files_of(tmp_path, np.arange(1000), 5)
    write_mapped(files, tmp_path / "mapped", MappedOptions(row_format("float16")))
    found, held = rows_of(tmp_path / "mapped", np.arange(1000), 5, np.float16)
    assert held.all()
    assert (found == files.vectors().astype(np.float16)).all()


def test_a_large_table_has_at_most_four_bits_of_index_a_key(tmp_path):
    keys = np.random.default_rng(2).permutation(300_000) - 1000
    report = write_mapped(files_of(tmp_path, keys), tmp_path / "mapped")
    assert report.index_bytes * 8 / len(keys) < 3.2


def test_another_seed_is_tried_if_one_has_no_index(tmp_path, monkeypatch):
    build, tried = mapped_file.build_index_part, []

    def fail_twice(*arguments):
        tried.append(1)
        return None if len(tried) <= 2 else build(*arguments)

    monkeypatch.setattr(mapped_file, "build_index_part", fail_twice)
    files = files_of(tmp_path, np.arange(100))
    write_mapped(files, tmp_path / "mapped")
    found, held = rows_of(tmp_path / "mapped", np.arange(100))
    assert held.all()
    assert (found == files.vectors()).all()
    monkeypatch.setattr(mapped_file, "build_index_part", lambda *_: None)
    with pytest.raises(ModelError, match="no index for its keys with 8 seeds"):
        write_mapped(files, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_interrupted_writer_leaves_the_old_file(tmp_path, monkeypatch):
    files = files_of(tmp_path, np.arange(1000))
    write_mapped(files, tmp_path / "mapped")
    before = (tmp_path / "mapped").read_bytes()

    def stop(_rows):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_mapped(files, tmp_path / "mapped", progress=stop)
    assert (tmp_path / "mapped").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["emb_vector", "key", "mapped"]
    with pytest.raises(ModelError, match="cannot write"):
        write_mapped(files, tmp_path / "absent" / "mapped")


def test_files_that_are_cut_while_they_are_read_are_reported(tmp_path):
    files = files_of(tmp_path, np.arange(1000))
    (tmp_path / "emb_vector").write_bytes(b"short")
    with pytest.raises(ModelError, match="shortened"):
        write_mapped(files, tmp_path / "mapped")
