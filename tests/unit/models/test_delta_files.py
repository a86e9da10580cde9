"""Tables stored as a base and a delta: the same rows as whole ones, in files and as they are served."""

import shutil

import numpy as np
import pytest

from hps.config.model_schema import ModelSpec
from hps.errors import ModelError
from hps.models.check import check_version
from hps.models.delta_files import DeltaFiles
from hps.models.loader import load_tables
from hps.models.repository import Repository
from hps.models.version_writer import add_mapped_files, write_version
from hps.tiers.base import FetchContext, Part
from hps.tiers.mapped import MappedTier
from hps.types import NoProgress

ROWS = 3000


def spec_of(**table):
    return ModelSpec.model_validate({"name": "m", "tables": [{"name": "t", "dim": 4, **table}]})


SPEC = spec_of()


def rows_of(seed, keys):
    return np.random.default_rng(seed).normal(size=(len(keys), 4)).astype(np.float32)


@pytest.fixture
def tables():
    """The rows of versions 1, 2 and 3: some are changed, some removed, some new, and in another order."""
    rng = np.random.default_rng(7)
    keys = rng.permutation(np.unique(rng.integers(-(2**40), 2**40, ROWS)))[:ROWS]
    found = {1: (keys, rows_of(1, keys))}
    for version in (2, 3):
        keys, vectors = (each.copy() for each in found[version - 1])
        changed = rng.choice(len(keys), 30, replace=False)
        vectors[changed] += 1
        kept = rng.permutation(np.delete(np.arange(len(keys)), rng.choice(len(keys), 20, False)))
        new = np.arange(2**50, 2**50 + 10) + version * 100
        found[version] = (
            np.concatenate([keys[kept], new]),
            np.concatenate([vectors[kept], rows_of(version, new)]),
        )
    return found


def write(root, version, table, spec=SPEC, **options):
    return write_version(root, spec, version, {"t": table}, mapped=True, **options)


@pytest.fixture
def repository(tmp_path, tables):
    for version, table in tables.items():
        write(tmp_path / "models", version, table)
    return Repository(tmp_path / "models")


def content(keys, vectors):
    return {int(k): v.tobytes() for k, v in zip(keys, vectors, strict=True)}


def is_delta(repository, version):
    return isinstance(repository.open("m", version).tables["t"], DeltaFiles)


