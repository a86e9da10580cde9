"""Checks over gRPC: what a server must answer, and what it must reject."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import service_pb2 as pb

from hps.tools.conformance.grpc_wire import (
    TIMEOUT_S,
    GrpcProbe,
    expect_error,
    is_raw,
    request,
    skip_unimplemented,
    tensors_of,
)
from hps.tools.conformance.target import (
    CheckedServer,
    CheckSuite,
    NotOffered,
    needs,
    note,
    require,
    same,
    settled,
    steady,
    unknown_version,
)

SUITE = CheckSuite("grpc", GrpcProbe)
SERVICE = "inference.GRPCInferenceService"
_SERVING = health_pb2.HealthCheckResponse.SERVING


@SUITE.check
def health(target: CheckedServer, ask: GrpcProbe) -> None:
    """ServerLive, ServerReady and ModelReady are true, for unknown models and versions false."""
    model = target.sample.model
    require(ask.ask("ServerLive").live and ask.ask("ServerReady").ready, "not ready")
    versions = list(ask.ask("ModelMetadata", pb.ModelMetadataRequest(name=model)).versions)
    for version in ("", *versions[:1]):
        ready = pb.ModelReadyRequest(name=model, version=version)
        require(ask.ask("ModelReady", ready).ready, f"version {version!r} is not ready")
    for name, version in (("none", ""), (model, unknown_version(versions))):
        ready = pb.ModelReadyRequest(name=name, version=version)
        try:
            found = ask.ask("ModelReady", ready).ready
        except grpc.RpcError as error:
            require(error.code() is grpc.StatusCode.NOT_FOUND, f"{error.code()}")
        else:
            require(not found, f"{name} {version} is ready")


@SUITE.check
def health_service(_target: CheckedServer, ask: GrpcProbe) -> None:
    """grpc.health.v1.Health/Check returns SERVING for the server and the service, NOT_FOUND for others."""
    stub = health_pb2_grpc.HealthStub(ask.channel)
    for name in ("", SERVICE):
        asked = health_pb2.HealthCheckRequest(service=name)
        with skip_unimplemented("grpc.health.v1"):
            status = stub.Check(asked, timeout=TIMEOUT_S, metadata=ask.metadata)
        require(status.status == _SERVING, f"{name!r}: {status}")
    other = health_pb2.HealthCheckRequest(service="none")
    expect_error(lambda: stub.Check(other, timeout=TIMEOUT_S, metadata=ask.metadata), "NOT_FOUND")


@SUITE.check
def health_watch(_target: CheckedServer, ask: GrpcProbe) -> None:
    """grpc.health.v1.Health/Watch reports the state immediately, and stays open."""
    stub = health_pb2_grpc.HealthStub(ask.channel)
    watch = stub.Watch(
        health_pb2.HealthCheckRequest(service=""), timeout=TIMEOUT_S, metadata=ask.metadata
    )
    try:
        with skip_unimplemented("grpc.health.v1"):
            require(next(watch).status == _SERVING, "not SERVING")
        require(watch.is_active(), "the watch ended")
    except grpc.RpcError as error:
        require(False, f"{error.code()}: {error.details()}")
    finally:
        watch.cancel()


@SUITE.check
def reflection(target: CheckedServer, ask: GrpcProbe) -> None:
    """Server reflection lists the service and has its description, as grpcurl asks for it."""
    wanted = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    stub = reflection_pb2_grpc.ServerReflectionStub(ask.channel)
    try:
        with skip_unimplemented("grpc.reflection"):
            listed, described = stub.ServerReflectionInfo(
                iter(wanted), timeout=TIMEOUT_S, metadata=ask.metadata
            )
    except grpc.RpcError as error:
        require(False, f"{error.code()}: {error.details()}")
    names = {service.name for service in listed.list_services_response.service}
    require(names >= {SERVICE, "grpc.health.v1.Health"}, f"services {names}")
    require(described.file_descriptor_response.file_descriptor_proto, "no description")


@SUITE.check
def metadata_and_configuration(target: CheckedServer, ask: GrpcProbe) -> None:
    """ServerMetadata, ModelMetadata and ModelConfig describe a request's tensors."""
    extensions = ask.extensions()
    for sample in target.samples:
        about = ask.ask("ModelMetadata", pb.ModelMetadataRequest(name=sample.model))
        require(about.name == sample.model, about.name)
        inputs = {tensor.name: tensor for tensor in about.inputs}
        for name, array in sample.inputs.items():
            has = (inputs[name].datatype, len(inputs[name].shape))
            require(has == (sample.datatype(name), array.ndim), f"{name!r} is {has}")
        if "model_configuration" not in extensions:
            continue
        config = ask.ask("ModelConfig", pb.ModelConfigRequest(name=sample.model)).config
        require(config.name == sample.model, config.name)
        configured = {tensor.name for tensor in config.input}
        require(configured >= set(sample.inputs), f"configured inputs {configured}")


