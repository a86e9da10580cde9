"""Several versions of a model on one node: requests by version, labels, switch, rollback, state, watch."""

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import hps
from hps.cli.store_open import open_models
from hps.config import load_config
from hps.config.model_schema import ModelSpec
from hps.config.traffic_settings import TrafficRule
from hps.errors import BadRequest, ModelError, NotFound, Unavailable
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.node.model_opening import version_openers
from hps.node.version_choice import FILE_NAME
from hps.observability import metric_names as m
from tests.support.redis_servers import shared_server
from tests.support.waiting import PATIENT_GUARD, until

SPEC = {"name": "words", "tables": [{"name": "left", "dim": 4}, {"name": "right", "dim": 2}]}
ROWS = 300


def write(root, *versions):
    """Row ``k`` of version ``v`` is full of ``1000 * v + k``."""
    keys = np.arange(ROWS)
    for version in versions:
        tables = {
            table["name"]: (
                keys,
                np.full((ROWS, table["dim"]), 1000 * version, np.float32) + keys[:, None],
            )
            for table in SPEC["tables"]
        }
        write_version(root, ModelSpec.model_validate(SPEC), version, tables)


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


def value(node, version=None):
    """The version that the rows of a lookup are of."""
    keys = np.arange(ROWS)
    result = node.lookup("words", {"left": keys, "right": keys}, version=version)
    assert not result.degraded
    assert not result.defaulted
    (found,) = {int(v) for n in result.vectors for v in result.vectors[n][:, 0] - keys}
    return found // 1000


def served(node):
    return sorted(each.version for each in node.models.of("words"))


def cached(node):
    return {table.version for table in node.tiers[0].tier._tables}


def counted(node, reason):
    return node.metrics.counter(m.MODEL_SWITCHES, "words", reason).value


def test_requests_name_versions_and_labels(node):
    assert (value(node), served(node)) == (3, [3])
    assert node.load("words", 1, switch=False, labels=["stable"]) == 1
    node.load("words", 2, switch=False, labels=["canary", "next"])
    expected = {None: 3, 3: 3, "1": 1, 2: 2, "stable": 1, "canary": 2, "next": 2, "latest": 3}
    assert {version: value(node, version) for version in expected} == expected
    with pytest.raises(
        NotFound,
        match=r"'words' version staging is not found; versions 1, 2, 3 are served; "
        r"labels: canary \(2\), next \(2\), stable \(1\)",
    ):
        value(node, "staging")
    with pytest.raises(NotFound, match=r"version 9 is not found"):
        value(node, 9)
    status = node.status()["models"]
    assert [(s["version"], s["current"], s["labels"]) for s in status] == [
        (1, False, ["stable"]),
        (2, False, ["canary", "next"]),
        (3, True, []),
    ]
    rendered = node.metrics.render().decode()
    assert 'hps_model_label_version{label="canary",model="words"} 2' in rendered.replace(
        'model="words",label="canary"', 'label="canary",model="words"'
    )


def test_switch_and_rollback_keep_the_previous_version_warm(node):
    node.load("words", 2)
    assert (value(node), served(node)) == (2, [2, 3])
    engine = node.model("words", 3).engine
    assert not node.control.rollback_loads("words")
    assert node.rollback("words") == 3
    assert node.model("words").engine is engine  # it was still in memory
    assert (value(node), counted(node, "rollback"), counted(node, "load")) == (3, 1, 1)
    node.load("words", 1)  # one version is kept at most
    assert served(node) == [1, 3]
    assert node.switch("words", 3) == 3
    assert value(node) == 3
    del engine
    until(lambda: cached(node) == {1, 3})
    with pytest.raises(NotFound, match="version 2 is not found; versions 1, 3 are served"):
        node.switch("words", 2)


def test_previous_version_is_freed_after_its_time(settings):
    settings["models"]["rollback_s"] = 0.3
    with hps.open(settings) as node:
        changes = []
        node.control.on_change.append(lambda: changes.append(served(node)))
        node.load("words", 2)
        until(lambda: served(node) == [2])
        until(lambda: cached(node) == {2})
        assert node.control.rollback_loads("words")
        assert changes == [[2, 3], [2]]
        assert node.rollback("words") == 3  # is loaded again
        assert value(node) == 3


