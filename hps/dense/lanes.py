"""Lanes: a network on a GPU, fed from device memory; only its outputs are copied to the host.

A lane is one session of ONNX Runtime on one stream of one device; the lookup that feeds it uses the same
stream, so nothing waits in between. The tensors of a batch size have fixed addresses (a `LaneBinding`),
bound once: binding 27 inputs takes as long as a small network.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hps.dense.base import NetworkTensor
from hps.dense.onnx import OnnxModel, first_line
from hps.errors import DenseModelError, Unavailable

_ALIGN = 256
_BINDINGS_KEPT = 32
_RECORD_AT = 4
"""Number of the run that is recorded. In the first runs libraries choose kernels and allocate memory."""


class _TensorSlot(NamedTuple):
    """The position of a tensor in its lane's block."""

    tensor: NetworkTensor
    shape: tuple[int, ...]
    start: int
    nbytes: int


class LaneBinding:
    """The network's tensors for one batch size on one lane. Valid while the lane is leased.

    ``feeds`` are the device arrays, by the network's names, to be filled on the lane's stream.
    """

    def __init__(self, lane: NetworkLane, batch: int, names: Sequence[str]) -> None:
        network = lane.network
        sent = [_sized(t, batch, network.tails) for t in network.inputs if t.name in lane.sent]
        fed = [_sized(t, batch, network.tails) for t in network.inputs if t.name not in lane.sent]
        known = {tensor.name: tensor for tensor in network.outputs}
        outputs = [_sized(known[name], batch, network.tails) for name in names]
        self._up, end = _places(sent, 0)
        places, end = _places(fed, end)
        self._out_at = end
        self._down, end = _places(outputs, end)
        block = lane.block(end)
        self._lane = lane
        self._base = address(block)
        self._io = lane.session.io_binding()
        views = {p.tensor.name: _view(block, p) for p in (*self._up, *places, *self._down)}
        for place in (*self._up, *places):
            self._io.bind_input(
                *lane.io_arguments(place.tensor, place.shape, self._base + place.start)
            )
        for place in self._down:
            self._io.bind_output(
                *lane.io_arguments(place.tensor, place.shape, self._base + place.start)
            )
        self.feeds = {p.tensor.name: views[p.tensor.name] for p in places}
        self._options = lane.network.run_options()
        self._runs = 0
        self._recording: Any = None
        self._prepared: Callable[[], None] = self._run

    def start(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """Start the network on ``feeds`` and ``inputs``; returns before the outputs are complete."""
        lane = self._lane
        pinned, copy, stream = lane.pinned, lane.space.copy, lane.stream
        for place in self._up:
            _view(pinned, place)[...] = inputs[place.tensor.name]
        if self._up:
            last = self._up[-1]
            copy(self._base, address(pinned), last.start + last.nbytes, stream)
        self._runs += 1
        if self._runs == _RECORD_AT and lane.network.records:
            # The tensors have fixed addresses, and the session keeps its other memory for runs on this
            # stream, which are one after the other.
            self._recording = lane.space.record(stream, self._run)
        if self._recording is None:
            self._run()
        else:
            self._recording.launch(stream)
        last = self._down[-1]
        at, nbytes = self._out_at, last.start + last.nbytes - self._out_at
        copy(address(pinned) + at, self._base + at, nbytes, stream)

    def _run(self) -> None:
        try:
            self._lane.session.run_with_iobinding(self._io, self._options)
        except Exception as error:
            raise DenseModelError(f"the dense model failed: {first_line(error)}") from error

    def release(self) -> None:
        """Free what refers to this object, so that the session's memory is free immediately."""
        self._io = self._recording = None
        self._prepared = _do_nothing

    # -- for the batch scheduler -------------------------------------------------------------------

    @property
    def lane(self) -> NetworkLane:
        return self._lane

    def host_addresses(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the addresses in pinned memory of the inputs from the host, and of the outputs."""
        pinned = address(self._lane.pinned)
        sent = {p.tensor.name: pinned + p.start for p in self._up}
        return sent, {p.tensor.name: pinned + p.start for p in self._down}

    def prepare(self, assigned: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Prepare runs that first assign ``(to, source)`` device arrays; return the scheduler's steps."""
        space, stream = self._lane.space, self._lane.stream

        def work() -> None:
            for to, source in assigned:
                space.assign(to, source, stream)
            self._run()

        for _ in range(_RECORD_AT - 1):
            work()
        stream.synchronize()
        recording = space.record(stream, work) if self._lane.network.records else None
        self._prepared = work if recording is None else partial(recording.launch, stream)
        return [space.graph_step(recording) if recording else space.call_step(work, stream)]

    def send_steps(self) -> list[Any]:
        """Return the scheduler's steps that copy the inputs from the host."""
        if not self._up:
            return []
        last = self._up[-1]
        size, pinned = last.start + last.nbytes, address(self._lane.pinned)
        return [self._lane.space.copy_step(self._base, pinned, size, inwards=True)]

    def receive_steps(self) -> list[Any]:
        """Return the scheduler's steps that copy the outputs to the host."""
        last, at = self._down[-1], self._out_at
        to, size = address(self._lane.pinned) + at, last.start + last.nbytes - at
        return [self._lane.space.copy_step(self._base + at, to, size, inwards=False)]

    def run_prepared(self) -> None:
        """Run what `prepare` prepared, with the inputs in pinned memory, and wait for the outputs there."""
        lane = self._lane
        pinned, copy, stream = address(lane.pinned), lane.space.copy, lane.stream
        if self._up:
            last = self._up[-1]
            copy(self._base, pinned, last.start + last.nbytes, stream)
        self._prepared()
        last, at = self._down[-1], self._out_at
        copy(pinned + at, self._base + at, last.start + last.nbytes - at, stream)
        stream.synchronize()

    def finish(self) -> dict[str, NDArray[Any]]:
        """Wait for the outputs and return them."""
        self._lane.stream.synchronize()
        return {p.tensor.name: _view(self._lane.pinned, p).copy() for p in self._down}


class NetworkLane:
    """A network's session on one stream. One run at a time.

    ``sent``: the inputs that come from the host; ``kept``: a cache for users of the lane, cleared with
    the bindings if the lane's memory moves."""

    def __init__(self, network: OnnxModel, space: Any, device: int, sent: frozenset[str]) -> None:
        self.network = network
        self.space = space
        self.sent = sent
        self.stream = space.take_stream()
        with space.device:  # ONNX Runtime changes the thread's device
            self.session: Any = network.session_on(device, self.stream.ptr)
        self.kept: dict[Any, Any] = {}
        self.pinned: Any = space.pinned(1 << 16)
        self._block: Any = space.bytes(1 << 16)
        self._device = device
        self._bindings: dict[tuple[int, tuple[str, ...]], LaneBinding] = {}

    def binding_for(self, batch: int, names: tuple[str, ...]) -> LaneBinding:
        """Return the binding for ``batch`` (> 0) samples and the outputs ``names``."""
        binding = self._bindings.get((batch, names))
        if binding is None:
            if len(self._bindings) >= _BINDINGS_KEPT:
                self._forget()
            binding = self._bindings[batch, names] = LaneBinding(self, batch, names)
        return binding

    def block(self, size: int) -> Any:
        """Return the lane's device memory, at least ``size`` bytes; all bindings share it."""
        if size > len(self._block):
            self._forget()
            size = 1 << (size - 1).bit_length()
            self._block, self.pinned = self.space.bytes(size), self.space.pinned(size)
        return self._block

    def io_arguments(
        self, tensor: NetworkTensor, shape: tuple[int, ...], at: int
    ) -> tuple[str, str, int, Any, tuple[int, ...], int]:
        return tensor.name, self.space.kind, self._device, tensor.dtype, shape, at

    def close(self) -> None:
        """Free the lane's memory: its session, and all that is bound to its block. Idempotent."""
        if self.session is None:
            return
        with self.space.device:
            for binding in self._bindings.values():
                binding.release()
            self._forget()
            self.session = self._block = self.pinned = None
        self.space.give_back(self.stream)

    def _forget(self) -> None:
        self._bindings.clear()
        self.kept.clear()


class DeviceLanes:
    """``count`` lanes of a network on one device; further runs wait for a free lane."""

    def __init__(
        self, network: OnnxModel, space: Any, device: int, sent: frozenset[str], count: int
    ) -> None:
        self._count = count
        self.closed = False
        self._free: queue.LifoQueue[NetworkLane | None] = queue.LifoQueue()
        for _ in range(count):
            self._free.put(NetworkLane(network, space, device, sent))

    @contextmanager
    def lease(self) -> Iterator[NetworkLane]:
        """Lease a lane; the last used one if it is free, since its batch sizes are bound.

        Raises Unavailable once the lanes are closed."""
        if self.closed:
            raise Unavailable("the network is closed")
        lane = self._free.get()
        if lane is None:
            self._free.put(None)  # for the next caller that waits
            raise Unavailable("the network is closed")
        try:
            yield lane
        finally:
            self._free.put(lane)

    def close(self) -> None:
        """Free the lanes and their memory, each once its run has ended. Idempotent, for one thread."""
        if self.closed:
            return
        self.closed = True
        lanes = [self._free.get() for _ in range(self._count)]
        self._free.put(None)
        for lane in lanes:
            if lane is not None:
                lane.close()


def _do_nothing() -> None: ...


def address(array: Any) -> int:
    """Return the address of a host or device array."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def _sized(
    tensor: NetworkTensor, batch: int, tails: Mapping[str, tuple[int, ...]]
) -> tuple[NetworkTensor, tuple[int, ...]]:
    return tensor, (batch, *tails[tensor.name])


def _places(
    tensors: Sequence[tuple[NetworkTensor, tuple[int, ...]]], start: int
) -> tuple[list[_TensorSlot], int]:
    """Place tensors one after the other from ``start`` on, aligned; also return the end."""
    places = []
    for tensor, shape in tensors:
        nbytes = int(np.prod(shape)) * tensor.dtype.itemsize
        places.append(_TensorSlot(tensor, shape, start, nbytes))
        start += -(-nbytes // _ALIGN) * _ALIGN
    return places, start


def _view(block: Any, place: _TensorSlot) -> Any:
    raw = block[place.start : place.start + place.nbytes]
    return raw.view(place.tensor.dtype).reshape(place.shape)


__all__ = ["DeviceLanes", "LaneBinding", "NetworkLane", "address"]
