"""Training that goes on: rows that change are told, defaults stay, new keys get rows in time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from examples.ctr.data import FEATURES, Samples, read_csv, split
from examples.ctr.online import OnlineRows
from examples.ctr.training import DEFAULTS, Trained, train
from tests.unit.examples.test_ctr import write_csv


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> Samples:
    return read_csv(write_csv(tmp_path_factory.mktemp("data") / "ads.csv"))


@pytest.fixture(scope="module")
def base(samples) -> Trained:
    options = replace(DEFAULTS, epochs=2, batch=64, hidden=8, dim=4)
    return train(samples, split(len(samples)), options)


def test_scores_equal_the_base_model_before_training(samples, base):
    found = OnlineRows(base).score(samples)
    np.testing.assert_allclose(found, base.score(samples)["logit"], rtol=0, atol=1e-6)


def test_reported_rows_are_the_changed_ones(samples, base):
    """A copy that gets only the reported rows ends with the same ones."""
    online = OnlineRows(base)
    told = {name: dict[int, list[float]]() for name in FEATURES}
    before = online.score(samples)
    for batch in samples.batches(64):
        for name, (keys, rows) in online.learn(batch).items():
            assert len(np.unique(keys)) == len(keys)
            assert set(keys.tolist()) <= set(batch.keys[name].tolist())
            told[name] |= dict(zip(keys.tolist(), rows.tolist(), strict=True))
    for number, name in enumerate(FEATURES):
        where = base.vocabulary.of_feature(number)
        was = dict(
            zip(base.vocabulary.keys[where].tolist(), base.rows[where].tolist(), strict=True)
        )
        wanted = {
            key: online._rows[place].tolist()
            for key, place in online._places[number].items()
            if online._counts[place] >= base.options.min_count
        }
        assert was | told[name] == wanted
        assert any(was[key] != row for key, row in told[name].items() if key in was)
    defaults = base.vocabulary.first
    np.testing.assert_array_equal(online._rows[defaults], base.rows[defaults])
    loss = [
        np.logaddexp(0, np.where(samples.clicked == 1, -x, x)).mean()
        for x in (before, online.score(samples))
    ]
    assert loss[1] < loss[0]


def test_new_key_gets_a_row_when_seen_twice(samples, base):
    online = OnlineRows(base)
    one = samples.take(np.arange(1))
    strange = Samples(
        {name: keys - 12345 for name, keys in one.keys.items()}, one.inputs, one.clicked
    )
    assert not any(len(keys) for keys, _ in online.learn(strange).values())
    for keys, rows in online.learn(strange).values():
        assert len(keys) == 1
        assert rows.shape == (1, 4)
    assert all(
        keys.tolist() == strange.keys[name].tolist()
        for name, (keys, _) in online.learn(strange).items()
    )
