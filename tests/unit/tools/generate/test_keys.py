"""Distributions of row numbers."""

from __future__ import annotations

import numpy as np
import pytest

from hps.errors import ConfigError
from hps.tools.generate.keys import distribution


def drawn(text, rows=1000, n=100_000, seed=1):
    return distribution(text, rows)(np.random.default_rng(seed), n)


@pytest.mark.parametrize("text", ["uniform", "zipf:0.85", "zipf:1", "zipf", "hot:0.2,0.8"])
@pytest.mark.parametrize("rows", [1, 2, 1000, 3 * 10**9])
def test_drawn_numbers_are_row_numbers(text, rows):
    numbers = drawn(text, rows, 2000)
    assert numbers.dtype == np.int64
    assert 0 <= numbers.min() <= numbers.max() < rows
    np.testing.assert_array_equal(numbers, drawn(text, rows, 2000))


@pytest.mark.parametrize("s", [0.85, 1.0, 1.2])
def test_zipf(s):
    counts = np.sort(np.bincount(drawn(f"zipf:{s}"), minlength=1000))[::-1] / 100_000
    # Bounded Pareto: what falls between k and k + 1.
    edges = np.arange(1, 1002, dtype=float)
    mass = np.log(edges) if s == 1 else edges ** (1 - s)
    expected = np.diff(mass) / (mass[-1] - mass[0])
    np.testing.assert_allclose(counts[:50].sum(), expected[:50].sum(), atol=0.01)
    np.testing.assert_allclose(counts[0], expected[0], atol=0.01)


def test_hot_rows():
    counts = np.sort(np.bincount(drawn("hot:0.1,0.9"), minlength=1000))[::-1]
    assert counts[:100].sum() / counts.sum() == pytest.approx(0.9, abs=0.01)
    assert (drawn("hot:1,0.5") >= 0).all()


def test_hot_rows_are_not_neighbours():
    hot = np.argsort(np.bincount(drawn("hot:0.1,0.9"), minlength=1000))[-100:]
    assert np.diff(np.sort(hot)).max() > 5


def test_trace_is_repeated_at_its_end(tmp_path):
    path = tmp_path / "trace.npy"
    np.save(path, np.array([5, 3, 9]))
    draw = distribution(f"trace:{path}", 10)
    random = np.random.default_rng(1)
    assert draw(random, 2).tolist() == [5, 3]
    assert draw(random, 4).tolist() == [9, 5, 3, 9]
    with pytest.raises(ConfigError, match="row numbers from 3 to 9, the table has 9 rows"):
        distribution(f"trace:{path}", 9)(random, 3)
    np.save(path, np.zeros((2, 2)))
    with pytest.raises(ConfigError, match=r"expected integers \(n,\), found float64 \(2, 2\)"):
        distribution(f"trace:{path}", 9)


@pytest.mark.parametrize(
    "text",
    ["", "normal", "zipf:x", "zipf:0", "hot:0.2", "hot:2,1", "trace:", "trace:/none", "uniform:1"],
)
def test_invalid_distributions_are_rejected(text):
    with pytest.raises(ConfigError, match="distribution of keys"):
        distribution(text, 10)


def test_table_without_rows_is_rejected():
    with pytest.raises(ConfigError, match="without rows"):
        distribution("uniform", 0)
