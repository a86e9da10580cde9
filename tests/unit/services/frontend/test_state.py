"""Names that are added, changed and removed while the server runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hps.errors import NotFound
from services.frontend.state import FrontendState
from services.frontend.statistics import Statistics
from tests.unit.services.conftest import serve_models


def test_names_of_unchanged_models_keep_their_statistics(small):
    state, models = small.state, dict(small.node.models)
    before = dict(state.entries)
    models["words"] = replace(models["words"], version=2)
    del models["halves"]
    serve_models(small, models)
    state.serve(small.node)
    assert list(state.entries) == ["ctr", "ctr.lookup", "words", "words.lookup"]
    assert state.entries["ctr"] is before["ctr"]
    assert state.entries["words"] is not before["words"]
    assert state.entry("words", "2").info.version == "2"
    with pytest.raises(NotFound, match="version 1 is not found; version 2 is served"):
        state.entry("words", "1")


def test_watcher_is_called_before_the_server_is_ready(small):
    state, seen = FrontendState(), []
    state.on_models_changed(lambda: seen.append((list(state.entries)[:1], state.ready)))
    state.serve(small.node)
    assert seen == [([], False), (["ctr"], False)]
    assert state.ready


def test_server_without_models_becomes_ready_with_the_first_one(small):
    models = dict(small.node.models)
    serve_models(small, {})
    state = FrontendState()
    state.serve(small.node)
    assert state.phase == "empty"
    serve_models(small, models)
    state.serve(small.node)
    assert state.ready


def test_stopping_server_does_not_become_ready(small):
    small.state.stop()
    small.state.serve(small.node)
    assert not small.state.ready


def test_statistics_include_all_processes(small):
    """Without values of others, or for names that they do not have, this process's own."""
    state, entry = small.state, small.state.entries["words"]
    entry.statistics.succeeded(4, (0, 10, 30, 60))
    other = Statistics()
    other.succeeded(4, (0, 1, 3, 6))
    other.succeeded(9, (0, 1, 3, 6))
    other.failed(0, 5)
    other.add(entry.statistics.numbers())
    assert state.statistics([entry])[0]["inference_count"] == 4
    state.set_statistics_source(lambda: {"words/1": other.numbers(), "ctr/7": other.numbers()})
    reported = state.statistics([entry, state.entries["ctr"]])
    assert [each["inference_count"] for each in reported] == [17, 0]
    assert reported[0]["inference_stats"]["success"] == {"count": 3, "ns": 72}
    assert reported[0]["inference_stats"]["fail"]["count"] == 1
    assert [b["batch_size"] for b in reported[0]["batch_stats"]] == [4, 9]
    assert reported[0]["batch_stats"][0]["compute_infer"] == {"count": 2, "ns": 22}
    state.set_statistics_source(lambda: None)
    assert state.statistics([entry])[0]["inference_count"] == 4


def test_server_is_not_ready_without_its_workers(small):
    assert small.state.ready
    small.state.not_ready_reason = lambda: "1 of 2 worker processes answer"
    assert not small.state.ready
    assert small.state.reason == "1 of 2 worker processes answer"
