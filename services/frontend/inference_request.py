"""An inference request as arrays, independent of the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hps.lookup.base import PreparedSubmit
from hps.node.traffic_split import input_text
from hps.predict.scheduler.scheduled_model import PreparedPrediction
from hps.tracing import RequestContext
from services.frontend.shared_memory_refs import SharedMemoryRefs, Target


class RawTensor(NamedTuple):
    """The position of a tensor's elements in a message, from the request's start of raw tensors."""

    name: str
    dtype: np.dtype[Any]
    elements: int
    offset: int

    @property
    def size(self) -> int:
        """Bytes of the elements."""
        return self.elements * self.dtype.itemsize


@dataclass(slots=True)
class RequestTemplate:
    """A request without its id and its tensors' elements.

    ``shapes`` of all inputs. ``outputs``: requested names; None: all. ``timeout_us`` 0: the server's
    default.
    ``memory_refs``: tensors in shared memory. ``raw``: the tensors whose elements are in the message.
    ``parameters``: all of the request's parameters.

    A ``kept`` template is shared by requests that differ only in their elements. ``prepared`` is then the
    endpoint's prepared form of them, and their batch size; ``prepared_message`` the same for requests that
    are sent on as they are. ``packed``: ``raw`` with the offsets of the elements joined without gaps, made
    when first needed; empty if they are aligned as they are."""

    shapes: dict[str, list[int]] = field(default_factory=dict)
    outputs: tuple[str, ...] | None = None
    timeout_us: int = 0
    top_k: int | None = None
    memory_refs: SharedMemoryRefs | None = None
    kept: bool = False
    raw: list[RawTensor] = field(default_factory=list)
    packed: list[RawTensor] | None = None
    prepared: tuple[PreparedSubmit, int] | None = None
    prepared_message: tuple[PreparedPrediction, int] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


class InferenceRequest:
    """One request. ``inputs`` has each tensor's elements ``(n,)``; ``form`` has the shapes.

    Inputs are flat and aligned, and may be read-only. ``id`` is the client's name for the request, or
    empty. The endpoint sets ``batch``, the number of samples, for statistics. ``origin``: id and trace,
    None
    if neither is needed. ``targets``: outputs to write into shared memory, and their locations.
    ``message``: the bytes that have all inputs as ``form.raw``, from ``start`` on; empty if others have
    some."""

    __slots__ = ("_inputs", "batch", "form", "id", "message", "origin", "start", "targets")

    form: RequestTemplate

    def __init__(
        self,
        form: RequestTemplate,
        inputs: dict[str, NDArray[Any]] | None = None,
        id: str = "",
        *,
        message: bytes = b"",
        start: int = 0,
    ) -> None:
        """``inputs`` None: they are in ``message``."""
        self.form = form
        self._inputs = inputs
        self.id = id
        self.message = message
        self.start = start
        self.batch = 1
        self.origin: RequestContext | None = None
        self.targets: Mapping[str, Target] = {}

    @property
    def inputs(self) -> dict[str, NDArray[Any]]:
        if self._inputs is None:
            raw, tensors = self._aligned()
            self._inputs = {tensor.name: _elements(raw, tensor) for tensor in tensors}
        return self._inputs

    def _aligned(self) -> tuple[bytes, list[RawTensor]]:
        """Return a copy of the elements, which aligns most or all of them, and their places in it."""
        form = self.form
        if form.packed is None:
            form.packed = _packed(form.raw)
        if not form.packed:
            return self.message[self.start :], form.raw
        view = memoryview(self.message)[self.start :]
        pieces = [view[tensor.offset : tensor.offset + tensor.size] for tensor in form.raw]
        return b"".join(pieces), form.packed

    def add(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """Add inputs that the message does not have."""
        self._inputs = {**inputs, **self.inputs}
        self.message = b""

    def first_element(self, name: str) -> str | None:
        """Return an input's first element as text; None if it is empty, unknown or not read yet."""
        if self._inputs is not None:
            return input_text(self._inputs.get(name))
        for tensor in self.form.raw:
            if tensor.name == name and tensor.elements:
                at = self.start + tensor.offset
                return input_text(np.frombuffer(self.message, tensor.dtype, 1, at))
        return None

    @property
    def size(self) -> int:
        """Bytes of the inputs."""
        if self._inputs is None:
            return len(self.message) - self.start
        return sum(array.nbytes for array in self._inputs.values())


def _packed(raw: list[RawTensor]) -> list[RawTensor]:
    """Return the tensors' places without gaps; empty if each has an aligned offset already."""
    if not any(tensor.offset % tensor.dtype.itemsize for tensor in raw):
        return []
    ends = accumulate((tensor.size for tensor in raw), initial=0)
    return [tensor._replace(offset=at) for tensor, at in zip(raw, ends, strict=False)]


def _elements(raw: bytes, tensor: RawTensor) -> NDArray[Any]:
    if not tensor.elements:
        return np.empty(0, tensor.dtype)
    flat = np.frombuffer(raw, tensor.dtype, tensor.elements, tensor.offset)
    return flat if flat.flags.aligned else flat.copy()
