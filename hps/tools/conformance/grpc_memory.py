"""Tensors in memory that a server on this machine and its client share, by Triton's extension."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from contextlib import ExitStack
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from hps.tools.conformance.grpc_wire import GrpcProbe, expect_error, request
from hps.tools.conformance.target import CheckedServer, CheckSuite, NotOffered, require

SUITE = CheckSuite("grpc")


@SUITE.check
def shared_memory(target: CheckedServer) -> None:
    """With system_shared_memory, inputs are taken from a registered region and outputs put there, bit for
    bit; a region that is not registered, or too small, is rejected."""
    sample = target.sample
    sent = request(sample)
    raws = list(sent.raw_input_contents)
    with GrpcProbe(target) as ask, ExitStack() as stack:
        if "system_shared_memory" not in ask.extensions():
            raise NotOffered("system_shared_memory")
        expected = ask.infer(sent)
        name = f"hps_conformance_{secrets.token_hex(8)}"
        size = sum(map(len, raws)) + sum(array.nbytes for array in expected.values())
        memory = _shared(name, size, stack)
        memory[: sum(map(len, raws))] = b"".join(raws)
        del sent.raw_input_contents[:]
        at = _places(name, sent.inputs, map(len, raws), 0)
        ends = _places(name, sent.outputs, (expected[o.name].nbytes for o in sent.outputs), at)
        codes = ("NOT_FOUND", "INVALID_ARGUMENT")
        expect_error(lambda: ask.ask("ModelInfer", sent), *codes, what="an unknown region")
        region = pb.SystemSharedMemoryRegisterRequest(name=name, key=f"/{name}", byte_size=size)
        ask.ask("SystemSharedMemoryRegister", region)
        status = pb.SystemSharedMemoryStatusRequest(name=name)
        region_status = ask.ask("SystemSharedMemoryStatus", status).regions[name]
        require(
            (region_status.key, region_status.byte_size) == (f"/{name}", size), f"{region_status}"
        )
        try:
            answer = ask.ask("ModelInfer", sent)
            require(
                ends == size and not any(answer.raw_output_contents), "outputs are sent as well"
            )
            for output in sent.outputs:
                array = expected[output.name]
                start = output.parameters["shared_memory_offset"].int64_param
                found = bytes(memory[start : start + array.nbytes])
                require(
                    found == array.tobytes(),
                    f"{output.name!r} differs from the output in a message",
                )
            sent.outputs[-1].parameters["shared_memory_offset"].int64_param = size
            expect_error(
                lambda: ask.ask("ModelInfer", sent), *codes, what="an offset beyond the region"
            )
        finally:
            ask.ask(
                "SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name=name)
            )
        require(
            name not in ask.ask("SystemSharedMemoryStatus").regions,
            "the region is still registered",
        )


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
