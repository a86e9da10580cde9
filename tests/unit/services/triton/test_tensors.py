"""Tests of tensor placement: on the host, and on a twin of a GPU."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from hps.cuda.loader import cupy, missing_requirement
from hps.errors import ConfigError
from services.triton.tensors import TensorPlacement


class Tensor:
    """As the python backend's."""

    def __init__(self, name, array, *, there=False):
        self.name, self.array, self.there = name, array, there

    @staticmethod
    def from_dlpack(name, array):
        return Tensor(name, np.from_dlpack(array), there=True)

    def is_cpu(self):
        return not self.there

    def as_numpy(self):
        assert not self.there
        return self.array

    def __dlpack__(self, **_):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Device(np.ndarray):
    """An array of the twin."""

    def get(self):
        return np.asarray(self)


@pytest.fixture
def gpu(monkeypatch):
    """CuPy without a device; ``used``: devices and streams in their order."""
    used = []

    @contextmanager
    def device(number):
        used.append(number)
        yield

    stream = SimpleNamespace(synchronize=lambda: used.append("synchronized"))
    module = SimpleNamespace(
        cuda=SimpleNamespace(Device=device, get_current_stream=lambda: stream),
        asarray=lambda array: np.array(array).view(Device),
        from_dlpack=lambda tensor: np.from_dlpack(tensor).view(Device),
    )
    monkeypatch.setattr("services.triton.tensors.cupy", lambda: module)
    return used


def test_tensors_on_the_host():
    place = TensorPlacement(Tensor, "CPU", "0")
    keys = np.arange(3)
    assert place.array(Tensor("k", keys)) is keys
    (made,) = place.tensors([("f", keys)])
    assert (made.name, made.array is keys, made.there) == ("f", True, False)


def test_tensors_on_a_gpu(gpu):
    place = TensorPlacement(Tensor, "KIND_GPU", "2")
    keys = np.arange(3)
    assert place.array(Tensor("k", keys, there=True)).tolist() == [0, 1, 2]
    assert place.array(Tensor("k", keys)) is keys
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)[:, ::-1]
    vectors, none = place.tensors([("f", rows), ("g", rows[:0])])
    assert (vectors.there, none.there) == (True, False)
    assert vectors.array.tolist() == rows.tolist()
    assert gpu == [2, "synchronized"]


def test_unsupported_instance_kinds_are_rejected():
    with pytest.raises(ConfigError, match="KIND_CPU or KIND_GPU here, not MODEL"):
        TensorPlacement(Tensor, "MODEL", "0")
    if missing_requirement():
        with pytest.raises(ConfigError, match=r"an instance of KIND_GPU: .* kind: KIND_CPU"):
            TensorPlacement(Tensor, "GPU", "0")


@pytest.mark.gpu
def test_tensors_on_a_real_gpu():
    """Vectors that an answer has there are the very memory that the next network is given."""
    module = cupy()

    class There(Tensor):
        @staticmethod
        def from_dlpack(name, array):
            return There(name, module.from_dlpack(array), there=True)

    place = TensorPlacement(There, "GPU", "0")
    keys = module.arange(5)
    assert place.array(There("k", keys, there=True)).tolist() == [0, 1, 2, 3, 4]
    rows = np.random.default_rng(1).standard_normal((5, 3)).astype(np.float32)
    (made,) = place.tensors([("f", rows)])
    taken = module.from_dlpack(made)
    assert taken.data.ptr == made.array.data.ptr
    assert taken.get().tobytes() == rows.tobytes()
