"""Changes of the served versions while another version is loaded: they do not wait, and none is lost."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

import hps
from hps.errors import NotFound, Unavailable
from hps.node.version_loader import VersionLoader
from hps.updates.files.applied_files import AppliedFiles
from tests.support.waiting import PATIENCE_S, PATIENT_GUARD, until
from tests.unit.node.test_versions import cached, served, value, write


@pytest.fixture
def repository(tmp_path):
    write(tmp_path / "models", 1, 2, 3)
    return tmp_path / "models"


@pytest.fixture
def settings(repository, tmp_path):
    return {
        "models": {"repository": str(repository)},
        "tiers": {
            "rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD},
            "cpu_cache": {"share": 0.5},
        },
    }


@pytest.fixture
def node(settings):
    with hps.open(settings) as opened:
        yield opened


class Gate:
    """Holds a load until it is opened."""

    def __init__(self, monkeypatch, node, place):
        self.entered, self.opened = threading.Event(), threading.Event()
        owner = {"open": node.control.repository, "load": VersionLoader, "catch_up": VersionLoader}[
            place
        ]
        former = getattr(owner, place)

        def held(*arguments, **named):
            result = None if place == "catch_up" else former(*arguments, **named)
            self.entered.set()
            assert self.opened.wait(PATIENCE_S)
            return former(*arguments, **named) if place == "catch_up" else result

        monkeypatch.setattr(owner, place, held)


@contextmanager
def loading(monkeypatch, node, place, *load, **options):
    """While a load is held at a place of `Gate`; yields its future."""
    with ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as patched:
            gate = Gate(patched, node, place)
            future = pool.submit(node.load, *load, **options)
            assert gate.entered.wait(PATIENCE_S)
        try:
            yield future, gate
        finally:
            gate.opened.set()


@pytest.mark.parametrize("place", ["open", "load", "catch_up"])
def test_changes_do_not_wait_for_a_load(node, repository, monkeypatch, place):
    node.load("words", 2)
    write(repository, 4)
    with loading(monkeypatch, node, place, "words", 4, switch=False, labels=["next"]) as (
        load,
        gate,
    ):
        assert node.rollback("words") == 3
        assert value(node) == 3
        assert node.switch("words", 2) == 2
        node.label("words", "stable", 3)
        node.set_traffic(
            "words", {"matches": [{"by": "parameter:group", "value": "b", "version": "stable"}]}
        )
        assert (value(node), value(node, "stable"), load.done()) == (2, 3, False)
        gate.opened.set()
        assert load.result(PATIENCE_S) == 4
    assert [value(node, each) for each in (None, "stable", "next")] == [2, 3, 4]
    assert node.traffic("words")["matches"]


def test_a_load_replaces_the_version_that_has_become_current(node, repository, monkeypatch):
    node.load("words", 2)
    write(repository, 4)
    with loading(monkeypatch, node, "load", "words", 4):
        node.rollback("words")
    assert value(node) == 4
    assert node.rollback("words") == 3


def test_a_version_replaced_during_a_load_is_freed_after_it(settings, repository, monkeypatch):
    settings["models"]["rollback_s"] = 0
    with hps.open(settings) as node:
        node.load("words", 2, switch=False)
        write(repository, 4)
        with loading(monkeypatch, node, "load", "words", 4, switch=False) as (load, gate):
            node.switch("words", 2)
            assert served(node) == [2]
            assert 3 in cached(node)
            gate.opened.set()
            load.result(PATIENCE_S)
        until(lambda: cached(node) == {2, 4})
        assert (value(node), value(node, 4)) == (2, 4)


def test_a_model_may_be_unloaded_during_a_load(node, repository, monkeypatch):
    write(repository, 4)
    with loading(monkeypatch, node, "load", "words", 4):
        node.unload("words")
        with pytest.raises(NotFound):
            value(node)
    assert (value(node), served(node)) == (4, [4])


def test_a_failed_load_leaves_other_changes(node, repository, monkeypatch):
    node.load("words", 2)
    write(repository, 4)
    with loading(monkeypatch, node, "load", "words", 4) as (load, gate):
        node.rollback("words")
        monkeypatch.setattr(
            VersionLoader, "catch_up", lambda *_: (_ for _ in ()).throw(Unavailable("late"))
        )
        gate.opened.set()
        with pytest.raises(Unavailable, match="late"):
            load.result(PATIENCE_S)
    assert value(node) == 3
    until(lambda: 4 not in cached(node))
    monkeypatch.undo()
    assert node.load("words", 4) == 4
    assert value(node) == 4


def test_closing_waits_for_a_load(settings, repository, monkeypatch):
    opened = hps.open(settings)
    write(repository, 4)
    with (
        loading(monkeypatch, opened, "load", "words", 4) as (load, gate),
        ThreadPoolExecutor(1) as pool,
    ):
        closing = pool.submit(opened.close)
        with pytest.raises(TimeoutError):
            closing.result(0.3)
        gate.opened.set()
        with pytest.raises(Unavailable, match="being closed"):
            load.result(PATIENCE_S)
        closing.result(PATIENCE_S)


def test_loading_is_shown_beside_other_changes(node, repository, monkeypatch):
    write(repository, 4)
    with loading(monkeypatch, node, "load", "words", 4):
        node.label("words", "stable", 3)
        assert node.control.loading == {"words": 4}
    assert node.control.loading == {}


def test_closing_waits_for_a_switch_which_then_changes_nothing(settings, monkeypatch):
    opened = hps.open(settings)
    opened.load("words", 2, switch=False)
    gate = Gate(monkeypatch, opened, "catch_up")
    with ThreadPoolExecutor(2) as pool:
        change = pool.submit(opened.switch, "words", 2)
        assert gate.entered.wait(PATIENCE_S)
        closing = pool.submit(opened.close)
        with pytest.raises(TimeoutError):
            closing.result(0.3)
        gate.opened.set()
        with pytest.raises(Unavailable, match="being closed"):
            change.result(PATIENCE_S)
        closing.result(PATIENCE_S)
    with hps.open(settings) as node:
        assert value(node) == 3


def test_a_version_kept_for_a_rollback_stays_during_the_rollback(settings, monkeypatch):
    settings["models"]["rollback_s"] = 0.5
    with hps.open(settings) as node, ThreadPoolExecutor(1) as pool:
        node.load("words", 2)
        gate = Gate(monkeypatch, node, "catch_up")
        change = pool.submit(node.rollback, "words")
        assert gate.entered.wait(PATIENCE_S)
        time.sleep(1.2)
        assert served(node) == [2, 3]
        gate.opened.set()
        assert change.result(PATIENCE_S) == 3
        assert value(node) == 3


def test_a_rollback_during_the_load_of_a_watched_version_wins(node, repository, monkeypatch):
    node.load("words", 2)
    node.load("words", 3)  # which is followed by newer ones
    write(repository, 4)
    with ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as patched:
            gate = Gate(patched, node, "load")
            watch = pool.submit(node.control.follow, "words", [1, 2, 3, 4])
            assert gate.entered.wait(PATIENCE_S)
        assert node.rollback("words") == 2
        gate.opened.set()
        watch.result(PATIENCE_S)
    node.control.follow("words", [1, 2, 3, 4])
    assert (value(node), served(node), node.control.problems) == (2, [2, 3], {})
    until(lambda: 4 not in cached(node))


def test_an_automatic_rollback_leaves_one_by_hand(node, monkeypatch):
    node.load("words", 2)
    traffic, former = node.control.traffic, node.control.rollback

    def late(name, **options):
        monkeypatch.setattr(traffic, "_rollback", former)
        node.rollback(name)
        return former(name, **options)

    monkeypatch.setattr(traffic, "_rollback", late)
    assert traffic.roll_back("words", 2, "errors", "2 % failed") is None
    assert value(node) == 3
    assert node.models.names["words"].rolled_back == {}


def test_applied_files_are_replayed_by_one_thread_at_a_time(settings, tmp_path, monkeypatch):
    (tmp_path / "updates").mkdir()
    settings["updates"] = {"directory": {"path": str(tmp_path / "updates")}}
    running, most = 0, 0

    def apply(*_arguments):
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.2)
        running -= 1

    with hps.open(settings) as node, ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(AppliedFiles, "_missing", lambda *_: ([tmp_path], 1))
        monkeypatch.setattr(AppliedFiles, "_apply", apply)
        changes = [pool.submit(node.load, "words", 2), pool.submit(node.load, "words", 1)]
        changes.append(pool.submit(node.switch, "words", 3))
        for change in changes:
            change.result(PATIENCE_S)
    assert most == 1
