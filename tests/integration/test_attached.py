"""Models in a process attached to a node: bit-equal to the node's.

One process attaches to itself; tests/integration/test_workers.py has real ones."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

import hps
from hps.errors import ConfigError, NotFound, TierError, TierMisfit, Unavailable
from hps.native import COMPILED
from hps.types import Source
from tests.support.small_models import LOOKUP, write_models
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(not COMPILED, reason="a shared cache needs the native core")


@pytest.fixture
def runtime():
    with tempfile.TemporaryDirectory(prefix="hps-") as folder:  # pytest's names are too long
        yield Path(folder)


@pytest.fixture
def settings(small_repository, tmp_path, runtime):
    return {
        "models": {"repository": str(small_repository)},
        "tiers": {
            "rocksdb": {"path": str(tmp_path / "db")},
            # A part of the rows is in the cache from the start.
            "cpu_cache": {"share": 0.5, "warm": True},
            "mapped": {"memory_bytes": 0},
        },
        "server": {"runtime": str(runtime)},
    }


@pytest.fixture
def node(settings):
    with hps.open(settings) as opened:
        yield opened


@pytest.fixture
def attached(node, settings):
    with hps.attach(settings) as opened:
        yield opened


WORDS = np.random.default_rng(1).integers(-10, 1100, 300)


def test_status_describes_the_attached_process(node, attached):
    assert repr(attached) == "<hps.Attached: clicks/1, words/1; cpu > node>"
    tiers = {tier["name"]: tier for tier in attached.status()["tiers"]}
    assert tiers["node"]["circuit"] == "closed"
    attached.lookup("words", {"word": [999]})
    assert node.status()["socket"]["connections"] == 2  # one follows the node's models
    assert node.status()["tiers"][0]["shared_memory"]["readers"] == 1


def test_attached_rows_and_sources_equal_those_of_the_node(node, attached):
    """Rows that only the store has are reported so in both; unknown keys get the default."""
    mine = attached.lookup("words", {"word": WORDS}, want_source=True)
    assert node.writer.flush(60)
    assert set(mine.sources["word"].tolist()) == {Source.DEFAULT, Source.CPU, Source.ROCKSDB}
    assert mine.defaulted == int(((WORDS < 0) | (WORDS >= 1000)).sum())
    assert mine.degraded == ()
    theirs = node.lookup("words", {"word": WORDS}, want_source=True)
    assert mine.vectors["word"].tobytes() == theirs.vectors["word"].tobytes()
    assert (mine.versions["word"] == theirs.versions["word"]).all()


def test_misses_are_promoted_by_the_node(node, attached):
    cold = np.arange(900, 1000)
    first = attached.lookup("words", {"word": cold}, want_source=True)
    assert Source.ROCKSDB in first.sources["word"]

    def all_in_memory():
        found = attached.lookup("words", {"word": cold}, want_source=True)
        return set(found.sources["word"].tolist()) == {Source.CPU}

    until(all_in_memory)


def test_attached_scores_equal_those_of_the_node(node, attached):
    rng = np.random.default_rng(2)
    features = {
        "user": rng.integers(-5, 120, (16, 1)),
        "item": rng.integers(-60, 60, (16, 1)),
        "history": rng.integers(-60, 60, (16, 4)),
    }
    dense = {"dense": rng.random((16, 3), np.float32)}
    mine = attached.predict("clicks", features, dense).outputs
    theirs = node.predict("clicks", features, dense).outputs
    assert {name: out.tobytes() for name, out in mine.items()} == {
        name: out.tobytes() for name, out in theirs.items()
    }


def test_attached_process_sees_writes_to_the_node(node, attached):
    before = attached.lookup("words", {"word": [7, 8]}).vectors["word"]
    node.write("words", "words", [7], before[1:] + 1, deleted=[8])
    after = attached.lookup("words", {"word": [7, 8]}, want_source=True)
    assert (after.vectors["word"][0] == before[1] + 1).all()
    assert after.sources["word"].tolist() == [Source.CPU, Source.DEFAULT]


def test_mapped_files_are_read_by_attached_processes(settings):
    settings["tiers"]["mapped"] = {}
    with hps.open(settings) as node, hps.attach(settings) as attached:
        mine = attached.lookup("words", {"word": WORDS}, want_source=True)
        assert set(mine.sources["word"].tolist()) == {Source.DEFAULT, Source.CPU}
        theirs = node.lookup("words", {"word": WORDS}, want_source=True)
        assert mine.vectors["word"].tobytes() == theirs.vectors["word"].tobytes()
        before = mine.vectors["word"][:2]
        node.write("words", "words", [7], before[1:] + 1, deleted=[8])
        after = attached.lookup("words", {"word": [7, 8]})
        assert (after.vectors["word"][0] == before[1] + 1).all()
        assert after.defaulted == 1
        for _ in range(64):
            attached.lookup("words", {"word": [9]})
        assert 9 in node.hot_keys("words")[0]["keys"]


def test_all_rows_come_from_the_node_without_a_cache(settings):
    settings["tiers"]["cpu_cache"] = {"enabled": False}
    with hps.open(settings) as node, hps.attach(settings) as attached:
        mine = attached.lookup("words", {"word": WORDS}, want_source=True)
        theirs = node.lookup("words", {"word": WORDS}, want_source=True)
        assert mine.vectors["word"].tobytes() == theirs.vectors["word"].tobytes()
        assert (mine.sources["word"] == theirs.sources["word"]).all()


def test_default_then_promote_works_in_attached_processes(settings, tmp_path):
    spec = LOOKUP | {
        "tables": [
            {"name": "words", "dim": 8, "miss_policy": {"kind": "default_then_promote"}},
        ]
    }
    write_models(tmp_path / "models")
    (tmp_path / "models/words/model.yaml").write_text(json.dumps(spec))
    settings["models"]["repository"] = str(tmp_path / "models")
    with hps.open(settings), hps.attach(settings) as attached:
        first = attached.lookup("words", {"word": [999]}, want_source=True)
        assert first.sources["word"].tolist() == [Source.DEFAULT]
        until(lambda: attached.lookup("words", {"word": [999]}).defaulted == 0)


def test_answers_are_degraded_while_the_node_is_gone(settings):
    with hps.open(settings) as node:
        attached = hps.attach(settings)
        held = node.hot_keys("words")[0]["keys"][0]
    with attached:
        gone = attached.lookup("words", {"word": [held, 999]}, want_source=True)
        assert gone.degraded == ("node",)
        assert attached.lookup("words", {"word": [held]}).degraded == ()
        assert gone.sources["word"].tolist()[1] == Source.DEFAULT
        with hps.open(settings):

            def answers():
                found = attached.lookup("words", {"word": [999]})
                return found.degraded == () and found.defaulted == 0

            until(answers)


def test_attached_process_serves_the_versions_of_the_node(settings, tmp_path):
    """An attached process does not open a newer version in the repository."""
    write_models(tmp_path / "models")
    settings["models"]["repository"] = str(tmp_path / "models")
    with hps.open(settings):
        words = tmp_path / "models/words"
        (words / "2").symlink_to(words / "1")
        with hps.attach(settings) as attached:
            assert attached.model("words").version == 1


def test_attach_requires_a_runtime_folder_and_a_node(settings, tmp_path):
    with pytest.raises(TierError, match="is it running"):
        hps.attach(settings, wait_s=0.0)
    del settings["server"]
    with pytest.raises(ConfigError, match=r"server\.runtime is not set"):
        hps.attach(settings)


def test_attach_to_another_release_fails_immediately(node, settings, monkeypatch):
    told = iter([TierMisfit("node", "the node speaks version 2"), TierError("node", "asked again")])

    def refused(*_given):
        raise next(told)

    monkeypatch.setattr("hps.node.attached.NodeConnectionPool.ask", refused)
    with pytest.raises(TierMisfit, match="version 2"):
        hps.attach(settings)


def test_attach_fails_without_the_model_in_the_repository(node, settings, tmp_path):
    (tmp_path / "empty").mkdir()
    settings["models"]["repository"] = str(tmp_path / "empty")
    with pytest.raises(NotFound, match="no model 'clicks'"):
        hps.attach(settings)


@pytest.mark.parametrize("on_stale", ["flag", "refuse"])
def test_attached_process_reports_stale_rows(settings, tmp_path, on_stale):
    folder = tmp_path / "updates"
    folder.mkdir()
    settings["updates"] = {
        "directory": {"path": str(folder)},
        "max_staleness_s": 0.2,
        "on_stale": on_stale,
    }

    def is_stale():
        try:
            return attached.lookup("words", {"word": [1]}).stale_s > 0
        except Unavailable as error:
            return "updates of table 'words' have been waiting" in str(error)

    with hps.open(settings) as node, hps.attach(settings) as attached:
        assert not is_stale()
        node.streams.pause()
        (folder / "waits.npz").touch()
        until(is_stale)
        (folder / "waits.npz").unlink()
        until(lambda: not is_stale())
        node.close()
        until(is_stale)  # no process reports ages any more