def test_labels_move_and_keep_their_versions(node):
    node.load("words", 1, switch=False, labels=["stable"])
    node.label("words", "stable", 3)
    assert value(node, "stable") == 3
    assert served(node) == [1, 3]  # loaded on request
    node.label("words", "old", "1")
    with pytest.raises(BadRequest, match="has the label 'old'"):
        node.unload("words", 1)
    node.label("words", "old", None)
    with pytest.raises(NotFound, match="version old is not found"):
        node.label("words", "old", None)
    node.unload("words", 1)
    assert served(node) == [3]
    node.load("words", 2)
    with pytest.raises(BadRequest, match="is the current one"):
        node.unload("words", 2)
    for label in ("latest", "7", "", "a b", "x" * 65):
        with pytest.raises(BadRequest, match="cannot be a label"):
            node.label("words", label, 2)


def test_changes_of_labels_are_logged(node, caplog):
    caplog.set_level("INFO", "hps.node.version_reports")

    def changes():
        found = [r.getMessage() for r in caplog.records if " changed: " in r.getMessage()]
        caplog.clear()
        return found

    node.load("words", 1, switch=False, labels=["stable", "old"])
    assert changes() == [
        "model words: label 'old' changed: version none -> 1 (load)",
        "model words: label 'stable' changed: version none -> 1 (load)",
    ]
    node.label("words", "stable", 3)
    assert changes() == ["model words: label 'stable' changed: version 1 -> 3 (label)"]
    node.label("words", "stable", 3)
    node.load("words", 2, switch=False)
    node.switch("words", 2)
    assert changes() == []
    node.label("words", "old", None)
    assert changes() == ["model words: label 'old' changed: version 1 -> none (label)"]
    node.unload("words")
    assert changes() == ["model words: label 'stable' changed: version 3 -> none (unload)"]


def test_versions_and_labels_are_served_after_a_restart(settings, repository, tmp_path):
    with hps.open(settings) as node:
        node.load("words", 1, switch=False, labels=["stable"])
        node.load("words", 2)
    write(repository, 4)
    with hps.open(settings) as node:
        assert (value(node), value(node, "stable"), served(node)) == (2, 1, [1, 2])
        assert node.rollback("words") == 3
    with hps.open(settings) as node:
        assert (value(node), value(node, "stable")) == (3, 1)
        node.unload("words")
    with hps.open(settings) as node:
        assert not node.models
        node.load("words")
        assert value(node) == 4
    settings["models"]["serve"] = {"words": {"version": 2}}  # the operator's last word
    with hps.open(settings) as node:
        assert (value(node), served(node)) == (2, [2])


def test_commands_open_the_version_that_a_start_makes_current(settings, repository, tmp_path):
    with hps.open(settings) as node:
        node.load("words", 2)
        node.load("words", 1, switch=False)
    given = [f"models.repository={repository}", f"tiers.rocksdb.path={tmp_path / 'db'}"]
    configuration = load_config(None, given, environ={})
    assert open_models(configuration).versions["words"].version == 2


def lose_table(version):
    shutil.rmtree(version / "tables/left")


def cut_short(version):
    os.truncate(version / "tables/left/emb_vector", 100)


def damage_manifest(version):
    (version / "manifest.json").write_text("{")


@pytest.mark.parametrize("damage", [lose_table, cut_short, damage_manifest])
def test_damaged_versions_are_left_out_at_a_start(settings, repository, caplog, damage):
    with hps.open(settings) as node:
        node.load("words", 1, switch=False, labels=["canary"])
        node.load("words", 2, switch=False)
        node.control.traffic.set_rule("words", TrafficRule(weights={"canary": 10.0, "2": 20.0}))
    kept = repository.parent / "kept"
    shutil.copytree(repository / "words/1", kept)
    damage(repository / "words/1")
    with hps.open(settings) as node:
        assert (value(node, 3), served(node)) == (3, [2, 3])
        names = node.models.names["words"]
        assert (names.labels, names.traffic.weights) == ({}, {"2": 20.0})
        assert "version 1, chosen at run time, is not served" in caplog.text
        assert "version 1, chosen at run time, is not served" in str(node.status()["warnings"])
        assert node.control.problem("words", 1)
        shutil.rmtree(repository / "words/1")
        shutil.copytree(kept, repository / "words/1")
    with hps.open(settings) as node:  # it is repaired
        assert (value(node, "canary"), served(node)) == (1, [1, 2, 3])
        assert not node.control.problems
    damage(repository / "words/3")
    with pytest.raises(ModelError):
        hps.open(settings)


