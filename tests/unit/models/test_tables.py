"""A table's two files, checked against each other, the dim and the manifest."""

import numpy as np
import pytest

from hps.errors import ModelError
from hps.models.check import check_disjoint_tables, repeated_keys
from hps.models.fused_files import open_fused
from hps.models.tables import open_table


def write(folder, keys, vectors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "key").write_bytes(np.asarray(keys, "<i8").tobytes())
    (folder / "emb_vector").write_bytes(np.asarray(vectors, "<f4").tobytes())
    return folder


def test_reads_rows_in_the_files_order(tmp_path):
    keys, vectors = [-5, 2**62, 0], np.arange(12).reshape(3, 4)
    files = open_table(write(tmp_path / "t", keys, vectors), "t", 4, None)
    assert (files.rows, files.dim, files.bytes) == (3, 4, 72)
    assert files.keys().tolist() == keys
    assert files.vectors().tolist() == vectors.tolist()
    assert files.keys(1).tolist() == keys[1:]
    assert files.vectors(1, 2).tolist() == vectors[1:2].tolist()
    assert files.vectors(2, 9).tolist() == vectors[2:].tolist()
    assert files.keys_at(np.array([2, 0, 2])).tolist() == [0, -5, 0]
    assert files.vectors_at(np.array([2, 0])).tolist() == vectors[[2, 0]].tolist()
    blocks = list(files.blocks(2))
    assert [k.tolist() for k, _ in blocks] == [keys[:2], keys[2:]]
    assert np.concatenate([v for _, v in blocks]).tolist() == vectors.tolist()


@pytest.mark.parametrize(("n", "expected"), [(0, 0), (2, 2), (3, 3), (99, 3), (-1, 0)])
def test_head_returns_the_first_rows(tmp_path, n, expected):
    files = open_table(write(tmp_path / "t", [7, 8, 9], np.ones((3, 2))), "t", 2, None)
    keys, vectors = files.head(n)
    assert keys.tolist() == [7, 8, 9][:expected]
    assert vectors.shape == (expected, 2)


def test_empty_table_is_valid(tmp_path):
    files = open_table(write(tmp_path / "t", [], []), "t", 4, None)
    assert files.rows == 0
    assert files.keys().shape == (0,)
    assert files.vectors().shape == (0, 4)
    assert files.head(5)[1].shape == (0, 4)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "key").unlink(), r"table 't': .*t/key is missing"),
        (lambda f: (f / "emb_vector").unlink(), r"emb_vector is missing"),
        (lambda f: cut(f / "key", 1), r"t/key: 23 bytes is not a multiple of 8"),
        (lambda f: cut(f / "key", 8), r"key holds 2 rows, emb_vector 3"),
        (lambda f: cut(f / "emb_vector", 16), r"key holds 3 rows, emb_vector 2"),
        (
            lambda f: cut(f / "emb_vector", 5),
            r"43 bytes; .*2\.69 rows: truncated\?",
        ),
        (lambda f: cut(f / "emb_vector", 12), r"would fit dim 3: is dim 4 wrong\?"),
    ],
)
def test_damage_is_reported_with_both_numbers(tmp_path, damage, message):
    folder = write(tmp_path / "t", [1, 2, 3], np.ones((3, 4)))
    damage(folder)
    with pytest.raises(ModelError, match=message):
        open_table(folder, "t", 4, None)


def test_missing_folder_is_reported(tmp_path):
    with pytest.raises(ModelError, match=r"table 't': .*/gone is missing"):
        open_table(tmp_path / "gone", "t", 4, None)


def cut(path, n):
    path.write_bytes(path.read_bytes()[:-n])


@pytest.mark.parametrize("at_a_time", [3, 1000])
def test_repeated_keys_are_counted_in_parts(tmp_path, monkeypatch, at_a_time):
    monkeypatch.setattr("hps.models.check._SORTED_KEYS", at_a_time)
    random = np.random.default_rng(5)
    keys = random.integers(-40, 40, 200)
    keys[:20] += 1 << 32
    files = open_table(write(tmp_path / "t", keys, np.zeros((200, 2))), "t", 2, None)
    assert repeated_keys(files) == 200 - len(np.unique(keys))
    assert repeated_keys(files, 32) == 200 - len(np.unique(keys & 0xFFFFFFFF))


class TestFused:
    """The rows of several folders as one table's."""

    def open(self, folder, *keys):
        parts = []
        for number, some in enumerate(keys):
            vectors = np.arange(2 * len(some)).reshape(-1, 2) + 100 * number
            part = write(folder / f"t{number}", some, vectors)
            parts.append(open_table(part, "fused_embedding0", 2, None))
        return open_fused("fused_embedding0", parts), parts

    def test_rows_are_those_of_the_parts_in_order(self, tmp_path):
        files, parts = self.open(tmp_path, [5, 3], [], [9, -1, 7], [8])
        keys = np.concatenate([part.keys() for part in parts])
        vectors = np.concatenate([part.vectors() for part in parts])
        assert (files.rows, files.dim, files.bytes) == (6, 2, 96)
        for start in range(7):
            for stop in [*range(start, 8), None]:
                assert files.keys(start, stop).tolist() == keys[start:stop].tolist()
                assert files.vectors(start, stop).tolist() == vectors[start:stop].tolist()
        rows = np.array([5, 0, 3, 2, 3])
        assert files.keys_at(rows).tolist() == keys[rows].tolist()
        assert files.vectors_at(rows).tolist() == vectors[rows].tolist()
        assert [k.tolist() for k, _ in files.blocks(4)] == [keys[:4].tolist(), keys[4:].tolist()]
        files.copy_vectors(tmp_path / "copy")
        assert np.fromfile(tmp_path / "copy", "<f4").tolist() == vectors.ravel().tolist()
        files.check_unchanged()

    def test_changed_part_is_detected(self, tmp_path):
        files, parts = self.open(tmp_path, [5, 3], [9])
        write(parts[1].folder, [9, 10], np.zeros((2, 2)))
        with pytest.raises(ModelError):
            files.check_unchanged()
        changed, _ = self.open(tmp_path, [5, 3], [9, 10])
        assert changed.digest != files.digest

    def test_single_part_is_returned_unchanged(self, tmp_path):
        files, (part,) = self.open(tmp_path, [5, 3])
        assert files is part
        check_disjoint_tables(files, 64)

    def test_keys_shared_by_parts_are_rejected_but_repeated_keys_within_a_part_are_not(
        self, tmp_path
    ):
        files, _ = self.open(tmp_path / "apart", [5, 3, 5], [9, 9])
        check_disjoint_tables(files, 64)
        files, _ = self.open(tmp_path / "both", [5, 3, 5], [9, 5, 3])
        with pytest.raises(ModelError, match=r"2 keys are in several of .*t0, .*t1, but fuse_"):
            check_disjoint_tables(files, 64)
        files, _ = self.open(tmp_path / "narrow", [5], [5 + 2**32])
        check_disjoint_tables(files, 64)
        with pytest.raises(ModelError, match="1 keys are in several"):
            check_disjoint_tables(files, 32)
