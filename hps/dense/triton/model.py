"""TritonModel: a network that a Triton server runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.backoff import Backoff
from hps.dense.base import DenseModel, NetworkTensor
from hps.dense.triton.shared_regions import ThreadRegions
from hps.dense.triton.transport import TritonTransport, TritonUnavailable
from hps.errors import DeadlineExceeded, ModelError, NotFound, Unavailable
from hps.tracing import current_context

log = logging.getLogger(__name__)
_BACKOFF = Backoff(0.02, 30.0, factor=4)
_DESCRIBE_S = 2.0


@dataclass(frozen=True, slots=True)
class TritonRunOptions:
    """Options of a network's runs.

    ``timeout_s`` bounds a run that has no earlier deadline. A run that fails with `TritonUnavailable` is
    retried up to ``retries`` times within that time, since it has no side effects; other errors are not
    retried. Tensors are passed in shared memory if there are ``regions``."""

    timeout_s: float
    retries: int = 0
    regions: ThreadRegions | None = None


class TritonModel:
    """The network ``name`` of the Triton at ``url``. Thread-safe.

    If Triton is unreachable at the start, its description is read before the first run; until then
    ``expected`` (inputs, outputs) is used."""

    def __init__(
        self,
        name: str,
        url: str,
        transport: TritonTransport,
        expected: tuple[Sequence[NetworkTensor], Sequence[NetworkTensor]],
        options: TritonRunOptions,
        check: Callable[[DenseModel], object] = lambda model: None,
    ) -> None:
        """``check`` raises ModelError if Triton's network is not the expected one. Raises ModelError if
        Triton answers and does not have the model, or has another one."""
        self._name, self._url = name, url
        self._transport = transport
        self._timeout_s = options.timeout_s
        self._retries = options.retries
        self._regions = options.regions
        self.takes_device_arrays = self._regions is not None and self._regions.on_device
        self._check = check
        self._lock = threading.Lock()
        self.inputs, self.outputs = map(tuple, expected)
        self._max_batch = 0
        self._known = False
        try:
            self._read_description(time.monotonic() + _DESCRIBE_S)
        except (TritonUnavailable, DeadlineExceeded) as error:
            log.warning(
                "%s: Triton at %s is unreachable; requests will try again: %s", name, url, error
            )
        except BaseException:
            self.close()
            raise

    def predict(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: tuple[str, ...] | None = None,
        deadline: float | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Run the network; see ``DenseModel``.

        Raises Unavailable if Triton is unreachable or does not serve the expected model, and
        DeadlineExceeded."""
        until = time.monotonic() + self._timeout_s
        if deadline is not None:
            until = min(until, deadline)
        names = tuple(tensor.name for tensor in self.outputs) if outputs is None else outputs
        for attempt in range(self._retries + 1):
            try:
                if not self._known:
                    self._read_description(until)
                with _infer_span():
                    return self._run(inputs, names, until)
            except ModelError as error:
                # Unavailable, not ModelError: Triton may serve the expected model again while this process
                # runs.
                raise Unavailable(f"{error}; retry later") from None
            except TritonUnavailable as error:
                wait = _BACKOFF.pause_s(attempt + 1)
                if attempt == self._retries or time.monotonic() + wait >= until:
                    raise Unavailable(
                        f"Triton at {self._url}, which runs the dense model {self._name!r}, is not "
                        f"available: {error}; retry later"
                    ) from None
                time.sleep(wait)
        raise AssertionError("the last attempt answers or raises")

    def runs_inline(self, batch: int) -> bool:
        return False

    def close(self) -> None:
        if self._regions is not None:
            self._regions.close(self._transport)
        self._transport.close()

    def _read_description(self, until: float) -> None:
        if not self._lock.acquire(timeout=_left(until)):
            raise DeadlineExceeded(
                "deadline exceeded while reading the model's description from Triton"
            )
        try:
            if self._known:
                return
            try:
                described = self._transport.describe(_left(until))
            except NotFound as error:
                raise ModelError(
                    f"Triton at {self._url} does not serve {self._name!r} ({error}); `hps triton export` "
                    "writes a model repository that has it, dense.triton.models names another"
                ) from None
            self.inputs, self.outputs = described.inputs, described.outputs
            self._max_batch = described.max_batch
            self._check(self)
            self._known = True
            log.info("%s: served by Triton at %s", self._name, self._url)
        finally:
            self._lock.release()

    def _run(
        self, inputs: Mapping[str, NDArray[Any]], names: tuple[str, ...], until: float
    ) -> dict[str, NDArray[Any]]:
        batch = len(next(iter(inputs.values()))) if inputs else 0
        step = self._max_batch or batch
        if batch <= step:
            return self._once(inputs, names, until)
        parts = []
        for start in range(0, batch, step):
            some = {name: array[start : start + step] for name, array in inputs.items()}
            parts.append(self._once(some, names, until))
        return {name: np.concatenate([part[name] for part in parts]) for name in names}

    def _once(
        self, inputs: Mapping[str, NDArray[Any]], names: tuple[str, ...], until: float
    ) -> dict[str, NDArray[Any]]:
        # float16 vectors are widened for a network that takes float32.
        sent = [
            (t.name, t.datatype, inputs[t.name].astype(t.dtype, copy=False)) for t in self.inputs
        ]
        if self._regions is None:
            return self._transport.infer(sent, names, _left(until))
        wanted = [tensor for tensor in self.outputs if tensor.name in names]
        return self._regions.infer(self._transport, sent, wanted, lambda: _left(until))


def _infer_span() -> AbstractContextManager[object]:
    context = current_context()
    return nullcontext() if context is None else context.part("triton_infer")


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("deadline exceeded before Triton responded")
    return left
