"""A node in memory with three models, one of them with a network, and an ASGI client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from hps.config.auth import load_api_keys
from hps.config.model_schema import FeatureSpec, ModelSpec
from hps.config.server_settings import ApiKey, AuthSettings, ServerSettings
from hps.dense.base import NetworkTensor
from hps.lookup.base import Feature, LookupModel
from hps.lookup.engine import LookupEngine
from hps.node.node import Node
from hps.node.served_versions import ServedModel, ServedModels
from hps.node.streams import UpdateStreams
from hps.node.tier_status import TierStatus
from hps.observability.metrics import Metrics
from hps.predict.pipeline import InferencePipeline, ModelNetwork
from hps.threads import BoundedThreadPool
from hps.tiers.base import TierInfo
from hps.tiers.chain import TierChain
from hps.tiers.wrappers import MeteredTier
from hps.types import EmbeddingTable, Source, make_version
from hps.updates.cache_writer import CacheWriter, PromotionSources
from services.frontend.auth import Authorizer, guard
from services.frontend.http.app import admin_app, data_app
from services.frontend.http.inference_app import InferApp
from services.frontend.state import FrontendState
from tests.support.gated_tier import GatedTier
from tests.support.memory_tier import MemoryTier

ROW_VERSION = make_version(1_700_000_000_000)

CTR = {
    "name": "ctr",
    "tables": [
        {"name": "users", "dim": 4},
        {"name": "items", "dim": 2, "default": 0.5},
    ],
    "features": [
        {"name": "user", "table": "users", "hotness": 1, "context": True},
        {"name": "item", "table": "items", "hotness": 1},
        {"name": "history", "table": "items", "pooling": "mean"},
    ],
    "dense": {
        "inputs": [{"name": "dense", "shape": [-1, 3]}],
        "outputs": [{"name": "score", "shape": [-1, 1]}, {"name": "logit", "shape": [-1]}],
    },
    "max_batch_size": 64,
}
WORDS = {
    "name": "words",
    "tables": [{"name": "left", "dim": 3}, {"name": "right", "dim": 2}],
}
HALVES = {
    "name": "halves",
    "tables": [{"name": "half", "dim": 4, "dtype": "float16"}],
    "max_batch_size": 8,
}


class Adder:
    """``logit``: the sum of all inputs; ``score``: half of it."""

    inputs = (
        NetworkTensor("user", "FP32", (-1, 4)),
        NetworkTensor("item", "FP32", (-1, 2)),
        NetworkTensor("history", "FP32", (-1, 2)),
        NetworkTensor("dense", "FP32", (-1, 3)),
    )
    outputs = (NetworkTensor("score", "FP32", (-1, 1)), NetworkTensor("logit", "FP32", (-1,)))

    def predict(
        self,
        inputs: Mapping[str, Any],
        outputs: tuple[str, ...] | None = None,
        deadline: float | None = None,
    ) -> dict[str, Any]:
        logit = sum(array.sum(axis=1) for array in inputs.values())
        both = {"score": (logit / 2)[:, None], "logit": logit}
        return {name: both[name] for name in outputs or both}

    def runs_inline(self, batch: int) -> bool:
        return True

    def close(self) -> None:
        pass


def row(key: int, dim: int) -> list[float]:
    """The row of ``key``: ``key + i / 8``."""
    return [key + i / 8 for i in range(dim)]


@dataclass
class Small:
    """The node and its parts. Keys 0…9 are in memory, 10…19 in the store."""

    node: Node
    memory: MemoryTier
    store: GatedTier
    state: FrontendState
    settings: ServerSettings

    def app(self, rest: Any = None, guard: Any = None, **settings: Any) -> InferApp:
        chosen = self.settings.model_copy(update=settings)
        return InferApp(self.state, chosen, guard or Authorizer(), rest)


def _served(spec: ModelSpec, caches: Any, stores: Any, workers: BoundedThreadPool) -> ServedModel:
    tables = {
        t.name: EmbeddingTable.make(
            t.name, t.dim, model=spec.name, dtype=t.dtype, default=t.default
        )
        for t in spec.tables
    }
    named = spec.features or [FeatureSpec(name=t.name, table=t.name) for t in spec.tables]
    features = {
        f.name: Feature(f.name, tables[f.table], f.key_offset, f.pooling, f.hotness, f.context)
        for f in named
    }
    model = LookupModel(spec.name, 1, tables, features, spec.max_batch_size)
    engine = LookupEngine(model, caches, stores, workers)
    pipeline = None
    if spec.dense is not None:
        pipeline = InferencePipeline(ModelNetwork(spec.name, spec.dense, Adder()), engine, workers)
    return ServedModel(spec.name, 1, spec, tables, engine, pipeline)


def make_small() -> Small:
    memory, store = MemoryTier(TierInfo("cpu", Source.CPU, cache=True)), GatedTier()
    caches, stores = TierChain([memory]), TierChain([MeteredTier(store, lambda *_: None)])
    workers = BoundedThreadPool(2, 64, name="test", setting="tiers.lookup_queue")
    specs = [ModelSpec.model_validate(each) for each in (CTR, WORDS, HALVES)]
    models = {spec.name: _served(spec, caches, stores, workers) for spec in specs}
    for model in models.values():
        for table in model.tables.values():
            for tier, first in ((memory, 0), (store, 10)):
                keys = np.arange(first, first + 10)
                rows = np.array([row(k, table.dim) for k in keys], table.dtype)
                tier.insert(table, keys, rows, np.full(10, ROW_VERSION, np.uint64))
    writer = CacheWriter(caches, PromotionSources([store]), 1 << 20)
    tiers = [TierStatus(memory, lambda _table: 10), TierStatus(store, lambda _table: 10)]
    metrics = Metrics()
    streams = UpdateStreams([], metrics, ExitStack())
    node = Node(
        models=ServedModels(models.values()),
        metrics=metrics,
        tiers=tiers,
        workers=workers,
        writer=writer,
        streams=streams,
    )
    node._resources.callback(workers.close)
    node._resources.callback(writer.close)
    state = FrontendState()
    state.serve(node)
    # A machine that stalls for seconds must not fail a test that is not about timeouts.
    return Small(node, memory, store, state, ServerSettings(request_timeout_ms=60_000))


def serve_models(small: Small, models: Mapping[str, ServedModel]) -> None:
    """Replace the node's models, by name, as a load does."""
    small.node.models = ServedModels(models.values())


