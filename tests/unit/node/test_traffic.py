"""Traffic rules of a node: which version answers a request that names none; validity, storage, rollback."""

import json
import logging
from collections import Counter

import numpy as np
import pytest

import hps
from hps.config.traffic_settings import RollbackBounds, TrafficRule, parse_rule
from hps.errors import BadRequest, ConfigError, NotFound
from hps.node.traffic_split import TrafficSplit, input_text, value_text
from hps.node.version_choice import FILE_NAME, VersionChoice
from hps.observability import metric_names as m
from tests.support.waiting import PATIENCE_S, PATIENT_GUARD
from tests.unit.node.test_versions import served, value, write

KEYS = [f"user-{number}" for number in range(20_000)]


def split(**rule):
    return TrafficSplit("words", TrafficRule.model_validate(rule))


def of(key):
    return lambda _source: key


def chosen(one, keys=KEYS):
    return {key: one.choose(of(key)) for key in keys}


def within(count, share, total=20_000):
    """True if a binomial count is within five standard deviations of its mean."""
    mean = total * share / 100
    return abs(count - mean) <= 5 * (mean * (1 - share / 100)) ** 0.5


# -- the split -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sticky", [None, "header:x-user"])
def test_shares_are_those_of_the_weights(sticky):
    one = split(weights={"2": 10, "canary": 25}, **({"sticky": sticky} if sticky else {}))
    counts = Counter(chosen(one).values())
    assert within(counts["2"], 10)
    assert within(counts["canary"], 25)
    assert within(counts[""], 65)


def test_sticky_choices_depend_on_the_key_alone():
    one, again = (split(weights={"2": 50}, sticky="header:x-user") for _ in range(2))
    assert chosen(one) == chosen(again)
    # Fixed, since it must be the same after an upgrade, too.
    assert [one.choose(of(key)) for key in KEYS[:12]] == FIXED


FIXED = ["2", "2", "2", "2", "2", "2", "2", "", "", "2", "", ""]


def test_keys_of_a_version_stay_when_its_share_grows():
    small, large = (split(weights={"2": share}, sticky="header:x-user") for share in (5, 30))
    before, after = chosen(small), chosen(large)
    assert all(after[key] == "2" for key in KEYS if before[key] == "2")


def test_different_models_divide_keys_differently():
    rule = TrafficRule.model_validate({"weights": {"2": 50}, "sticky": "header:x-user"})
    one, other = (chosen(TrafficSplit(name, rule)) for name in ("words", "clicks"))
    assert within(sum(one[key] == other[key] for key in KEYS), 50)


def test_requests_without_the_key_are_divided_at_random():
    one = split(weights={"2": 50}, sticky="header:x-user")
    assert within(sum(one.choose(of(None)) == "2" for _ in KEYS), 50)


def test_matches_come_before_weights():
    one = split(
        weights={"2": 100},
        matches=[
            {"by": "header:X-Group", "value": "b", "version": "canary"},
            {"by": "parameter:group", "value": 3, "version": 4},
        ],
    )
    values = {}
    assert one.needs_body

    def value_of(key):
        return values.get((key.kind, key.name))

    assert one.choose(value_of) == "2"
    values["parameter", "group"] = "3"
    assert one.choose(value_of) == "4"
    values["header", "x-group"] = "b"
    assert one.choose(value_of) == "canary"
    only = split(matches=[{"by": "header:x-group", "value": "b", "version": "canary"}])
    assert (only.choose(of("a")), only.choose(of("b")), only.needs_body) == ("", "canary", False)


