"""RemoteNetwork: a network that runs in the node's process, as another process knows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from hps.dense.base import NetworkTensor
from hps.dense.onnx import OnnxModel
from hps.errors import DenseModelError
from hps.lookup.base import LookupModel
from hps.predict.scheduler.columns import ModelColumns, TensorColumn


class RemoteNetwork:
    """A `DenseModel` of names and shapes; all predictions go to the node's batch scheduler."""

    takes_device_arrays = False

    def __init__(self, description: Mapping[str, Any]) -> None:
        """``description``: of `describe_network`."""
        self.inputs = _tensors(description["inputs"])
        self.outputs = _tensors(description["outputs"])
        self.tails = {name: tuple(tail) for name, tail in description["tails"].items()}

    def predict(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: tuple[str, ...] | None = None,
        deadline: float | None = None,
    ) -> dict[str, NDArray[Any]]:
        raise DenseModelError("this process has no network: the node's process runs it")

    def runs_inline(self, batch: int) -> bool:
        return False

    def close(self) -> None: ...


def describe_network(network: OnnxModel) -> dict[str, Any]:
    """Describe a network that was warmed up, as JSON."""
    return {
        "inputs": [(t.name, t.datatype, t.shape) for t in network.inputs],
        "outputs": [(t.name, t.datatype, t.shape) for t in network.outputs],
        "tails": network.tails,
    }


def _tensors(described: list[tuple[str, str, list[int]]]) -> tuple[NetworkTensor, ...]:
    return tuple(NetworkTensor(name, datatype, tuple(shape)) for name, datatype, shape in described)


def columns_of(
    model: LookupModel,
    network: OnnxModel | RemoteNetwork,
    inputs: list[str],
    outputs: list[str],
) -> ModelColumns:
    """Return the columns of a model: ``inputs`` are the dense ones, ``outputs`` those that it serves."""
    tensors = {t.name: t for t in (*network.inputs, *network.outputs)}

    def column(name: str) -> TensorColumn:
        return TensorColumn(name, tensors[name].dtype.str, network.tails[name])

    return ModelColumns(
        tuple(model.features.values()),
        [column(name) for name in inputs],
        [column(name) for name in outputs],
        model.max_batch_size,
    )