@pytest.fixture
def small() -> Iterator[Small]:
    made = make_small()
    yield made
    made.store.gate.set()
    made.node.close()


@dataclass
class Reply:
    """The response of an application."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The JSON part of the body."""
        size = self.headers.get("inference-header-content-length")
        return orjson.loads(self.body[: int(size)] if size else self.body)

    @property
    def error(self) -> str:
        assert self.headers["content-type"] == "application/json"
        found = self.json
        assert list(found) == ["error"]
        return str(found["error"])


async def call_app(
    app: Any,
    method: str,
    path: str,
    chunks: Sequence[bytes] = (b"",),
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """Send one request to an ASGI application, its body in ``chunks``."""
    left = list(chunks)
    messages: list[Any] = []

    async def receive() -> Any:
        if not left:
            await asyncio.sleep(3600)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Any) -> None:
        messages.append(message)

    raw = [(k.lower().encode(), v.encode("latin-1")) for k, v in (headers or {}).items()]
    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "scheme": "http",
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
        "http_version": "1.1",
        "headers": raw,
    }
    async with asyncio.timeout(20):
        await app(scope, receive, send)
    start, *bodies = messages
    assert start["type"] == "http.response.start"
    assert not bodies[-1].get("more_body")
    body = b"".join(message.get("body", b"") for message in bodies)
    found = {name.decode(): value.decode("latin-1") for name, value in start["headers"]}
    assert int(found["content-length"]) == len(body)
    return Reply(start["status"], found, body)


@pytest.fixture
def ask() -> Any:
    """``ask(app, method, path, body, headers)``: the reply to one request."""

    def ask(
        app: Any,
        method: str,
        path: str,
        body: bytes | Sequence[bytes] | dict[str, Any] = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        if isinstance(body, dict):
            body = orjson.dumps(body)
        chunks = [body] if isinstance(body, bytes) else body
        return asyncio.run(call_app(app, method, path, chunks, headers))

    return ask


@pytest.fixture
def admin(small: Small) -> Any:
    """The admin port's application."""
    return admin_app(small.state, small.settings, Authorizer())


@pytest.fixture
def data(small: Small) -> Any:
    """The data port's application."""
    return data_app(small.state, small.settings, Authorizer())


@pytest.fixture
def key_guard() -> Any:
    """Requires API keys: sixteen times r, w or a for the roles read, write and admin."""
    keys = [ApiKey(name=role, role=role, key=role[0] * 16) for role in ("read", "write", "admin")]
    return guard(load_api_keys(AuthSettings(mode="api_key", keys=keys)))


@pytest.fixture
def call() -> Any:
    """``call(app, method, path, **options)``: the response to one request, by httpx."""

    def call(app: Any, method: str, path: str, **options: Any) -> httpx.Response:
        async def once() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.request(method, path, **options)

        return asyncio.run(once())

    return call


@pytest.fixture
def error() -> Any:
    """``error(reply)``: the message of a failed request, whose body must have the documented shape."""

    def error(reply: httpx.Response) -> str:
        assert reply.headers["content-type"] == "application/json"
        found = reply.json()
        assert list(found) == ["error"]
        return str(found["error"])

    return error


class SlowNetwork:
    """A network whose runs last until ``leave`` is set."""

    def __init__(self, network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.leave = threading.Event()
        self.runs = 0
        run = network.predict

        def predict(*args: Any) -> Any:
            self.runs += 1
            assert self.leave.wait(60)
            return run(*args)

        monkeypatch.setattr(network, "predict", predict, raising=False)
        monkeypatch.setattr(network, "runs_inline", lambda _batch: False, raising=False)


@pytest.fixture
def slow(small: Small, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowNetwork]:
    """The network of `ctr`, slow."""
    made = SlowNetwork(small.node.models["ctr"].pipeline.dense, monkeypatch)
    yield made
    made.leave.set()
