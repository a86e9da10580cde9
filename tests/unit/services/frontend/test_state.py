"""Names that come, change and go while the server runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hps.errors import NotFound
from services.frontend.state import State


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
    state, seen = State(), []
    state.watch(lambda: seen.append((list(state.entries)[:1], state.ready)))
    state.serve(small.node)
    assert seen == [([], False), (["ctr"], False)]
    assert state.ready


def test_models_may_come_later(small):
    models = dict(small.node.models)
    small.node.models.clear()
    state = State()
    state.serve(small.node)
    assert state.phase == "empty"
    small.node.models.update(models)
    state.serve(small.node)
    assert state.ready


def test_a_server_that_stops_is_not_made_ready_by_a_model(small):
    small.state.stop()
    small.state.serve(small.node)
    assert not small.state.ready
