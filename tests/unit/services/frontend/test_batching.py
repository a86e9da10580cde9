"""Dynamic batching of predictions and lookups."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hps.config import Settings
from hps.config.admission_settings import BatchingSettings
from hps.config.server_settings import ServerSettings
from hps.errors import BadRequest
from hps.observability import metric_names as m
from hps.observability import otel
from hps.tracing import RequestContext, set_recorder
from services.frontend.inference_request import InferenceRequest, RequestTemplate
from services.frontend.lookup_endpoint import LookupEndpoint
from services.frontend.state import FrontendState
from tests.support.waiting import until

FAR = 1e12


@pytest.fixture
def batched(small):
    """``batched(**settings)``: the small node's endpoints with dynamic batching."""

    def make(**settings):
        batching = BatchingSettings(**{"at_once": 1, **settings})
        state = FrontendState(settings=Settings(server=ServerSettings(batching=batching)))
        state.serve(small.node)
        return {name: entry.endpoint for name, entry in state.entries.items()}

    return make


def call(items, *, users=None, top_k=None, outputs=None, offsets=None):
    n = len(items)
    users = [5] * n if users is None else users
    inputs = {
        "user": np.array(users, np.int64),
        "item": np.array(items, np.int64),
        "history": np.repeat(np.array(items, np.int64), 2),
        "dense": np.linspace(0, 1, 3 * n, dtype=np.float32),
    }
    shapes = {"user": [len(users), 1], "item": [n, 1], "history": [n, 2], "dense": [n, 3]}
    if offsets is not None:
        inputs["history.offsets"] = np.array(offsets, np.int64)
        shapes |= {"history": [2 * n], "history.offsets": [len(offsets)]}
    return InferenceRequest(RequestTemplate(shapes=shapes, outputs=outputs, top_k=top_k), inputs)


def runs(small, name):
    """Number of batches by their number of requests."""
    counts, requests = small.node.metrics.histogram(m.BATCH_REQUESTS, name).read()
    return sum(counts), requests


def answers(endpoint, result):
    request, future = result
    return dict(endpoint.outputs(request, future.result(60)))


def test_waiting_predictions_run_as_one_batch(small, batched):
    endpoint, plain = batched()["ctr"], small.state.entries["ctr"].endpoint
    small.store.gate.clear()
    first = endpoint.submit(call([15]), FAR)
    requests = [
        call([1, 2]),
        call([12], outputs=("logit", "item.source")),
        call([99, 3, 17], outputs=("logit", "item.source")),
        call([4, 6]),
        call([7, 8], offsets=[0, 1, 4]),
        call([1, 2, 3], top_k=2),
        call([1, 2, 3], users=[4]),
    ]
    futures = [endpoint.submit(each, FAR) for each in requests]
    small.store.gate.set()
    until(first.done)
    for each, future in zip(requests, futures, strict=True):
        mine, alone = future.result(60), plain.submit(each, FAR).result(60)
        assert mine.defaulted == alone.defaulted
        got, wanted = dict(endpoint.outputs(each, mine)), dict(plain.outputs(each, alone))
        assert list(got) == list(wanted)
        for name, values in wanted.items():
            np.testing.assert_allclose(got[name], values, rtol=1e-6, atol=1e-6)
    # Candidates with their context and top_k were alone, and not counted.
    assert runs(small, "ctr") == (3, 5.0)


@pytest.mark.parametrize("name", ["ctr", "ctr.lookup"])
def test_batch_runs_with_the_trace_of_its_first_request(small, batched, name, monkeypatch):
    """Without recorded spans, downstream services get the first request's trace."""
    reported, fetch = [], small.store.fetch

    def telling(parts, ctx):
        reported.append(ctx.origin.request_id)
        fetch(parts, ctx)

    monkeypatch.setattr(small.store, "fetch", telling)
    submit_three(small, batched()[name], [RequestContext(f"r-{i}") for i in range(3)])
    assert reported == ["r-0", "r-1"]