def test_equal_values_have_equal_texts():
    assert [value_text(each) for each in (7, 7.0, "7", True, None, 0.5)] == [
        "7", "7", "7", "true", None, "0.5",
    ]  # fmt: skip
    arrays = np.array([[7, 8]]), np.array([7.0], np.float32), [[7], [8]], np.array([7], np.uint64)
    assert {input_text(each) for each in arrays} == {"7"}
    assert (input_text(np.array([])), input_text([]), input_text(None)) == (None, None, None)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"weights": {"2": 0}}, "version 2 has 0 percent; it must be above 0 and at most 100"),
        ({"weights": {"2": -5}}, "version 2 has -5 percent"),
        ({"weights": {"2": 60, "3": 50}}, "weights: have a sum of 110, which must be at most 100"),
        ({"weights": {"a b": 5}}, "'a b' is neither a version's number nor a label"),
        ({"weights": {"2": "x"}}, 'weights.2: expected a number, found "x"'),
        ({"weights": {"2": 5}, "sticky": "user"}, "sticky: expected text that matches"),
        ({"sticky": "header:x-user"}, "sticky: chooses by weights, but there are none"),
        ({"wieghts": {}}, "wieghts: unknown key; did you mean 'weights'"),
        ({"matches": [{"by": "header:a", "version": 2}]}, r"matches\[0\].value: is missing"),
        ({"shadow": {"version": 2, "rate": 0}}, "shadow.rate: expected a number above 0 up to 1"),
        ({"rollback": {"max_p99_ratio": 1}}, "rollback.max_p99_ratio: expected a number above 1"),
        ([], "expected a mapping"),
    ],
)
def test_bad_rules_are_rejected(rule, message):
    with pytest.raises(BadRequest, match=message):
        parse_rule(rule)


def test_empty_rules_are_none():
    assert parse_rule(None) is None
    assert parse_rule({}) is None
    assert parse_rule({"rollback": {}}) == TrafficRule(rollback=RollbackBounds())


# -- the node --------------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path):
    write(tmp_path / "models", 1, 2, 3)
    return {
        "models": {"repository": str(tmp_path / "models"), "versions": {"latest": 2}},
        "tiers": {
            "rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD},
            "cpu_cache": {"share": 0.5},
        },
    }


@pytest.fixture
def node(settings):
    with hps.open(settings) as opened:
        yield opened