def test_files_read_as_the_whole_table(repository, tables, tmp_path):
    assert [is_delta(repository, v) for v in (1, 2, 3)] == [False, True, True]
    for version, (keys, vectors) in tables.items():
        files = repository.open("m", version).tables["t"]
        assert files.rows == len(keys)
        every = files.keys()
        assert content(every, files.vectors()) == content(keys, vectors)
        for start, stop in [
            (0, 1),
            (5, 900),
            (files.rows - 30, files.rows + 9),
            (7, 7),
            (9999, None),
        ]:
            assert (files.keys(start, stop) == every[start:stop]).all()
            assert (files.vectors(start, stop) == files.vectors()[start:stop]).all()
        some = np.random.default_rng(1).permutation(files.rows)[:500]
        assert (files.keys_at(some) == every[some]).all()
        assert (files.vectors_at(some) == files.vectors()[some]).all()
        files.copy_vectors(tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == files.vectors().tobytes()
        blocks = list(files.blocks(700))
        assert (np.concatenate([k for k, _ in blocks]) == every).all()
        findings = list(check_version(repository.open("m", version), NoProgress()))
        assert {each.level for each in findings} == {"OK"}, findings


@pytest.mark.parametrize("how", ["mapped", "loaded"])
def test_rows_are_those_of_whole_tables(repository, tables, tmp_path, how):
    probes = np.unique(np.concatenate([*(keys for keys, _ in tables.values()), np.arange(50)]))
    store = MappedTier(tmp_path / "db", maps=how == "mapped")
    try:
        for version, (keys, vectors) in tables.items():
            opened = repository.open("m", version)
            (table,) = opened.embedding_tables().values()
            (report,) = load_tables(opened, [table], store, NoProgress())
            assert (report.how, report.rows) == (how, len(keys))
            assert store.rows(table) == len(keys)
            part = Part.make(table, probes)
            store.fetch([part], FetchContext())
            has_row = part.source != 0
            assert content(probes[has_row], part.out[has_row]) == content(keys, vectors)
            assert (np.flatnonzero(~has_row) == part.missing).all()
            scanned = list(store.scan(table))
            assert content(
                np.concatenate([each.keys for each in scanned]),
                np.concatenate([each.vectors for each in scanned]),
            ) == content(keys, vectors)
            order = np.concatenate([each.keys for each in scanned])
            assert (np.diff(order) > 0).all()
    finally:
        store.close()


def test_folders_of_other_versions_may_be_deleted(repository, tables, tmp_path):
    shutil.rmtree(repository.root / "m/1")
    shutil.rmtree(repository.root / "m/2")
    opened = repository.open("m")
    assert content(opened.tables["t"].keys(), opened.tables["t"].vectors()) == content(*tables[3])
    assert {each.level for each in check_version(opened, NoProgress())} == {"OK"}


def test_delta_is_always_against_one_base(repository):
    """Version 3 differs from 2; its files are those of 1."""
    first = repository.root / "m/1/tables/t"
    for version in (2, 3):
        for name in ("key", "emb_vector", "mapped"):
            assert (repository.root / f"m/{version}/tables/t" / name).samefile(first / name)
    rows = [repository.open("m", v).manifest.tables["t"].delta.rows for v in (2, 3)]
    assert rows[0] == 40 < rows[1]


def test_equal_table_of_a_delta_is_shared(repository, tables):
    write(repository.root, 4, tables[3])
    opened = repository.open("m", 4)
    assert opened.manifest.origin("t").version == 3
    assert opened.tables["t"].digest == repository.open("m", 3).tables["t"].digest
    assert {each.level for each in check_version(opened, NoProgress())} == {"OK"}


def test_large_difference_is_written_whole(repository, tables):
    keys, vectors = tables[1]
    vectors = vectors.copy()
    vectors[: ROWS // 9] += 1
    write(repository.root, 4, (keys, vectors), base=1)
    write(repository.root, 5, (keys[: ROWS // 2], vectors[: ROWS // 2]))
    assert [is_delta(repository, v) for v in (4, 5)] == [False, False]


@pytest.mark.parametrize("removed", [0, 12])
def test_replaced_rows_count_once(repository, tables, removed):
    """A delta may replace 10 % of the rows, or replace some and remove others."""
    keys, vectors = tables[1]
    vectors = vectors.copy()
    vectors[-(len(keys) // 10 - removed) :] += 1
    write(repository.root, 4, (keys[removed:], vectors[removed:]), base=1)
    assert is_delta(repository, 4)


OTHER_TYPES = [
    {"dtype": "float16"},
    {"key_dtype": "uint32"},
    {"dtype": "float16", "key_dtype": "uint32"},
]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("table", OTHER_TYPES)
def test_other_types(tmp_path, table, ordered):
    """Keys whose low 32 bits alone count, and rows that float16 rounds, some of them to the same row."""
    spec, rng = spec_of(**table), np.random.default_rng(5)
    keys = rng.choice(2**32, 1000, replace=False)
    if "key_dtype" in table:
        keys -= 2**40
    vectors = rows_of(1, keys)
    write(tmp_path, 1, (keys, vectors), spec)
    vectors[3] += 1
    vectors[5] = np.nextafter(vectors[5], np.float32(9))  # the same in float16
    kept = np.arange(2, 1000) if ordered else rng.permutation(np.arange(2, 1000))
    new = np.array([2**41 + 1, 2**41 + 2])
    keys = np.concatenate([keys[kept], new])
    vectors = np.concatenate([vectors[kept], rows_of(2, new)])
    write(tmp_path, 2, (keys, vectors), spec)
    opened = Repository(tmp_path).open("m", 2)
    files = opened.tables["t"]
    assert isinstance(files, DeltaFiles)
    assert (files.delta.rows, len(files.masked_rows())) == (4, 4)
    assert content(files.keys(), files.vectors()) == content(keys, vectors)
    assert {each.level for each in check_version(opened, NoProgress())} == {"OK"}

    (served,) = opened.embedding_tables().values()
    expected = content(served.narrow(keys), vectors.astype(served.dtype))
    probes = np.unique(np.concatenate([served.narrow(keys), np.arange(50)]))
    for how in ("mapped", "loaded"):
        store = MappedTier(tmp_path / how, maps=how == "mapped")
        (report,) = load_tables(opened, [served], store, NoProgress())
        assert report.how == how
        part = Part.make(served, probes)
        store.fetch([part], FetchContext())
        found = part.source != 0
        assert content(probes[found], part.out[found]) == expected
        store.close()


def test_repeated_keys_are_written_whole(tmp_path, tables):
    keys, vectors = tables[1]
    write(tmp_path, 1, (keys, vectors))
    write(tmp_path, 2, (np.append(keys, keys[:3]), np.concatenate([vectors, vectors[:3] + 1])))
    assert not is_delta(Repository(tmp_path), 2)
    write(tmp_path, 3, (keys, vectors), base=2)
    assert not is_delta(Repository(tmp_path), 3)


@pytest.mark.parametrize("file", ["masked", "key", "emb_vector"])
def test_truncated_delta_is_an_error(repository, file):
    path = repository.root / "m/2/tables/t/delta" / file
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelError, match="delta"):
        repository.open("m", 2)


@pytest.mark.parametrize("file", ["mapped", "masked_positions"])
def test_unusable_delta_is_loaded_from_its_other_files(repository, tables, tmp_path, caplog, file):
    path = repository.root / "m/2/tables/t/delta" / file
    path.write_bytes(path.read_bytes()[:-8])
    opened, store = repository.open("m", 2), MappedTier(tmp_path / "db")
    (table,) = opened.embedding_tables().values()
    (report,) = load_tables(opened, [table], store, NoProgress())
    assert report.how == "loaded"
    assert "not used" in caplog.text
    scanned = list(store.scan(table))
    keys, vectors = (np.concatenate([each[i] for each in scanned]) for i in (0, 1))
    assert content(keys, vectors) == content(*tables[2])
    store.close()


def test_flipped_masked_rows_are_detected(repository):
    path = repository.root / "m/2/tables/t/delta/masked"
    data = bytearray(path.read_bytes())
    data[8:16], data[0:8] = data[0:8], data[8:16]
    path.write_bytes(data)
    opened = repository.open("m", 2)
    with pytest.raises(ModelError, match="delta/masked is damaged"):
        opened.tables["t"].keys()
    (checksums,) = [f for f in check_files_of(opened) if f.what == "table t: checksums"]
    assert checksums.level == "FAIL"


def check_files_of(opened):
    from hps.models.check import check_files

    return [check_files(files, NoProgress()) for files in opened.tables.values()]


def test_mapped_files_that_are_missing_are_written_again(repository):
    """The same ones, so that the positions of masked rows fit the base's file."""
    opened = repository.open("m", 2)
    paths = [pair.folder / "mapped" for pair in opened.tables["t"].pairs]
    written = [path.read_bytes() for path in paths]
    for path in paths:
        path.unlink()
    add_mapped_files(opened, NoProgress())
    assert [path.read_bytes() for path in paths] == written