def flip_a_byte(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("store", ["rocksdb", "mapped", "redis"])
def test_versions_whose_rows_cannot_be_loaded_are_left_out_at_a_start(
    settings, repository, tmp_path, caplog, store
):
    settings["models"]["state"] = str(tmp_path / "served.json")
    settings["tiers"]["rocksdb"]["enabled"] = store == "rocksdb"
    if store == "redis":
        settings["tiers"]["redis"] = {
            "addresses": [shared_server().address],
            "timeout_ms": 20_000,
            "guard": PATIENT_GUARD,
        }
    if store != "mapped":
        for path in repository.glob("words/*/tables/*/mapped"):
            path.unlink()
    with hps.open(settings) as node:
        node.load("words", 1, switch=False, labels=["canary"])
        node.load("words", 2, switch=False)
    kept = repository.parent / "kept"
    shutil.copytree(repository, kept)

    def damage(version):
        """What a start finds only when it loads the rows."""
        shutil.rmtree(tmp_path / "db", ignore_errors=True)
        if store == "redis":
            shared_server()  # without the rows of the last start
        table = repository / f"words/{version}/tables/right"
        if store == "mapped":
            os.truncate(table / "mapped", 100)
        else:
            flip_a_byte(table / "emb_vector")

    damage(1)
    with hps.open(settings) as node:
        assert (value(node), value(node, 2), served(node)) == (3, 2, [2, 3])
        assert node.models.names["words"].labels == {}
        assert cached(node) == {2, 3}
        assert "version 1, chosen at run time, is not served" in caplog.text
        assert "version 1, chosen at run time, is not served" in str(node.status()["warnings"])
        assert "right" in node.control.problem("words", 1)
        with pytest.raises(ModelError):
            node.load("words", 1, switch=False)
        shutil.rmtree(repository)
        shutil.copytree(kept, repository)
        node.load("words", 1, switch=False)
        assert value(node, 1) == 1
        assert not node.control.problems
    damage(1)
    with hps.open(settings) as node:
        assert served(node) == [2, 3]
    shutil.rmtree(repository)
    shutil.copytree(kept, repository)
    with hps.open(settings) as node:  # it is repaired
        assert (value(node, 1), served(node)) == (1, [1, 2, 3])
        assert not node.control.problems
    damage(3)
    with pytest.raises(ModelError, match="right"):
        hps.open(settings)


def test_problem_of_a_version_ends_when_it_is_loaded(settings, repository):
    with hps.open(settings) as node:
        node.load("words", 1, switch=False)
    kept = repository.parent / "kept"
    shutil.move(repository / "words/1/tables", kept)
    with hps.open(settings) as node:
        assert node.control.problems
        shutil.move(kept, repository / "words/1/tables")
        node.load("words", 1, switch=False)
        assert not node.control.problems


def test_versions_that_are_gone_are_left_out_at_a_start(settings, repository, tmp_path, caplog):
    with hps.open(settings) as node:
        node.load("words", 1, switch=False, labels=["stable"])
        node.load("words", 2)
    shutil.rmtree(repository / "words" / "2")
    with hps.open(settings) as node:
        assert (value(node), value(node, "stable")) == (1, 1)
        assert not node.control.problems
    assert "version 2, chosen at run time, is not served" in caplog.text
    state = tmp_path / "db" / FILE_NAME
    for text in (
        "{",
        json.dumps({"format": 9}),
        json.dumps({"format": 1, "models": {"words": {}}}),
    ):
        state.write_text(text)
        with hps.open(settings) as node:
            assert value(node) == 3
        assert "invalid list of served versions" in caplog.text
        caplog.clear()


def test_unavailable_repository_keeps_the_last_list(node, monkeypatch, caplog):
    assert node.control.available() == {"words": [1, 2, 3]}

    def fail(*_):
        raise Unavailable("the store does not respond")

    monkeypatch.setattr(node.control.repository, "versions", fail)
    assert node.control.available() == {"words": [1, 2, 3]}
    assert "using the last list: the store does not respond" in caplog.text


def test_failed_write_of_the_state_changes_nothing(node, monkeypatch):
    def fail(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hps.node.version_choice.fsync_path", fail)
    with pytest.raises(Unavailable, match="writing the served versions failed: No space left"):
        node.load("words", 2)
    assert (value(node), served(node)) == (3, [3])
    monkeypatch.undo()
    node.load("words", 2)
    assert value(node) == 2


@pytest.mark.parametrize(
    ("policy", "versions"),
    [({"latest": 2}, [2, 3]), ({"all": True}, [1, 2, 3]), ({"specific": [1, 3, 9]}, [1, 3])],
)
def test_policy_chooses_the_versions_at_a_start(settings, policy, versions):
    settings["models"]["versions"] = policy
    with hps.open(settings) as node:
        assert (served(node), value(node)) == (versions, 3)
        assert [value(node, version) for version in versions] == versions


def half_copied(repository, version, *, tables=("left",)):
    """A copy of version 3 in progress: its manifest is not there yet."""
    for table in tables:
        path = f"tables/{table}"
        shutil.copytree(repository / "words/3" / path, repository / f"words/{version}" / path)


@pytest.mark.parametrize("tables", [("left",), ("left", "right")])
@pytest.mark.parametrize(
    ("policy", "versions"), [({}, [3]), ({"latest": 2}, [2, 3]), ({"all": True}, [1, 2, 3])]
)
def test_half_copied_version_is_left_out_at_a_start(
    settings, repository, caplog, policy, versions, tables
):
    half_copied(repository, 4, tables=tables)
    settings["models"]["versions"] = policy
    with hps.open(settings) as node:
        assert (served(node), value(node)) == (versions, 3)
        assert node.load("words") == 3
        assert node.load("words", 2) == 2
        assert not node.control._switcher.choices["words"].follows
        node.load("words", 3)
        assert node.control._switcher.choices["words"].follows  # it is the highest complete one
    reason = "4 has no manifest.json, which is written last, so it may be half copied"
    (warning,) = [each for each in caplog.messages if reason in each]
    assert warning.startswith(f"model words: version 4 is not served: {repository}/words/4 has no")


def test_front_end_leaves_a_half_copied_version_out(repository):
    half_copied(repository, 4)
    front_end = ["server.role=frontend", 'lookup.nodes=["localhost:1"]']
    configuration = load_config(None, [f"models.repository={repository}", *front_end], environ={})
    assert version_openers(configuration)["words"]().version == 3


def test_no_warning_for_versions_that_would_not_be_served(settings, repository, caplog):
    for version in (1, 2):
        (repository / "words" / str(version) / "manifest.json").unlink()
    with hps.open(settings) as node:
        assert value(node) == 3
    assert "half copied" not in caplog.text


@pytest.mark.parametrize("named", [{"version": 3}, {"versions": {"specific": [3]}}])
def test_version_without_a_manifest_is_served_if_it_is_named(settings, repository, named):
    (repository / "words/3/manifest.json").unlink()
    settings["models"]["serve"] = {"words": named}
    with hps.open(settings) as node:
        assert (value(node), served(node)) == (3, [3])


def test_half_copied_version_that_is_named_is_an_error(settings, repository):
    half_copied(repository, 4)
    settings["models"]["serve"] = {"words": {"version": 4}}
    with pytest.raises(ModelError, match=r"table 'right': .*words/4/tables/right is missing"):
        hps.open(settings)


def test_highest_version_is_served_where_none_has_a_manifest(settings, repository):
    for path in repository.glob("words/*/manifest.json"):
        path.unlink()
    with hps.open(settings) as node:
        assert value(node) == 3


def test_two_loads_at_once_and_lookups_meanwhile(node):
    """No lookup fails, and none mixes versions."""
    ended, wrong = threading.Event(), []

    def ask():
        while not ended.is_set():
            try:
                assert value(node) in (1, 2, 3)
            except Exception as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            loads = [pool.submit(node.load, "words", version) for version in (1, 2)]
            assert [each.result(60) for each in loads] == [1, 2]
            assert value(node) in (1, 2)
            node.switch("words", node.load("words", 3))
    ended.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(served(node)) == 2


@pytest.fixture
def watching(settings):
    settings["models"]["watch_s"] = 0.05
    with hps.open(settings) as opened:
        yield opened


def test_watched_repository_serves_new_versions(watching, repository, caplog):
    node = watching
    write(repository, 4)
    until(lambda: value(node) == 4)
    until(lambda: counted(node, "watch") == 1)
    assert served(node) == [3, 4]
    # A half-written version: its manifest comes last.
    shutil.copytree(repository / "words" / "4", repository / "words" / "5")
    (repository / "words" / "5" / "manifest.json").unlink()
    # A damaged one: its error is logged once, and the others are served on.
    shutil.copytree(repository / "words" / "4", repository / "words" / "6")
    until(lambda: "version 6 of the repository is not served" in str(node.status()["warnings"]))
    assert value(node) == 4
    assert caplog.text.count("version 6 of the repository is not served") == 1
    assert not any(entry["version"] == 5 for entry in node.status()["models"])
    shutil.rmtree(repository / "words" / "6")
    until(lambda: not node.control.problems)


def test_problem_of_a_watched_version_ends_when_it_is_loaded(node, repository):
    shutil.copytree(repository / "words/3", repository / "words/6")  # damaged: its manifest says 3
    node.control.follow("words", [1, 2, 3, 6])
    assert "version 6 of the repository is not served" in node.control.warnings["words"]
    assert "describes model 'words' version 3" in node.control.problem("words", 6)
    shutil.rmtree(repository / "words/6")
    write(repository, 6)
    node.load("words", 6)
    assert "words" not in node.control.warnings
    assert not node.control.problem("words", 6)


def test_pinned_version_stays_current_until_latest_is_followed_again(watching, repository):
    node = watching
    until(lambda: node.control.available()["words"] == [1, 2, 3])
    node.load("words", 2)
    write(repository, 4)
    write(repository, 5)
    followed = []
    follow = node.control.follow
    node.control.follow = lambda *of: (follow(*of), followed.append(of))
    until(lambda: any(5 in found for _, found in followed))
    assert value(node) == 2
    node.switch("words", "latest")
    write(repository, 6)
    until(lambda: value(node) == 6)


def test_removed_versions_are_unloaded_but_never_the_last_one(watching, repository):
    node = watching
    node.load("words", 1, switch=False, labels=["stable"])
    os.rename(repository / "words" / "3", repository / ".gone")
    until(lambda: value(node) != 3)
    until(lambda: 3 not in served(node))
    for version in (1, 2):
        shutil.rmtree(repository / "words" / str(version))
    until(lambda: "was removed from the repository" in str(node.status()["warnings"]))
    assert value(node) in (1, 2)


@pytest.fixture
def without_manifests(repository):
    """The repository, written by tools that know no manifest."""
    for path in repository.glob("words/*/manifest.json"):
        path.unlink()
    return repository


def test_load_warns_where_no_version_has_a_manifest(without_manifests, node, caplog):
    node.load("words", 2)
    warning = "words/2 has no manifest.json: contents cannot be verified"
    assert warning in caplog.text
    assert warning in str(node.status()["warnings"])
    node.load("words", 1)
    assert warning not in str(node.status()["warnings"])


@pytest.mark.parametrize("tables", [("left",), ("left", "right")])
def test_load_of_a_version_that_is_being_written_is_rejected(node, repository, tables):
    half_copied(repository, 4, tables=tables)
    with pytest.raises(
        ModelError,
        match=r"version 4 of model 'words' has no manifest\.json, which is written last, but other "
        r"versions have one: it is being written, or its copy was cut short; finish it and load",
    ):
        node.load("words", 4)
    assert (served(node), value(node)) == ([3], 3)
    assert node.metrics.counter(m.MODEL_LOADS, "words", "failed").value == 1
    shutil.rmtree(repository / "words/4")
    write(repository, 4)
    assert node.load("words", 4) == 4


def test_load_without_a_version_rejects_a_stated_one_that_is_being_written(settings, repository):
    settings["models"]["serve"] = {"words": {"version": 3}}
    settings["models"]["rollback_s"] = 0
    (repository / "words/3/manifest.json").unlink()
    with hps.open(settings) as node:
        assert node.load("words") == 3  # it is served
        node.load("words", 2)
        until(lambda: served(node) == [2])
        with pytest.raises(ModelError, match=r"version 3 of model 'words' has no manifest\.json"):
            node.load("words")
        assert value(node) == 2


def test_version_without_a_manifest_stays_loadable_after_a_version_with_one(
    without_manifests, settings
):
    """A start and a rollback serve what was served before others had a manifest."""
    settings["models"]["rollback_s"] = 0
    with hps.open(settings) as node:
        write(without_manifests, 4)
        assert node.load("words", 3) == 3  # it is served
        node.load("words", 4)
        until(lambda: served(node) == [4])
        assert node.control.rollback("words") == 3
        assert value(node) == 3
    with hps.open(settings) as node:
        assert value(node) == 3


def test_version_that_cannot_be_read_is_rejected_with_the_reason(node, monkeypatch):
    def fail(*_):
        raise PermissionError(13, "Permission denied", "words/2/manifest.json")

    monkeypatch.setattr(Repository, "open", fail)
    with pytest.raises(ModelError, match=r"cannot read words/2/manifest\.json: Permission denied"):
        node.load("words", 2)
    assert value(node) == 3


def test_loading_a_changed_version_is_still_rejected(node, repository):
    node.load("words", 2, switch=False)
    path = repository / "words" / "2" / "tables" / "left" / "emb_vector"
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    with pytest.raises(ModelError, match="changed after it was loaded"):
        node.load("words", 2)
    assert value(node) == 3
