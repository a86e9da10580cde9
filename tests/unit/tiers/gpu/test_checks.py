"""Errors of the GPU cache for unsuitable arrays; needs no GPU."""

from types import SimpleNamespace

import numpy as np
import pytest

from hps.errors import BadRequest
from hps.tiers.base import Part
from hps.tiers.gpu import checks as gpu_checks
from hps.tiers.gpu.checks import check_array, check_part
from hps.types import EmbeddingTable

TABLE = EmbeddingTable.make("t", 4)


class Array:
    """An array on a device."""

    def __init__(self, values, device=0):
        self.flags, self.shape, self.dtype = values.flags, values.shape, values.dtype
        self.size, self.strides = values.size, values.strides
        self.data = SimpleNamespace(device_id=device)

    def __len__(self):
        return self.shape[0]


@pytest.fixture(autouse=True)
def cupy(monkeypatch):
    module = SimpleNamespace(ndarray=Array, asarray=lambda other: Array(other.values))
    monkeypatch.setattr(gpu_checks, "cupy", lambda: module)


def part(**others):
    given = {
        "keys": np.arange(3),
        "out": Array(np.zeros((3, 4), np.float32)),
        "versions": Array(np.zeros(3, np.uint64)),
        "source": Array(np.zeros(3, np.uint8)),
        "missing": np.arange(3),
    }
    return Part(TABLE, **given | others)


@pytest.mark.parametrize("keys", [np.arange(3), Array(np.arange(3))], ids=["host", "device"])
def test_valid_part_is_accepted(keys):
    check_part(part(keys=keys), 0)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"out": Array(np.zeros((3, 4), np.float32), 1)}, "out is on device 1, the cache on 0"),
        ({"keys": Array(np.arange(3), 1)}, "keys is on device 1, the cache on 0"),
        ({"out": Array(np.zeros((2, 4), np.float32))}, r"\(3, 4\) float32.*got \(2, 4\)"),
        ({"out": Array(np.zeros((3, 4), np.float16))}, "got .* float16"),
        ({"out": Array(np.zeros((3, 8), np.float32)[:, ::2])}, "not C-contiguous"),
        ({"source": Array(np.zeros(3, np.int8))}, "source must be .* uint8"),
        ({"source": Array(np.zeros(6, np.uint8)[::2])}, "source .*not C-contiguous"),
        ({"versions": Array(np.zeros(3, np.uint64), 1)}, "versions is on device 1"),
        ({"keys": np.arange(6)[::2]}, "keys .*not C-contiguous"),
        ({"keys": Array(np.arange(6)[::2])}, "keys .*not C-contiguous"),
        ({"missing": np.arange(6)[::2]}, "missing .*not C-contiguous"),
        ({"out": np.zeros((3, 4), np.float32)}, "out must be on device 0"),
        ({"keys": [1, 2, 3]}, "not an array; convert it"),
        ({"missing": [1]}, "not an array; convert it"),
        ({"missing": np.arange(3, dtype=np.int32)}, "missing must be .* int64"),
    ],
)
def test_invalid_part_is_rejected(others, message):
    with pytest.raises(BadRequest, match=message):
        check_part(part(**others), 0)


def on(device):
    """Arrays of a part on ``device``."""
    return {
        "out": Array(np.zeros((3, 4), np.float32), device),
        "versions": Array(np.zeros(3, np.uint64), device),
        "source": Array(np.zeros(3, np.uint8), device),
    }


def test_arrays_of_a_peer_are_accepted_all_or_none():
    peers = frozenset({1, 2})
    check_part(part(), 0, peers)
    check_part(part(**on(2)), 0, peers)
    check_part(part(**on(2), keys=Array(np.arange(3), 2)), 0, peers)
    with pytest.raises(BadRequest, match="out is on device 3, the cache on 0"):
        check_part(part(**on(3)), 0, peers)
    with pytest.raises(BadRequest, match="out is on device 2, the cache on 0"):
        check_part(part(**on(2)), 0)
    for name in ("versions", "source"):
        with pytest.raises(BadRequest, match=f"{name} is on device 0"):
            check_part(part(**(on(2) | {name: on(0)[name]})), 0, peers)


def test_device_arrays_of_other_libraries_are_used_in_place():
    values = np.arange(3)
    theirs = SimpleNamespace(__cuda_array_interface__={}, values=values)
    assert check_array(TABLE, "keys", theirs, 3, 0).shape == (3,)
    with pytest.raises(BadRequest, match=r"\(4,\) int64"):
        check_array(TABLE, "keys", theirs, 4, 0)
    with pytest.raises(BadRequest, match="not an array; convert it"):
        check_array(TABLE, "keys", [1, 2, 3], 3, 0)
