"""Version writer: all or nothing; versions are replaced only with ``replace``."""

import fcntl
import os
import time
from pathlib import Path

import numpy as np
import pytest

from hps.config.model_schema import ModelSpec
from hps.errors import ModelError
from hps.models import staging
from hps.models.check import check_version
from hps.models.checksummed_file import ChecksummedFile
from hps.models.repository import Repository
from hps.models.staging import clean_leftovers
from hps.models.version_writer import write_version
from hps.native.mapped_format import read_header
from hps.types import NoProgress


def test_chunks_are_streamed_to_the_files(tmp_path, make_spec):
    def chunks():
        for i in range(5):
            yield np.arange(i * 10, i * 10 + 10), np.full((10, 2), i, np.float64)

    seen = []
    folder = write_version(tmp_path, make_spec("m", t=2), 1, {"t": chunks()}, progress=seen.append)
    assert np.fromfile(folder / "tables/t/key", "<i8").tolist() == list(range(50))
    vectors = np.fromfile(folder / "tables/t/emb_vector", "<f4").reshape(50, 2)
    assert vectors[:, 1].tolist() == [i // 10 for i in range(50)]
    assert seen == [10] * 5
    assert Repository(tmp_path).open("m").tables["t"].rows == 50


def test_unsigned_keys_keep_their_bits(tmp_path, make_spec):
    keys = np.array([2**64 - 1, 2**63], np.uint64)
    folder = write_version(tmp_path, make_spec("m", t=1), 1, {"t": (keys, np.ones((2, 1)))})
    assert np.fromfile(folder / "tables/t/key", "<i8").tolist() == [-1, -(2**63)]


def test_folder_that_cannot_be_made_is_an_error(tmp_path, make_spec):
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"cannot make the folder .*file/m: Not a directory"):
        write_version(tmp_path / "file", make_spec("m", t=3), 1, {"t": iter(())})


def test_full_disk_is_an_error_and_leaves_nothing(tmp_path, make_spec, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ChecksummedFile, "write", fail)
    with pytest.raises(ModelError, match=r"writing a version into .*/m failed: No space left"):
        write_version(tmp_path, make_spec("m", t=1), 1, {"t": (np.arange(1), np.ones((1, 1)))})
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("version", [-1, 0, 10**18])
def test_version_that_would_not_be_listed_is_rejected(tmp_path, make_spec, version):
    with pytest.raises(ModelError, match=f"from 1 to 999,999,999,999,999,999, found {version}"):
        write_version(tmp_path, make_spec("m", t=3), version, {"t": iter(())})
    assert not (tmp_path / "m").exists()


def test_empty_table_is_written(tmp_path, make_spec):
    write_version(tmp_path, make_spec("m", t=3), 1, {"t": iter(())})
    assert Repository(tmp_path).open("m").tables["t"].rows == 0


def test_network_is_written_from_bytes_or_a_file(tmp_path):
    described = ModelSpec.model_validate(
        {
            "name": "m",
            "tables": [{"name": "t", "dim": 1}],
            "dense": {"outputs": [{"name": "y", "shape": [-1]}]},
        }
    )
    rows = {"t": (np.arange(1), np.ones((1, 1)))}
    (tmp_path / "net.onnx").write_bytes(b"x" * 3_000_000)
    write_version(tmp_path / "r", described, 1, rows, dense=b"abc")
    folder = write_version(tmp_path / "r", described, 2, rows, dense=tmp_path / "net.onnx")
    assert (folder / "dense.onnx").stat().st_size == 3_000_000
    with pytest.raises(ModelError, match="gone"):
        write_version(tmp_path / "r", described, 3, rows, dense=tmp_path / "gone")
    with pytest.raises(ModelError, match="a dense part is described, but no file given"):
        write_version(tmp_path / "r", described, 3, rows)
    assert Repository(tmp_path / "r").versions("m") == [1, 2]


@pytest.mark.parametrize(
    ("keys", "vectors", "message"),
    [
        (np.arange(3), np.ones((2, 2)), "3 keys but 2 vectors"),
        (np.arange(3), np.ones((3, 5)), r"expected keys \(n,\) and vectors \(n, 2\)"),
        (np.arange(3.0), np.ones((3, 2)), "keys must be integers"),
        (np.arange(3), np.array([["a", "b"]] * 3), "expected numbers"),
        (np.ones((3, 1), int), np.ones((3, 2)), "expected keys"),
    ],
)
def test_wrong_arrays_leave_nothing_behind(tmp_path, make_spec, keys, vectors, message):
    with pytest.raises(ModelError, match=message):
        write_version(tmp_path, make_spec("m", t=2), 1, {"t": (keys, vectors)})
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("tables", [{}, {"t": (), "u": ()}, {"u": ()}])
def test_tables_must_match_the_description(tmp_path, make_spec, tables):
    with pytest.raises(ModelError, match="describes the tables t, given are"):
        write_version(tmp_path, make_spec("m", t=2), 1, tables)