@SUITE.check
def equivalent_forms(target: CheckedServer, ask: GrpcProbe) -> None:
    """Raw contents and protobuf's types get the same answer to the bit, always raw from a server that
    names binary_tensor_data; an id comes back."""
    raw = "binary_tensor_data" in ask.extensions()
    for sample in target.samples:
        answer = ask.ask("ModelInfer", request(sample, id="r-7"))
        require((answer.id, answer.model_name) == ("r-7", sample.model), f"{answer.id}")
        note(is_raw(answer) or not raw, "outputs are not raw")
        expected = ask.infer(request(sample))
        require(set(expected) == set(sample.outputs), f"outputs {list(expected)}")
        if "FP16" not in map(sample.datatype, sample.inputs):
            typed = ask.ask("ModelInfer", request(sample, raw=False))
            note(is_raw(typed) or not raw, "outputs are not raw where inputs are not")
            same(tensors_of(typed), expected, "typed contents")
        versioned = ask.infer(request(sample, model_version=answer.model_version))
        same(versioned, expected, f"version {answer.model_version}")
        turned = replace(sample, outputs=sample.outputs[::-1])
        same(ask.infer(request(turned)), {n: expected[n] for n in turned.outputs}, "turned")


@SUITE.check
def compression(target: CheckedServer, ask: GrpcProbe) -> None:
    """Calls may be compressed with gzip or deflate."""
    expected = ask.infer(request(target.sample))
    for coding in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        same(ask.infer(request(target.sample), compression=coding), expected, str(coding))


@SUITE.check
def empty_tensors(target: CheckedServer, ask: GrpcProbe) -> None:
    """A tensor without elements is an empty piece of bytes."""
    for sample in target.samples:
        about = ask.ask("ModelMetadata", pb.ModelMetadataRequest(name=sample.model))
        for tensor in about.inputs:
            array = sample.inputs.get(tensor.name)
            if array is not None and array.ndim > 1 and tensor.shape[-1] == -1:
                none = {**sample.inputs, tensor.name: array[..., :0]}
                ask.infer(request(replace(sample, inputs=none)))
                return
    raise NotOffered("an input with a variable dimension")


@SUITE.check
def unknown_names(target: CheckedServer, ask: GrpcProbe) -> None:
    """An unknown model or version is NOT_FOUND, unknown inputs and outputs are INVALID_ARGUMENT."""
    sample = target.sample

    def fails(code: str, changed: Any = sample, **fields: Any) -> str:
        return expect_error(lambda: ask.infer(request(changed, **fields)), *code.split())

    fails("NOT_FOUND", replace(sample, model="none"))
    fails("NOT_FOUND UNAVAILABLE INVALID_ARGUMENT", model_version="77")
    extensions = ask.extensions()
    for call, extension in (
        ("ModelMetadata", None),
        ("ModelConfig", "model_configuration"),
        ("ModelStatistics", "statistics"),
    ):
        if extension is not None and extension not in extensions:
            continue
        none = getattr(pb, f"{call}Request")(name="none")
        expect_error(partial(ask.ask, call, none), "NOT_FOUND")
    more = {**sample.inputs, "more": np.zeros((1, 1), np.int64)}
    note("more" in fails("INVALID_ARGUMENT", replace(sample, inputs=more)), "no name")
    note("none" in fails("INVALID_ARGUMENT", replace(sample, outputs=("none",))), "no name")
    ask.infer(request(sample))


