"""Names that come, change and go while the server runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hps.errors import NotFound
from services.frontend.state import FrontendState
from services.frontend.statistics import Statistics


def test_names_whose_model_is_the_same_keep_what_was_counted(small):
    state, models = small.state, small.node.models
    before = dict(state.entries)
    models["words"] = replace(models["words"], version=2)
    del models["halves"]
    state.serve(small.node)
    assert list(state.entries) == ["ctr", "ctr.lookup", "words", "words.lookup"]
    assert state.entries["ctr"] is before["ctr"]
    assert state.entries["words"] is not before["words"]
    assert state.entry("words", "2").info.version == "2"
    with pytest.raises(NotFound, match="version 1 is not found; version 2 is served"):
        state.entry("words", "1")


def test_who_watches_is_told_before_the_server_is_ready(small):
    state, seen = FrontendState(), []
    state.on_models_changed(lambda: seen.append((list(state.entries)[:1], state.ready)))
    state.serve(small.node)
    assert seen == [([], False), (["ctr"], False)]
    assert state.ready


def test_models_may_come_later(small):
    models = dict(small.node.models)
    small.node.models.clear()
    state = FrontendState()
    state.serve(small.node)
    assert state.phase == "empty"
    small.node.models.update(models)
    state.serve(small.node)
    assert state.ready


def test_a_server_that_stops_is_not_made_ready_by_a_model(small):
    small.state.stop()
    small.state.serve(small.node)
    assert not small.state.ready


def test_statistics_are_those_of_all_processes(small):
    """As another one's sums have them; without any, and of names they lack, our own."""
    state, entry = small.state, small.state.entries["words"]
    entry.statistics.succeeded(4, 0, 10, 30, 60)
    other = Statistics()
    other.succeeded(4, 0, 1, 3, 6)
    other.succeeded(9, 0, 1, 3, 6)
    other.failed(0, 5)
    other.add(entry.statistics.numbers())
    assert state.statistics([entry])[0]["inference_count"] == 4
    state.set_statistics_source(lambda: {"words/1": other.numbers(), "ctr/7": other.numbers()})
    told = state.statistics([entry, state.entries["ctr"]])
    assert [each["inference_count"] for each in told] == [17, 0]
    assert told[0]["inference_stats"]["success"] == {"count": 3, "ns": 72}
    assert told[0]["inference_stats"]["fail"]["count"] == 1
    assert [b["batch_size"] for b in told[0]["batch_stats"]] == [4, 9]
    assert told[0]["batch_stats"][0]["compute_infer"] == {"count": 2, "ns": 22}
    state.set_statistics_source(lambda: None)
    assert state.statistics([entry])[0]["inference_count"] == 4


def test_a_server_whose_workers_are_not_there_is_not_ready(small):
    assert small.state.ready
    small.state.not_ready_reason = lambda: "1 of 2 worker processes answer"
    assert not small.state.ready
    assert small.state.reason == "1 of 2 worker processes answer"