class TestExisting:
    def test_version_is_replaced_only_with_replace(self, tmp_path, make_version):
        make_version(1, n=10)
        with pytest.raises(ModelError, match=r"ctr/1 exists; .*--replace"):
            make_version(1, n=20)
        make_version(1, n=20, replace=True)
        assert Repository(tmp_path / "models").open("ctr").tables["users"].rows == 20
        assert sorted(p.name for p in (tmp_path / "models/ctr").iterdir()) == ["1", "model.yaml"]

    def test_replaced_version_exists_at_every_moment(self, tmp_path, make_version, monkeypatch):
        """A writer killed between two renames would leave none."""
        make_version(1, n=10)
        rename, moved = Path.rename, []
        monkeypatch.setattr(
            Path, "rename", lambda path, to: (moved.append(path.name), rename(path, to))
        )
        make_version(1, n=20, replace=True)
        assert "1" not in moved
        assert Repository(tmp_path / "models").open("ctr").tables["users"].rows == 20

    def test_version_is_replaced_without_atomic_exchange(self, tmp_path, make_version, monkeypatch):
        make_version(1, n=10)
        monkeypatch.setattr(staging, "_exchange", lambda a, b: False)
        make_version(1, n=20, replace=True)
        assert Repository(tmp_path / "models").open("ctr").tables["users"].rows == 20
        assert sorted(p.name for p in (tmp_path / "models/ctr").iterdir()) == ["1", "model.yaml"]

    def test_description_is_replaced_only_with_replace_spec(
        self, tmp_path, make_version, make_spec
    ):
        make_version(1)
        other = make_spec(users=4, items=16)
        with pytest.raises(ModelError, match=r"model.yaml differs .*--replace-spec"):
            make_version(2, spec=other)
        make_version(2, spec=other, replace_spec=True)
        assert Repository(tmp_path / "models").open("ctr").tables["items"].dim == 16

    def test_version_without_a_description_can_be_written_again(self, tmp_path, make_version):
        """A first import killed between its two renames: nothing is served, and a rerun succeeds."""
        folder = make_version(1, n=10)
        (folder.parent / "model.yaml").unlink()
        assert Repository(tmp_path / "models").names() == []
        make_version(1, n=20)
        assert Repository(tmp_path / "models").open("ctr").tables["users"].rows == 20

    def test_second_of_two_concurrent_writers_fails(self, tmp_path, make_version, make_spec):
        make_version(1)

        def slow():
            make_version(2, n=30)
            yield np.arange(1), np.ones((1, 4))

        with pytest.raises(ModelError, match="written by another process meanwhile"):
            make_version(2, tables={"users": slow(), "items": iter(())})
        assert Repository(tmp_path / "models").open("ctr", 2).tables["users"].rows == 30

    def test_second_of_two_first_writers_fails(self, tmp_path, make_version):
        """Neither had found a ``model.yaml``; the second must not take the first's version for a leftover."""

        def slow():
            make_version(2, n=30)
            yield np.arange(1), np.ones((1, 4))

        with pytest.raises(ModelError, match="written by another process meanwhile"):
            make_version(2, tables={"users": slow(), "items": iter(())})
        assert Repository(tmp_path / "models").open("ctr").tables["users"].rows == 30

    def test_description_of_the_first_writer_stays(self, tmp_path, make_version, make_spec):
        def slow():
            make_version(1)
            yield np.arange(1), np.ones((1, 4))

        other = make_spec(users=4, items=16)
        with pytest.raises(ModelError, match=r"model.yaml differs"):
            make_version(2, spec=other, tables={"users": slow(), "items": iter(())})
        assert Repository(tmp_path / "models").versions("ctr") == [1]


class TestLeftovers:
    def test_leftovers_of_a_dead_writer_are_removed(self, make_version):
        folder = make_version().parent
        left = folder / ".import-2-dead"
        (left / "tables").mkdir(parents=True)
        for name, age in (("dead", 3600), ("live", 0)):
            spec = folder / f".import-spec-{name}"
            spec.write_text("")
            os.utime(spec, (time.time() - age,) * 2)
        assert sorted(clean_leftovers(folder)) == [left, folder / ".import-spec-dead"]
        assert not left.exists()
        assert not (folder / ".import-spec-dead").exists()
        assert (folder / ".import-spec-live").exists()
        left.mkdir()
        make_version(2)
        assert not left.exists()

    def test_folders_of_a_running_writer_stay(self, make_version):
        folder = make_version().parent
        living = folder / ".import-2-live"
        living.mkdir()
        handle = os.open(living, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert clean_leftovers(folder) == []
        make_version(2)
        assert living.exists()
        os.close(handle)


def test_mapped_files_are_written_and_verified(tmp_path):
    spec = ModelSpec.model_validate(
        {
            "name": "ctr",
            "tables": [
                {"name": "half", "dim": 4, "dtype": "float16", "key_dtype": "uint32"},
                {"name": "none", "dim": 8},
            ],
        }
    )
    keys, vectors = np.arange(5000), np.ones((5000, 4), np.float32)
    tables = {"half": (keys, vectors), "none": (keys[:0], np.empty((0, 8)))}
    folder = write_version(tmp_path, spec, 1, tables)
    (half,) = folder.glob("tables/half/mapped")
    header = read_header(half)
    assert (header.rows, header.row_format.name, header.key_bits) == (5000, "float16", 32)

    def findings():
        version = Repository(tmp_path).open("ctr", 1)
        return {f.what: f for f in check_version(version, NoProgress()) if "mapped" in f.what}

    assert {f.level for f in findings().values()} == {"OK"}
    assert len(findings()) == 2
    with half.open("r+b") as file:
        file.seek(9000)
        file.write(b"damage")
    damaged = findings()["table half: mapped file"]
    assert damaged.level == "FAIL"
    assert "1 of 1 blocks are damaged, the first is 0" in damaged.text
    half.write_bytes((folder / "tables/none/mapped").read_bytes())
    assert "was written for other files" in findings()["table half: mapped file"].text
    half.write_bytes(b"")
    assert "truncated" in findings()["table half: mapped file"].text
    half.unlink()
    assert list(findings()) == ["table none: mapped file"]
