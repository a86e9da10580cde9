"""Version that a front end serves while its nodes switch one after the other."""

from types import SimpleNamespace

import pytest

from hps.lookup.remote.lookup_node import ServedVersion
from hps.lookup.remote.retry_budget import RetryBudget
from hps.lookup.remote.version_vote import VersionVote


def node(standing="ready", former=(), late=False, **models):
    reported = {version: ServedVersion(0, False) for version in models.items()}
    reported |= {version: ServedVersion(0, True) for version in former}
    return SimpleNamespace(
        standing=standing, may_serve=standing == "ready" or late, models=reported
    )


def follow(nodes, serves=(), chosen=None):
    reported = VersionVote(SimpleNamespace(all=nodes), chosen).report_versions(
        {
            "serves": list(serves),
            "names": {
                model: {"current": int(n), "labels": {}}
                for model, n in (each.split("/") for each in serves)
            },
        },
        0.0,
    )
    assert all(token == f"{m}/{n}" for m, n, token in [*reported["serve"], *reported["open"]])
    return [token for *_, token in reported["serve"]], [token for *_, token in reported["open"]]


@pytest.mark.parametrize(
    ("versions", "served", "wanted"),
    [
        ([1, 1, 1], "m/1", "m/1"),
        ([2, 1, 1], "m/1", "m/1"),
        ([2, 2, 1], "m/1", "m/2"),
        ([2, 1], "m/1", "m/1"),  # a tie changes nothing
        ([2, 1], "m/2", "m/2"),
        ([1, 1, 2], "m/2", "m/1"),  # back
        ([2, 1], None, "m/2"),
        ([3, 3], "m/1", "m/3"),
    ],
)
def test_version_of_most_nodes_is_served(versions, served, wanted):
    serve, ready = follow([node(m=version) for version in versions], [served] if served else [])
    assert serve == [wanted]
    assert {*ready, wanted} == {f"m/{version}" for version in versions}


def test_versions_beside_the_current_one_are_served_with_their_labels():
    def reports(current, beside, **labels):
        found = node(m=current)
        named = tuple(label for label, version in labels.items() if version == beside)
        found.models["m", beside] = ServedVersion(0, False, True, named)
        return found

    nodes = [reports(2, 1, stable=1), reports(2, 1, stable=1), reports(2, 3, stable=3)]
    vote = VersionVote(SimpleNamespace(all=nodes), None)
    answer = vote.report_versions(
        {"serves": ["m/2"], "names": {"m": {"current": 2, "labels": {}}}}, 0.0
    )
    assert [token for *_, token in answer["serve"]] == ["m/2", "m/1", "m/3"]
    assert answer["names"] == {"m": {"current": 2, "labels": {"stable": 1}, "traffic": None}}
    away = VersionVote(SimpleNamespace(all=[]), None)
    kept = {"serves": ["m/2", "m/1"], "names": answer["names"]}
    again = away.report_versions(kept, 0.0)
    assert again["serve"] == [("m", 2, "m/2"), ("m", 1, "m/1")]
    assert again["names"] == answer["names"]


def test_only_ready_nodes_vote():
    away, ends = node("unreachable", m=2), node("not ready", m=2)
    assert follow([away, ends, node(m=1, former=[("m", 2)])], ["m/2"])[0] == ["m/1"]
    assert follow([away, ends], ["m/1", "n/4"])[0] == ["m/1", "n/4"]
    assert follow([away, ends]) == ([], [])


def test_late_nodes_vote_with_their_last_report():
    late = {"standing": "unreachable", "late": True}
    assert follow([node(**late, m=1), node(**late, m=1, n=1), node(m=2)], ["m/1", "n/1"]) == (
        ["m/1", "n/1"],
        ["m/2"],
    )


def test_models_without_nodes_are_unloaded():
    assert follow([node(m=1)], ["m/1", "gone/1"])[0] == ["m/1"]


def test_models_and_versions_can_be_configured():
    nodes = [node(a=1, b=2, c=3), node(a=2, b=2, c=3)]
    chosen = {"a": 1, "b": None, "d": None, "e": 5}
    assert follow(nodes, ["a/1"], chosen) == (["a/1", "b/2", "e/5"], [])


def test_retry_budget_earns_one_retry_for_five_lookups():
    budget = RetryBudget(2)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.earn()
    assert not budget.spend()
    budget.earn()
    assert [budget.spend(), budget.spend()] == [True, False]
    for _ in range(100):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]


def test_traffic_rules_are_those_of_most_nodes():
    def reports(rule):
        found = node(m=2)
        found.models["m", 2] = found.models["m", 2]._replace(traffic=rule)
        found.models["m", 1] = ServedVersion(0, False, True)
        return found

    rule = '{"weights": {"1": 10}}'
    report = {"serves": [], "names": {}}
    for rules, expected in (
        ([rule, rule, ""], {"weights": {"1": 10}}),
        ([rule, "", ""], None),
        (["", ""], None),
    ):
        vote = VersionVote(SimpleNamespace(all=[reports(each) for each in rules]), None)
        assert vote.report_versions(report, 0.0)["names"]["m"]["traffic"] == expected
    fixed = VersionVote(SimpleNamespace(all=[reports(rule)]), {"m": 2})
    assert fixed.report_versions(report, 0.0)["names"]["m"]["traffic"] is None