def versions(node, count=400, **options):
    def one(number):
        features = {"left": np.array([number]), "right": np.array([number])}
        found = node.lookup("words", features, **options).vectors
        (version,) = {int(vector[0, 0] - number) // 1000 for vector in found.values()}
        return version

    return Counter(one(number % 300) for number in range(count))


def test_python_requests_follow_the_rule(node):
    node.set_traffic("words", {"weights": {"2": 25}})
    counts = versions(node)
    assert counts.keys() == {2, 3}
    assert within(counts[2], 25, 400)
    assert value(node, 3) == 3
    assert node.status()["models"][0]["weight"] == 25
    node.set_traffic("words", {"weights": {"2": 50}, "sticky": "input:left"})
    assert versions(node, 300) == versions(node, 300)
    node.set_traffic("words", {"weights": {"2": 50}, "sticky": "parameter:user"})
    by_user = {user: versions(node, 20, parameters={"user": user}) for user in range(20)}
    assert all(len(each) == 1 for each in by_user.values())
    assert {version for each in by_user.values() for version in each} == {2, 3}
    node.set_traffic("words", None)
    assert node.traffic("words") == {}
    assert versions(node) == {3: 400}


def test_rules_name_served_versions(node):
    with pytest.raises(BadRequest, match=r"names 'canary': .*versions 2, 3 are served"):
        node.set_traffic("words", {"weights": {"canary": 10}})
    with pytest.raises(BadRequest, match="names '1'"):
        node.set_traffic("words", {"shadow": {"version": 1}})
    with pytest.raises(BadRequest, match="version 3 is the current one of model 'words'"):
        node.set_traffic("words", {"weights": {"3": 10}})
    with pytest.raises(NotFound, match="unknown model: 'word'"):
        node.set_traffic("word", {"weights": {"2": 10}})
    assert node.traffic("words") == {}


def test_named_versions_stay_served(node):
    node.label("words", "canary", 2)
    node.set_traffic("words", {"weights": {"canary": 10}})
    with pytest.raises(
        BadRequest, match=r"rule of model 'words' names 'canary'.*hps model traffic words"
    ):
        node.label("words", "canary", None)
    node.load("words", 1, switch=False)
    node.set_traffic("words", {"shadow": {"version": 1}})
    with pytest.raises(BadRequest, match="the traffic rule of model 'words' names '1'"):
        node.unload("words", 1)
    node.set_traffic("words", None)
    node.unload("words", 1)
    assert served(node) == [2, 3]


def test_a_promoted_version_has_no_share_any_more(node):
    node.set_traffic("words", {"weights": {"2": 10}, "rollback": {}})
    node.switch("words", 2)
    assert node.traffic("words") == {"rollback": {}}
    assert versions(node, 50) == {2: 50}
    assert node.rollback("words") == 3
    assert versions(node, 50) == {3: 50}


def test_rules_survive_a_restart(settings):
    with hps.open(settings) as node:
        node.load("words", 1, switch=False, labels=["canary"])
        node.set_traffic("words", {"weights": {"canary": 50}, "sticky": "input:left"})
        before = versions(node, 300)
        rule = node.traffic("words")
    with hps.open(settings) as node:
        assert node.traffic("words") == rule
        assert versions(node, 300) == before
        assert before.keys() == {1, 3}


def test_rules_of_the_settings(settings):
    rule = {"weights": {1: 50}, "rollback": {"max_psi": 0.2}}
    configured = settings | {"models": settings["models"] | {"serve": {"words": {"traffic": rule}}}}
    with hps.open(configured) as node:
        assert served(node) == [1, 2, 3]
        assert versions(node).keys() == {1, 3}
        node.set_traffic("words", {"weights": {"2": 50}})
    with hps.open(configured) as node:  # the last word counts
        assert versions(node).keys() == {2, 3}
    with hps.open(settings) as node:  # the settings have changed
        assert versions(node).keys() == {3}
    rule["weights"] = {"canary": 50}
    with pytest.raises(
        ConfigError, match="traffic names the label 'canary', which a version gets at run"
    ):
        hps.open(configured)


def test_files_of_other_releases_are_read(settings, tmp_path):
    with hps.open(settings) as node:
        node.switch("words", 2)
    path = tmp_path / "db" / FILE_NAME
    found = json.loads(path.read_text())
    for name in ("traffic", "rolled_back", "switched_at"):
        del found["models"]["words"]["choice"][name]
    path.write_text(json.dumps(found))
    with hps.open(settings) as node:
        assert value(node) == 2


def test_choices_are_equal_after_json():
    choice = VersionChoice(
        3, labels={"canary": 2}, traffic=parse_rule({"weights": {"2": 1}}), rolled_back={1: "slow"}
    )
    assert VersionChoice.from_json(json.loads(json.dumps(choice.as_json()))) == choice


# -- automatic rollback ----------------------------------------------------------------------------


def test_a_share_is_taken_back(node, settings, caplog):
    node.set_traffic("words", {"weights": {"2": 50}, "sticky": "input:left"})
    with caplog.at_level(logging.WARNING):
        assert node.control.traffic.roll_back("words", 2, "latency", "p99 is 9 ms") == 3
    assert (
        "version 2 rolled back automatically, version 3 answers its requests: p99 is 9 ms"
        in caplog.text
    )
    assert node.metrics.counter(m.MODEL_AUTOMATIC_ROLLBACKS, "words", "latency").value == 1
    assert versions(node, 50) == {3: 50}
    assert served(node) == [2, 3]
    assert node.models.names["words"].rolled_back == {2: "p99 is 9 ms"}
    node.set_traffic("words", {"weights": {"2": 10}})  # the operator decides anew
    assert node.models.names["words"].rolled_back == {}


def test_the_current_version_is_replaced_by_the_previous(node):
    assert node.control.traffic.roll_back("words", 3, "errors", "no previous version") is None
    node.switch("words", 2)
    assert node.control.traffic.roll_back("words", 2, "errors", "2 % failed") == 3
    assert value(node) == 3
    assert node.models.names["words"].rolled_back == {2: "2 % failed"}
    assert node.control.traffic.choice("words").follows is False
    node.switch("words", 2)
    assert node.models.names["words"].rolled_back == {}


def test_a_switch_is_known_after_a_restart(settings):
    with hps.open(settings) as node:
        node.switch("words", 2)
        assert node.control.traffic.switch_before_start("words") is None  # of this run
    with hps.open(settings) as node:
        switch = node.control.traffic.switch_before_start("words")
        assert switch.previous == 3
        assert 0 <= switch.ago_s < PATIENCE_S
        assert node.control.traffic.roll_back("words", 2, "errors", "2 % failed") == 3
        assert node.control.traffic.switch_before_start("words") is None
    with hps.open(settings) as node:  # a version that was gone back to is no new one
        assert value(node) == 3
        assert node.control.traffic.switch_before_start("words") is None
