"""Triton's tensors as arrays and back: NumPy on the host, DLPack on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.loader import cupy
from hps.errors import ConfigError, Unsupported
from services.frontend.endpoints import Output


class TensorPlacement:
    """Placement of an instance's tensors. Keys are always copied to the host, where rows are looked up.

    An instance on a GPU answers with tensors in that GPU's memory, which a network there reads directly;
    all tensors of an answer are copied once, on one stream."""

    def __init__(self, tensor: Any, instance_kind: str, device: str | int) -> None:
        """``tensor``: the python backend's class. Raises ConfigError for an unsupported kind."""
        self._tensor = tensor
        self._device: int | None = None
        kind = instance_kind.upper().removeprefix("KIND_")
        if kind in ("CPU", "AUTO"):
            return
        if kind != "GPU":
            raise ConfigError(f"instances are KIND_CPU or KIND_GPU here, not {instance_kind}")
        try:
            cupy()
        except Unsupported as error:
            raise ConfigError(
                f"an instance of KIND_GPU: {error}; or set instance_group [ {{ kind: KIND_CPU }} ]"
            ) from None
        self._device = int(device)

    def array(self, tensor: Any) -> NDArray[Any]:
        """Return the elements of a request's tensor."""
        if tensor.is_cpu():
            found: NDArray[Any] = tensor.as_numpy()
        else:
            found = cupy().from_dlpack(tensor).get()
        return found

    def tensors(self, outputs: Sequence[Output]) -> list[Any]:
        """Make an answer's tensors. Those without elements stay on the host, since they have no address."""
        if self._device is None:
            return [self._tensor(name, array) for name, array in outputs]
        module = cupy()
        made = []
        with module.cuda.Device(self._device):
            for name, array in outputs:
                if array.size:
                    copied = module.asarray(np.ascontiguousarray(array))
                    made.append(self._tensor.from_dlpack(name, copied))
                else:
                    made.append(self._tensor(name, array))
            module.cuda.get_current_stream().synchronize()
        return made
