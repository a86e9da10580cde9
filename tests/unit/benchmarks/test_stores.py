"""Messages of the stores' benchmarks when a peer or a store is missing."""

import shutil

import pytest

from benchmarks import stores, stores_redis, stores_rocksdb
from benchmarks.common import Options
from benchmarks.peers import rocksdb
from benchmarks.peers.environments import PeerMissing


def test_bars_are_unmeasured_without_a_compiler(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(PeerMissing, match=r"no C\+\+ compiler"):
        rocksdb.build()
    for name, value in (("ROWS", 2000), ("KEYS", 1000), ("BATCHES", (100,)), ("ROUNDS", 1)):
        monkeypatch.setattr(stores_rocksdb, f"QUICK_{name}" if name != "BATCHES" else name, value)
    report = stores_rocksdb.run(Options(quick=True))
    assert list(report.values) == ["load"]
    reads = [lines for title, lines in report.tables.items() if "load" not in title]
    assert [[line[""] for line in lines] for lines in reads] == [["read", "mapped"]] * 2
    assert all("ours, µs a key" in line for lines in reads for line in lines)
    assert "no C++ compiler" in capsys.readouterr().err


def test_build_names_the_package_when_the_library_is_missing(monkeypatch, tmp_path):
    source = tmp_path / "peer.cpp"
    source.write_text("#include <rocksdb/nothing_of_this_name.h>\n")
    monkeypatch.setattr(rocksdb, "ROOT", tmp_path)
    with pytest.raises(PeerMissing, match="apt-get install"):
        rocksdb.build(source)
    assert not list((tmp_path / "rocksdb").glob("peer-*"))


def test_bars_are_unmeasured_without_redis_and_the_note_names_the_package(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(stores, "HALVES", (stores_redis,))
    report = stores.run(Options(quick=True))
    assert report.values == {}
    (note,) = report.notes
    assert note.startswith(
        "stores_redis was not measured: redis-server is not installed: run `make "
    )


def test_bars_judge_both_modes_of_reading():
    names = {bar.name for bar in stores_rocksdb.BARS if bar.at_least == 0.7}
    assert names == {
        f"{mode}_{row}_{batch}"
        for mode in ("read", "mapped")
        for row in (128, 512)
        for batch in (1_000, 10_000, 100_000)
    }
