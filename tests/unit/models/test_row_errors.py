"""Errors of narrow rows: measured exactly, in the manifest, of deltas and shared tables too."""

import json

import numpy as np
import pytest

from hps.config.model_schema import ModelSpec
from hps.models.manifest import read_manifest
from hps.models.row_errors import RowErrors, measure_errors
from hps.models.version_writer import write_version
from hps.row_format import row_format
from hps.tiers.stored_rows import to_rows, to_vectors
from hps.types import EmbeddingTable

RANDOM = np.random.default_rng(3)
KEYS = np.arange(1000)


def vectors():
    return RANDOM.normal(size=(1000, 6)).astype(np.float32)


def spec(**table):
    return ModelSpec.model_validate({"name": "m", "tables": [{"name": "t", "dim": 6, **table}]})


def write(root, version, described, rows):
    """Write a version and return the entry of its table."""
    folder = write_version(root, described, version, {"t": rows})
    return read_manifest(folder / "manifest.json").tables["t"]


def expected(rows, exact):
    """Maximum and mean of the values' errors, and the mean of the rows' shares, by definition."""
    table = EmbeddingTable.make("t", 6, rows=rows)
    decoded = to_vectors(table, to_rows(table, exact), dtype=np.float32)
    found = np.abs(decoded.astype(np.float64) - exact)
    shares = np.linalg.norm(found, axis=1) / np.linalg.norm(exact.astype(np.float64), axis=1)
    return found.max(), found.mean(), shares.mean()


def figures(conversion):
    return conversion.max_error, conversion.mean_error, conversion.mean_relative_error


@pytest.mark.parametrize("rows", ["float16", "bfloat16", "float8_e4m3", "int8", "int4"])
def test_manifest_has_the_errors_of_the_rows(tmp_path, rows):
    exact = vectors()
    errors = write(tmp_path, 1, spec(rows=rows), (KEYS, exact)).errors
    assert errors.rows == rows
    assert errors.not_finite_rows == 0
    assert figures(errors) == pytest.approx(expected(rows, exact))


@pytest.mark.parametrize("table", [{}, {"rows": "float32"}, {"dtype": "float16"}])
def test_manifests_that_older_releases_read_are_the_same(tmp_path, table):
    folder = write_version(tmp_path, spec(**table), 1, {"t": (KEYS, vectors())})
    entry = json.loads((folder / "manifest.json").read_text())["tables"]["t"]
    assert set(entry) == {"rows", "dim", "dtype", "key", "emb_vector"}


def test_last_row_of_a_repeated_key_counts(tmp_path):
    keys, exact = np.array([7, 7]), np.array([[1000.0, -1] * 3, [0.5, -0.3] * 3], np.float32)
    errors = write(tmp_path, 1, spec(rows="int8"), (keys, exact)).errors
    assert figures(errors) == pytest.approx(expected("int8", exact[1:]))


def test_shared_table_keeps_its_figures(tmp_path):
    exact = vectors()
    first, second = (write(tmp_path, v, spec(rows="int4"), (KEYS, exact)) for v in (1, 2))
    assert second.origin.version == 1
    assert second.conversion == first.conversion is not None


def test_delta_has_its_own_figures(tmp_path):
    exact = vectors()
    write(tmp_path, 1, spec(rows="int8"), (KEYS, exact))
    changed = exact.copy()
    changed[:20] *= 50
    entry = write(tmp_path, 2, spec(rows="int8"), (KEYS, changed))
    base, delta = expected("int8", exact), expected("int8", changed[:20])
    assert figures(entry.conversion) == pytest.approx(base)
    assert figures(entry.delta.conversion) == pytest.approx(delta)
    assert entry.errors.max_error == pytest.approx(delta[0])
    assert entry.errors.mean_error == pytest.approx((1000 * base[1] + 20 * delta[1]) / 1020)


def test_delta_of_a_table_without_figures_has_none(tmp_path):
    exact = vectors()
    write(tmp_path, 1, spec(), (KEYS, exact))
    exact[3] += 1
    folder = write_version(tmp_path, spec(), 2, {"t": (KEYS, exact)})
    entry = json.loads((folder / "manifest.json").read_text())["tables"]["t"]
    assert "conversion" not in entry
    assert "conversion" not in entry["delta"]


def test_rows_that_overflow_are_counted_and_left_out():
    table = EmbeddingTable.make("t", 2, rows="float16")
    exact = np.array([[1e6, 0], [0.1, 0.2], [np.nan, 0], [0, 0]], np.float32)
    with np.errstate(over="ignore"):
        found = measure_errors(table, exact, to_rows(table, exact))
    assert (found.rows, found.not_finite) == (2, 2)
    assert 0 < found.largest < 1e-3


def test_figures_of_no_rows_are_zero():
    assert figures(RowErrors().conversion(row_format("int8"))) == (0, 0, 0)