@SUITE.check
def wrong_tensors(target: CheckedServer, ask: GrpcProbe) -> None:
    """Tensors that do not match the model, and raw together with typed contents, are INVALID_ARGUMENT."""
    sample = target.sample
    name, array = next(iter(sample.inputs.items()))

    def fails(made: Any, what: str) -> None:
        expect_error(lambda: ask.infer(made), "INVALID_ARGUMENT", what=what)

    for other in (array.astype(np.float64), np.full(array.shape, b"x", np.object_)):
        wrong = request(replace(sample, inputs={**sample.inputs, name: other}))
        fails(wrong, f"{other.dtype} for {array.dtype}")
    made = request(sample)
    made.inputs[0].datatype = "INT63"
    fails(made, "a datatype that does not exist")
    for change in (1, -1):
        made = request(sample)
        made.inputs[0].shape[0] += change
        fails(made, "a shape that the bytes do not fill")
    made = request(sample)
    made.raw_input_contents[0] += b"x"
    fails(made, "a byte too many")
    made = request(sample)
    del made.raw_input_contents[-1]
    fails(made, "raw contents for some inputs")
    made = request(sample)
    made.raw_input_contents.append(b"12345678")
    fails(made, "more raw contents than inputs")
    made = request(sample)
    made.inputs[0].contents.int64_contents.extend([1])
    fails(made, "raw and typed contents")
    ask.infer(request(sample))


@SUITE.check
def streams(target: CheckedServer, ask: GrpcProbe) -> None:
    """ModelStreamInfer answers requests in their order; an error is a message, and the stream continues."""
    sample = target.sample
    wrong = request(replace(sample, model="none"), id="b")
    sent = [request(sample, id="a"), wrong, request(sample, id="c")]
    with skip_unimplemented("ModelStreamInfer"):
        answers = ask.stream(sent)
    results = [(each.error_message != "", each.infer_response.id) for each in answers]
    require([error for error, _ in results] == [False, True, False], f"{results}")
    require((results[0][1], results[2][1]) == ("a", "c"), f"{results}")


@SUITE.check
def statistics(target: CheckedServer, ask: GrpcProbe) -> None:
    """ModelStatistics counts the requests and their samples."""
    model, batch = target.sample.model, len(next(iter(target.sample.inputs.values())))
    needs("statistics" in ask.extensions(), "statistics")

    def read() -> tuple[int, int]:
        (stats,) = ask.ask("ModelStatistics", pb.ModelStatisticsRequest(name=model)).model_stats
        return stats.inference_stats.success.count, stats.inference_count

    before = steady(read)
    for _ in range(3):
        ask.infer(request(target.sample))
    after = settled(read, lambda now: now[0] >= before[0] + 3)
    grown = (after[0] - before[0], after[1] - before[1])
    require(grown == (3, 3 * batch), f"3 × {batch} inferences, counted {grown}")


@SUITE.changing
def repository(target: CheckedServer, ask: GrpcProbe) -> None:
    """RepositoryIndex lists the models; a server with model_repository unloads and loads them; without it
    these calls are UNIMPLEMENTED."""
    sample = target.samples[-1]
    for ready in (False, True):
        index = ask.ask("RepositoryIndex", pb.RepositoryIndexRequest(ready=ready)).models
        states = {row.name: row.state for row in index}
        require(states.get(sample.model) == "READY", f"{states}")
    unload = pb.RepositoryModelUnloadRequest(model_name=sample.model)
    load = pb.RepositoryModelLoadRequest(model_name=sample.model)
    if "model_repository" not in ask.extensions():
        expect_error(lambda: ask.ask("RepositoryModelUnload", unload), "UNIMPLEMENTED")
        expect_error(lambda: ask.ask("RepositoryModelLoad", load), "UNIMPLEMENTED")
        raise NotOffered("model_repository")
    expected = ask.infer(request(sample))
    ask.ask("RepositoryModelUnload", unload)
    expect_error(lambda: ask.infer(request(sample)), "NOT_FOUND", "UNAVAILABLE")
    ask.ask("RepositoryModelLoad", load)
    same(ask.infer(request(sample)), expected, "loaded again")


@SUITE.check
def unoffered_extensions(_target: CheckedServer, ask: GrpcProbe) -> None:
    """Calls of extensions that are not named are UNIMPLEMENTED."""
    calls = {
        "system_shared_memory": "SystemSharedMemoryStatus",
        "cuda_shared_memory": "CudaSharedMemoryStatus",
        "trace": "TraceSetting",
        "logging": "LogSettings",
    }
    offered = ask.extensions()
    for extension, call in calls.items():
        if extension in offered:
            ask.ask(call)
        else:
            expect_error(partial(ask.ask, call), "UNIMPLEMENTED")
