"""Tests of the GPU soak: each kind of wrong row is noticed."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

from benchmarks.gpu_serving import NAMES
from benchmarks.gpu_soak_cache import CacheSoak
from benchmarks.gpu_soak_scene import (
    DIM,
    SENT_KEYS,
    checking_network,
    key_factors,
    marked_rows,
    round_factors,
)
from benchmarks.gpu_soak_server import growth
from hps.tiers.cpu.cache import CpuCache
from hps.types import EmbeddingTable

COUNT = 1 << 12


def cache_soak(*, spoil):
    table = EmbeddingTable.make("soak", DIM)
    cache = CpuCache({table: COUNT * 4 // 5})
    soak = CacheSoak(cache, table, np, COUNT, COUNT // 4, 200_000, spoil=spoil)
    soak.run(60)
    return soak


def test_right_rows_pass():
    soak = cache_soak(spoil=False)
    assert soak.checked >= 200_000
    assert soak.written > 4
    assert soak.wrong == 0


def test_wrong_rows_in_the_cache_are_counted():
    assert cache_soak(spoil=True).wrong > 0


@pytest.fixture(scope="module")
def network():
    return onnxruntime.InferenceSession(checking_network(), providers=["CPUExecutionProvider"])


def checked(network, keys, rows):
    feed = dict(zip(NAMES, rows, strict=True))
    feed |= {
        name: each.astype(np.float32)[:, None] for name, each in zip(SENT_KEYS, keys, strict=True)
    }
    return network.run(["wrong", "rounds"], feed)


def right_rows(keys, number):
    return [
        marked_rows(each, number, (key_factors(i), round_factors())) for i, each in enumerate(keys)
    ]


def some_keys():
    return list(np.random.default_rng(0).integers(1, 30_000, (len(NAMES), 4)))


@pytest.mark.parametrize("number", [1, 4000])
def test_network_accepts_right_rows_exactly(network, number):
    keys = some_keys()
    wrong, rounds = checked(network, keys, right_rows(keys, number))
    assert wrong.tobytes() == bytes(16)
    assert (rounds == number).all()


def other_key(rows):
    rows[3][1] = marked_rows(np.array([7]), 5, (key_factors(3), round_factors()))[0]


def other_table(rows):
    rows[3] = rows[4]


def torn(rows):
    later = right_rows(some_keys(), 6)
    rows[3][1, DIM // 2 :] = later[3][1, DIM // 2 :]


def default_vector(rows):
    rows[3][1] = 0


def not_a_number(rows):
    rows[3][1, -1] = np.nan


@pytest.mark.parametrize("fault", [other_key, other_table, torn, default_vector, not_a_number])
def test_network_notices_wrong_rows(network, fault):
    keys = some_keys()
    rows = right_rows(keys, 5)
    fault(rows)
    wrong, _ = checked(network, keys, rows)
    assert wrong[1].tobytes() != bytes(4)


def test_growth_is_counted_after_the_warm_up():
    assert growth([0, 50, 90, 100, 100, 100, 100, 100, 103, 100]) == 3
    assert growth([]) == 0