@pytest.mark.parametrize("name", ["ctr", "ctr.lookup"])
def test_batch_has_a_span_linked_to_its_requests(small, batched, name):
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporter, provider = export.InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = otel.Tracer(provider)
    origins = [tracer.request(f"r-{i}", 0, f"r-{i}", "", "") for i in range(3)]
    set_recorder(tracer)
    try:
        submit_three(small, batched()[name], origins)
    finally:
        set_recorder(None)
    ended = exporter.get_finished_spans()
    (batch,) = [span for span in ended if span.name == "batch"]
    linked = [f"{link.context.span_id:016x}" for link in batch.links]
    assert linked == [origin.span_id for origin in origins[1:]]
    parts = {s.name for s in ended if s.parent and s.parent.span_id == batch.context.span_id}
    assert parts == ({"lookup", "dense"} if name == "ctr" else {"lookup"})


def submit_three(small, endpoint, origins):
    """Submit one request, and two that wait for it and form one batch."""
    small.store.gate.clear()
    futures = []
    for key, origin in enumerate(origins, 15):
        made = call([key])
        if isinstance(endpoint, LookupEndpoint):
            del made.inputs["dense"], made.form.shapes["dense"]
        made.origin = origin
        futures.append(endpoint.submit(made, FAR))
    small.store.gate.set()
    for future in futures:
        future.result(60)


def test_invalid_request_fails_alone(small, batched):
    endpoint = batched()["ctr"]
    small.store.gate.clear()
    endpoint.submit(call([15]), FAR)
    good = endpoint.submit(call([1], offsets=[0, 2]), FAR)
    with pytest.raises(BadRequest, match="offsets run from 0 to 1"):
        endpoint.submit(call([1], offsets=[0, 1]), FAR)
    second = endpoint.submit(call([1], offsets=[0, 2]), FAR)
    small.store.gate.set()
    np.testing.assert_array_equal(
        good.result(60).outputs["logit"], second.result(60).outputs["logit"]
    )


def test_request_that_makes_the_network_fail_fails_alone(small, batched, monkeypatch):
    pipeline = small.node.models["ctr"].pipeline
    run = pipeline.dense.predict

    def picky(inputs, outputs=None, deadline=None):
        if (inputs["item"][:, 0] == 9).any():
            raise RuntimeError("no nines")
        return run(inputs, outputs, deadline)

    monkeypatch.setattr(pipeline.dense, "predict", picky, raising=False)
    endpoint = batched()["ctr"]
    small.store.gate.clear()
    endpoint.submit(call([15]), FAR)
    one, nine, two = (endpoint.submit(call([k]), FAR) for k in (1, 9, 2))
    small.store.gate.set()
    assert one.result(60).outputs["logit"].shape == two.result(60).outputs["logit"].shape == (1,)
    with pytest.raises(RuntimeError, match="no nines"):
        nine.result(60)


@pytest.mark.parametrize("delay_us", [0, 500])
def test_concurrent_requests_get_their_own_scores(small, batched, delay_us):
    endpoint = batched(max_rows=16, max_delay_us=delay_us)["ctr"]
    plain = small.state.entries["ctr"].endpoint
    random = np.random.default_rng(3)
    requests = [call(random.integers(0, 22, random.integers(1, 9)).tolist()) for _ in range(200)]
    wanted = [plain.submit(each, FAR).result(60) for each in requests]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda each: endpoint.submit(each, FAR).result(60), requests))
    for mine, alone in zip(got, wanted, strict=True):
        assert mine.defaulted == alone.defaulted
        np.testing.assert_allclose(
            mine.outputs["logit"], alone.outputs["logit"], rtol=1e-6, atol=1e-6
        )


def test_lookups_are_batched_too(small, batched):
    endpoints = batched()
    small.store.gate.clear()
    kept = RequestTemplate(shapes={"left": [1, 1]}, kept=True)

    def ask(key):
        return endpoints["words"].submit(InferenceRequest(kept, {"left": np.array([key])}), FAR)

    assert ask(3).done()  # it is in memory, and no batch is running
    first, *others = (ask(key) for key in (15, 3, 16))
    assert not any(future.done() for future in others)
    small.store.gate.set()
    assert [f.result(60).vectors["left"][0, 0] for f in (first, *others)] == [15, 3, 16]


def test_batch_size_is_bounded_by_settings_and_model(batched):
    bounds = batched(max_rows=1000)["halves"]._endpoint._engine._batcher._limits
    assert bounds.rows == 8
