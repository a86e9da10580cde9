"""Files of samples and of scores: the same values in every format, no partial files."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from hps.cli.column_arrays import dense_of, keys_of
from hps.cli.sample_files import SampleWriter, open_reader, read
from hps.errors import BadRequest, ConfigError

USERS = [2**64 - 1, 2**63 - 1, 2**53 + 1, 7, 0]
TAGS = [[1, 2], [], [2**63], [4, 5, 6], [7]]
DEPTH = [0.1, 2.0, 3.5, 1e-7, 16777217.0]


def write_samples(path: Path) -> None:
    if path.suffix == ".jsonl":
        rows = [
            {"other": "x", "user": u, "tags": t, "depth": d}
            for u, t, d in zip(USERS, TAGS, DEPTH, strict=True)
        ]
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    elif path.suffix in (".csv", ".tsv"):
        rows = [
            ("x", str(u), " ".join(map(str, t)), repr(d))
            for u, t, d in zip(USERS, TAGS, DEPTH, strict=True)
        ]
        comma = "," if path.suffix == ".csv" else "\t"
        lines = [("other", "user", "tags", "depth"), *rows]
        path.write_text("".join(comma.join(line) + "\n" for line in lines))
    else:
        table = pa.table(
            {
                "other": ["x"] * 5,
                "user": pa.array(USERS, pa.uint64()),
                "tags": pa.array(TAGS, pa.list_(pa.uint64())),
                "depth": DEPTH,
            }
        )
        parquet.write_table(table, path)


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".tsv", ".jsonl"])
def test_every_format_gives_the_same_samples(tmp_path: Path, suffix: str, size: int) -> None:
    path = tmp_path / f"samples{suffix}"
    write_samples(path)
    reader = open_reader(path, ("user", "tags", "depth"))
    users: list[int] = []
    tags: list[list[int]] = []
    depth: list[float] = []
    advanced = 0
    for columns, step in read(reader, path, size):
        user = keys_of("user", columns["user"])
        assert user.batch <= size
        users += user.keys.view(np.uint64).tolist()
        bags = keys_of("tags", columns["tags"])
        ends = (
            np.arange(bags.batch + 1) * (bags.hotness or 0)
            if bags.offsets is None
            else bags.offsets
        )
        for a, b in pairwise(ends):
            tags.append(bags.keys[a:b].view(np.uint64).tolist())
        depth += dense_of("depth", columns["depth"], np.dtype(np.float64), [-1]).tolist()
        advanced += step
    assert users == USERS
    assert tags == TAGS
    assert depth == DEPTH
    assert advanced <= reader.total
    assert reader.unit in ("rows", "bytes")


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_missing_column_is_named_with_present_ones(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"samples{suffix}"
    write_samples(path)
    with pytest.raises(BadRequest, match=r"has no column ad; it has other, user, tags, depth"):
        list(read(open_reader(path, ("user", "ad")), path, 10))


@pytest.mark.parametrize("line", ["[1]", "null", "7", '"user"'])
def test_line_that_is_not_an_object_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(f'{{"user": 1}}\n{line}\n')
    with pytest.raises(BadRequest, match=r"s.jsonl: up to line 2 there is .*, expected a JSON obj"):
        list(read(open_reader(path, ("user",)), path, 10))


def test_duplicate_column_is_rejected(tmp_path: Path) -> None:
    for name in ("s.csv", "s.parquet"):
        path = tmp_path / name
        path.write_text("user,user,ad\n1,2,3\n")
        if name == "s.parquet":
            column = pa.array([1])
            table = pa.Table.from_arrays([column] * 3, names=["user", "user", "ad"])
            parquet.write_table(table, path)
        with pytest.raises(BadRequest, match=f"{name} has several columns user; rename"):
            list(read(open_reader(path, ("user", "ad")), path, 10))
        assert list(read(open_reader(path, ("ad",)), path, 10))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    damaged = {".parquet": "nonsense", ".csv": "user,ad\n1,2\n3\n", ".jsonl": '{"user": 1}\n{"us'}
    for suffix, text in damaged.items():
        path = tmp_path / f"bad{suffix}"
        path.write_text(text)
        with pytest.raises(BadRequest, match=f"bad{suffix}"):
            list(read(open_reader(path, ("user",)), path, 10))
    with pytest.raises(ConfigError, match="there is no file"):
        open_reader(tmp_path / "none.csv", ("user",))
    (tmp_path / "x.txt").touch()
    with pytest.raises(ConfigError, match="unknown format"):
        open_reader(tmp_path / "x.txt", ("user",))


SCORES = {
    "click": np.array([0.1, 1 / 3, 1e-9, 0.99999994], np.float32).reshape(-1, 1),
    "both": np.array([[1, 2], [3, 4], [5, 1 / 3], [7, 8]], np.float32),
}


def write_scores(path: Path) -> None:
    with SampleWriter(path) as writer:
        for part in (slice(0, 3), slice(3, 4)):
            writer.write({name: value[part] for name, value in SCORES.items()})
        assert not path.exists()
    assert writer.rows == 4
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_parquet_scores_are_exact(tmp_path: Path) -> None:
    write_scores(tmp_path / "s.parquet")
    table = parquet.read_table(tmp_path / "s.parquet")
    assert table["click"].to_pylist() == SCORES["click"].reshape(-1).tolist()
    assert table["both"].to_pylist() == SCORES["both"].tolist()


def test_csv_scores_are_exact(tmp_path: Path) -> None:
    write_scores(tmp_path / "s.csv")
    text = csv.ConvertOptions(column_types={"click": pa.float32(), "both": pa.string()})
    table = csv.read_csv(tmp_path / "s.csv", convert_options=text)
    assert np.array_equal(table["click"].to_numpy(), SCORES["click"].reshape(-1))
    again = dense_of("both", table["both"].combine_chunks(), np.dtype(np.float32), [-1, 2])
    assert np.array_equal(again, SCORES["both"])


def test_jsonl_scores_are_exact(tmp_path: Path) -> None:
    write_scores(tmp_path / "s.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert np.array_equal(np.array([r["click"] for r in rows], np.float32), SCORES["click"][:, 0])
    assert np.array_equal(np.array([r["both"] for r in rows], np.float32), SCORES["both"])


def test_npz_scores_are_exact(tmp_path: Path) -> None:
    write_scores(tmp_path / "s.npz")
    with np.load(tmp_path / "s.npz") as arrays:
        for name, value in SCORES.items():
            assert np.array_equal(arrays[name], value)


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl", ".npz"])
def test_failed_write_keeps_the_former_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"s{suffix}"
    path.write_text("old")

    def fail() -> None:
        with SampleWriter(path) as writer:
            writer.write(SCORES)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_empty_input_makes_an_empty_file(tmp_path: Path) -> None:
    with SampleWriter(tmp_path / "s.jsonl"):
        pass
    assert (tmp_path / "s.jsonl").read_text() == ""


def test_unwritable_output_is_rejected_before_scoring(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name the output one of"):
        SampleWriter(tmp_path / "s.xlsx")
    with pytest.raises(ConfigError, match="there is no folder"):
        SampleWriter(tmp_path / "none" / "s.csv")


@pytest.mark.parametrize(("suffix", "comma"), [(".csv", ","), (".tsv", "\t")])
def test_columns_of_a_file_without_a_header_are_named(
    tmp_path: Path, suffix: str, comma: str
) -> None:
    path = tmp_path / f"samples{suffix}"
    path.write_text(f"0{comma}68fd1e64\n1{comma}\n")
    reader = open_reader(path, ("ad",), ("label", "ad"))
    ((columns, _),) = read(reader, path, 10)
    keys = keys_of("ad", columns["ad"], is_hex=True)
    assert (keys.keys.tolist(), keys.offsets.tolist()) == ([0x68FD1E64], [0, 1, 1])


def test_file_without_a_header_hints_at_columns_option(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("1\t2\n")
    with pytest.raises(BadRequest, match=r"it has 1, 2\. .*without a header line needs --columns"):
        open_reader(tmp_path / "a.tsv", ("user",))


def test_columns_option_is_for_text_files(tmp_path: Path) -> None:
    write_samples(tmp_path / "samples.jsonl")
    with pytest.raises(ConfigError, match=r"--columns names the columns of \.csv and \.tsv files"):
        open_reader(tmp_path / "samples.jsonl", ("user",), ("user",))


def test_json_null_of_a_list_column_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"tags": [1, 2]}\n{"tags": null}\n{"tags": []}\n')
    ((columns, _),) = read(open_reader(path, ("tags",)), path, 10)
    keys = keys_of("tags", columns["tags"], missing=lambda _name: np.array([9]))
    assert (keys.keys.tolist(), keys.offsets.tolist()) == ([1, 2, 9], [0, 2, 3, 3])
