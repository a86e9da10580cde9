"""Tensors in memory that a server on this machine and its client share, by Triton's extension."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from hps.tools.conformance.grpc_wire import GrpcProbe, expect_error, request
from hps.tools.conformance.target import CheckedServer, CheckSuite, needs, require

SUITE = CheckSuite("grpc", GrpcProbe)


@SUITE.check
def shared_memory(target: CheckedServer, ask: GrpcProbe) -> None:
    """With system_shared_memory, inputs are taken from a registered region and outputs put there, bit for
    bit; a region that is not registered, or too small, is rejected."""
    sent = request(target.sample)
    raws = list(sent.raw_input_contents)
    inputs = b"".join(raws)
    needs("system_shared_memory" in ask.extensions(), "system_shared_memory")
    with ExitStack() as stack:
        expected = ask.infer(sent)
        name = f"hps_conformance_{secrets.token_hex(8)}"
        size = len(inputs) + sum(array.nbytes for array in expected.values())
        memory = _shared(name, size, stack)
        memory[: len(inputs)] = inputs
        del sent.raw_input_contents[:]
        start = _places(name, sent.inputs, map(len, raws), 0)
        end = _places(name, sent.outputs, (expected[o.name].nbytes for o in sent.outputs), start)
        _expect_rejected(ask, sent, "an unknown region")
        with _registered(ask, name, size):
            answer = ask.ask("ModelInfer", sent)
            require(end == size and not any(answer.raw_output_contents), "outputs are sent as well")
            for output in sent.outputs:
                array = expected[output.name]
                start = output.parameters["shared_memory_offset"].int64_param
                require(
                    bytes(memory[start : start + array.nbytes]) == array.tobytes(),
                    f"{output.name!r} differs from the output in a message",
                )
            sent.outputs[-1].parameters["shared_memory_offset"].int64_param = size
            _expect_rejected(ask, sent, "an offset beyond the region")


@contextmanager
def _registered(ask: GrpcProbe, name: str, size: int) -> Iterator[None]:
    """Register a region for the block; check what the server reports of it then and afterwards."""
    key = f"/{name}"
    region = pb.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=size)
    ask.ask("SystemSharedMemoryRegister", region)
    status = pb.SystemSharedMemoryStatusRequest(name=name)
    reported = ask.ask("SystemSharedMemoryStatus", status).regions[name]
    require((reported.key, reported.byte_size) == (key, size), f"{reported}")
    try:
        yield
    finally:
        ask.ask("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name=name))
    require(
        name not in ask.ask("SystemSharedMemoryStatus").regions, "the region is still registered"
    )


def _expect_rejected(ask: GrpcProbe, sent: pb.ModelInferRequest, what: str) -> None:
    codes = ("NOT_FOUND", "INVALID_ARGUMENT")
    expect_error(lambda: ask.ask("ModelInfer", sent), *codes, what=what)


def _shared(name: str, size: int, stack: ExitStack) -> memoryview:
    """Create shared memory, which exists until ``stack`` ends."""
    memory = SharedMemory(name, create=True, size=size)
    stack.callback(memory.unlink)
    stack.callback(memory.close)
    assert memory.buf is not None
    return memory.buf


def _places(region: str, tensors: Any, sizes: Iterable[int], at: int) -> int:
    """Place ``tensors`` one after another in ``region`` from ``at``; return the end of the last."""
    for tensor, size in zip(tensors, sizes, strict=True):
        tensor.parameters["shared_memory_region"].string_param = region
        tensor.parameters["shared_memory_byte_size"].int64_param = size
        tensor.parameters["shared_memory_offset"].int64_param = at
        at += size
    return at
