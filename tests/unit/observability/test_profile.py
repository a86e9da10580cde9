"""Profile: the times of a request's parts."""

from __future__ import annotations

import pytest

from hps.observability.profile import Profile
from hps.tracing import RequestContext, call_timed, current_context, timed_total


def test_profile_reports_nested_parts_with_times() -> None:
    profile = Profile()
    with profile.part("lookup") as lookup:
        lookup.note(keys=3)
        with lookup.part("cpu"):
            assert current_context() is not lookup
    profile.stage("parse", 1_000, 3_500)
    profile.end()
    reported = profile.as_dict()
    assert [part["name"] for part in reported["parts"]] == ["lookup", "parse"]
    assert reported["parts"][1]["us"] == 2.5
    reported_lookup = reported["parts"][0]
    assert reported_lookup["about"] == {"keys": 3}
    assert reported["us"] >= reported_lookup["us"] >= reported_lookup["parts"][0]["us"] > 0


def test_repeated_work_is_totalled_in_one_part() -> None:
    profile = Profile()

    def work(number: int) -> int:
        return number + 1

    with profile.part("merge"):
        assert [timed_total(work, "pooling")(n) for n in range(3)] == [1, 2, 3]
    (merge,) = profile.parts
    (pooling,) = merge.parts
    assert pooling.name == "pooling"
    assert 0 < (pooling.ns or 0) <= (merge.ns or 0)


def test_failed_part_has_its_error_and_unfinished_part_has_no_time() -> None:
    profile = Profile()
    with pytest.raises(ValueError, match="broken"), profile.part("a"):
        raise ValueError("broken")
    profile.begin("b")
    a, b = profile.as_dict()["parts"]
    assert a["about"] == {"error": "broken"}
    assert b["us"] is None


@pytest.mark.parametrize("context", [None, RequestContext("r-1")])
def test_call_timed_without_a_profile_only_calls(context: RequestContext | None) -> None:
    assert call_timed(context, "x", lambda: current_context()) is None
    if context is not None:
        context.stage("x", 0, 1)
        context.spent("x", 1)


def test_call_timed_with_a_profile_adds_a_part() -> None:
    profile = Profile()
    part = call_timed(profile, "x", lambda: current_context())
    assert profile.parts == [part]


def test_profile_of_another_process_becomes_a_nested_part() -> None:
    node = Profile(began=1_000)
    with node.part("lookup") as lookup:
        lookup.note(keys=2)
    node.end()
    caller = Profile()
    caller.reported("node", 1_000, 9_000, node.packed())
    caller.reported("node", 0, 1_000, b"")
    first, second = caller.as_dict()["parts"]
    assert (first["name"], first["us"], second["us"], second["parts"]) == ("node", 8.0, 1.0, [])
    (remote_lookup,) = first["parts"]
    assert (remote_lookup["name"], remote_lookup["about"]) == ("lookup", {"keys": 2})
    assert remote_lookup["us"] == pytest.approx(node.as_dict()["parts"][0]["us"], abs=1e-3)
    RequestContext("r-1").reported("node", 0, 1, b"")
