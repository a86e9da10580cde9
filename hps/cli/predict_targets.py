"""Targets of `hps predict`: a server by its address, or a node opened in this process.

``--server URL`` asks a running server. ``--config FILE`` opens the node here, which needs exclusive
access to the database: no server may run on the same configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hps.cli.options import Credentials, LocalNode
from hps.threads import BoundedThreadPool, CompletedFuture
from hps.tools.signature import MAX_BATCH, ModelSignature
from hps.types import JaggedKeys, LookupRequest, LookupResult, PredictRequest, PredictResult

if TYPE_CHECKING:
    from hps.client import Client
    from hps.node.node import Node


Submit = Callable[[str, PredictRequest], "Future[PredictResult]"]


class ServerTarget:
    def __init__(self, client: Client) -> None:
        self._client = client

    def signature(self, model: str) -> ModelSignature:
        metadata = self._client.metadata(model)
        if any(tensor["name"] == "NUMKEYS" for tensor in metadata["inputs"]):
            # The metadata of a model without a network has HPS's format; `<m>.lookup` names the features.
            metadata = self._client.metadata(f"{model}.lookup") | {"name": model}
        config = self._client.config(model)
        return ModelSignature.of_metadata(metadata, config.get("max_batch_size") or MAX_BATCH)

    def predict(self, model: str, request: PredictRequest) -> PredictResult:
        return _predict(self._client, model, request)

    @contextmanager
    def submitting(self, threads: int) -> Iterator[Submit]:
        """Yield a function that starts requests, up to ``threads`` in parallel, and returns futures."""
        workers = BoundedThreadPool(
            threads, threads, name="ask"
        )  # daemon threads: a stuck server must not delay the exit
        try:
            yield lambda model, request: workers.submit(
                partial(_predict, self._client, model, request)
            )
        finally:
            workers.close(0)

    def lookup(self, model: str, features: Mapping[str, JaggedKeys]) -> LookupResult:
        """Look up pooled vectors, with the source of every key."""
        return self._client.lookup(model, features, want_source=True)

    def network_inputs(self, model: str) -> Mapping[str, str]:
        """Empty: servers do not report which input takes a feature's vectors."""
        return {}


def _predict(client: Client, model: str, request: PredictRequest) -> PredictResult:
    from hps.client.wire import tensors_of

    # The dense inputs already have the model's types, so the metadata is not needed.
    tensors = tensors_of(request.features) | dict(request.dense)
    parameters = {"top_k": request.top_k} if request.top_k else None
    answer = client.infer(model, tensors, parameters=parameters)
    return PredictResult(answer.outputs, **answer.account)


class NodeTarget:
    def __init__(self, node: Node) -> None:
        self.node = node

    def signature(self, model: str) -> ModelSignature:
        return ModelSignature.of_spec(self.node.model(model).spec)

    def predict(self, model: str, request: PredictRequest) -> PredictResult:
        served = self.node.model(model)
        if served.pipeline is None:
            found = served.engine.lookup(LookupRequest(served.keys(request.features)))
            return PredictResult(found.vectors, defaulted=found.defaulted, degraded=found.degraded)
        keys = served.keys(request.features)
        return served.pipeline.predict(replace(request, features=keys))

    @contextmanager
    def submitting(self, threads: int) -> Iterator[Submit]:
        """Run requests synchronously: a node in this process already uses the machine's cores."""
        yield lambda model, request: CompletedFuture(self.predict(model, request))

    def lookup(self, model: str, features: Mapping[str, JaggedKeys]) -> LookupResult:
        return self.node.lookup(model, features, want_source=True)

    def network_inputs(self, model: str) -> Mapping[str, str]:
        """The network input of each feature's vectors; empty without a network."""
        spec = self.node.model(model).spec
        if spec.dense is None:
            return {}
        vectors = [name for feature in spec.served_features for name in feature.vectors]
        return {name: spec.dense.embeddings.get(name, name) for name in vectors}


PredictTarget = ServerTarget | NodeTarget


@contextmanager
def open_target(server: str, local: LocalNode, credentials: Credentials) -> Iterator[PredictTarget]:
    """Open the ``local`` node if there is one, else a client of the server."""
    opened = local.open()
    if opened is not None:
        with opened as node:
            yield NodeTarget(node)
        return
    with credentials.client(server) as client:
        client.ready()  # load and connect before the first request is timed
        yield ServerTarget(client)


def source_names(codes: NDArray[np.uint8]) -> list[str]:
    """Per key, the name of the tier that answered: rocksdb, cpu, …, default."""
    from hps.types import Source

    return [Source(code).name.lower() for code in codes.reshape(-1).tolist()]
