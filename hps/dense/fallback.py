"""Fallback: a local copy of a remote network runs while the remote one is unavailable."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.dense.base import DenseModel
from hps.errors import DeadlineExceeded, Unavailable

log = logging.getLogger(__name__)
# How long the remote network is skipped after it was unavailable.
_SKIP_S = 1.0


class FallbackModel:
    """Runs ``first``, a remote network, or ``second``, its copy, while that is unavailable or late.

    Thread-safe. ``count`` is called with the number of runs that ``second`` took over."""

    def __init__(self, name: str, first: DenseModel, second: DenseModel) -> None:
        self._name = name
        self._first, self._second = first, second
        self._skipped_until = 0.0
        self._failing = False
        self.takes_device_arrays = first.takes_device_arrays
        self.inputs, self.outputs = second.inputs, second.outputs
        self.count: Callable[[int], None] = lambda runs: None

    def predict(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: tuple[str, ...] | None = None,
        deadline: float | None = None,
    ) -> dict[str, NDArray[Any]]:
        """See ``DenseModel``."""
        started = time.monotonic()
        if started >= self._skipped_until:
            try:
                answer = self._first.predict(inputs, outputs, deadline)
            except (Unavailable, DeadlineExceeded) as error:
                if deadline is not None and started >= deadline:
                    raise  # the deadline had passed before the call
                # A network that is late counts as unavailable.
                self._skipped_until = time.monotonic() + _SKIP_S
                if not self._failing:
                    log.warning(
                        "%s: Triton unavailable; running dense.onnx in this process: %s",
                        self._name,
                        error,
                    )
                self._failing = True
                if deadline is not None and time.monotonic() >= deadline:
                    raise
            else:
                if self._failing:
                    log.info("%s: Triton runs the network again", self._name)
                    self._failing = False
                return answer
        self.count(1)
        on_host = {name: _on_host(array) for name, array in inputs.items()}
        return self._second.predict(on_host, outputs, deadline)

    def runs_inline(self, batch: int) -> bool:
        return False

    def close(self) -> None:
        self._first.close()
        self._second.close()


def _on_host(array: Any) -> NDArray[Any]:
    copy: NDArray[Any] = array if isinstance(array, np.ndarray) else array.get()
    return copy
