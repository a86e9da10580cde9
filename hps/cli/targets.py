"""Whom a command asks: a server by its address, or a node opened in this process.

``--server URL`` asks a running server. ``--config FILE`` opens the node here, which needs the
database to itself, so not while a server runs on the same configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import numpy as np
import typer
from numpy.typing import NDArray

from hps.cli.signature import MAX_BATCH, Signature
from hps.errors import ConfigError
from hps.types import JaggedKeys, LookupRequest, LookupResult, PredictRequest, PredictResult
from hps.workers import Done, Workers

if TYPE_CHECKING:
    from hps.client import Admin, Client, Tls
    from hps.node import Node


def _refuse(value: str | None) -> None:
    if value is not None:
        raise ConfigError(
            "this command asks the admin address: give --admin URL instead of --server; the server "
            "prints it when it starts, port 8002 unless configured otherwise"
        )


HTTP, ADMIN = "http://127.0.0.1:8000", "http://127.0.0.1:8002"

ServerOption = Annotated[
    str, typer.Option("--server", "-s", metavar="URL", help="The server's address for requests.")
]
AdminOption = Annotated[
    str, typer.Option("--admin", "-a", metavar="URL", help="The server's admin address.")
]
NoServerOption = Annotated[
    str | None, typer.Option("--server", "-s", hidden=True, callback=_refuse)
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="Open this configuration here, no server."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting of --config; repeatable."),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option("--api-key", envvar="HPS_API_KEY", help="Key for a server that asks for one."),
]
TlsOption = Annotated[
    str | None,
    typer.Option(
        "--tls",
        envvar="HPS_TLS",
        metavar="ca=FILE,certificate=FILE,key=FILE",
        help="For https: roots to trust, and what is shown to the server.",
    ),
]


Submit = Callable[[str, PredictRequest], "Future[PredictResult]"]


class Target(Protocol):
    """Something that answers requests for models."""

    def signature(self, model: str) -> Signature: ...

    def predict(self, model: str, request: PredictRequest) -> PredictResult: ...

    def submitting(self, threads: int) -> AbstractContextManager[Submit]:
        """Answers requests beside each other, up to ``threads`` at a time, as futures."""
        ...

    def lookup(self, model: str, features: Mapping[str, JaggedKeys]) -> LookupResult:
        """Pooled vectors with the source of every key."""
        ...

    def network_inputs(self, model: str) -> Mapping[str, str]:
        """Which input of the dense network takes each feature's vectors, where that is known: a server
        does not tell, and a model may have no network."""
        ...


class ServerTarget:
    def __init__(self, client: Client) -> None:
        self._client = client

    def signature(self, model: str) -> Signature:
        metadata = self._client.metadata(model)
        if any(tensor["name"] == "NUMKEYS" for tensor in metadata["inputs"]):
            # A model without a dense part describes itself in HPS's form; its features stand here.
            metadata = self._client.metadata(f"{model}.lookup") | {"name": model}
        config = self._client.config(model)
        return Signature.of_metadata(metadata, config.get("max_batch_size") or MAX_BATCH)

    def predict(self, model: str, request: PredictRequest) -> PredictResult:
        return _ask(self._client, model, request)

    @contextmanager
    def submitting(self, threads: int) -> Iterator[Submit]:
        workers = Workers(threads, threads, name="ask")  # a server that hangs keeps none waiting
        try:
            yield lambda model, request: workers.submit(partial(_ask, self._client, model, request))
        finally:
            workers.close(0)

    def lookup(self, model: str, features: Mapping[str, JaggedKeys]) -> LookupResult:
        return self._client.lookup(model, features, want_source=True)

    def network_inputs(self, model: str) -> Mapping[str, str]:
        return {}


def _ask(client: Client, model: str, request: PredictRequest) -> PredictResult:
    from hps.client.wire import tensors_of

    # The dense inputs have the model's types already, so there is nothing to ask the server first.
    tensors = tensors_of(request.features) | dict(request.dense)
    parameters = {"top_k": request.top_k} if request.top_k else None
    answer = client.infer(model, tensors, parameters=parameters)
    return PredictResult(answer.outputs, **answer.account)


class NodeTarget:
    def __init__(self, node: Node) -> None:
        self.node = node

    def signature(self, model: str) -> Signature:
        return Signature.of_spec(self.node.model(model).spec)

    def predict(self, model: str, request: PredictRequest) -> PredictResult:
        served = self.node.model(model)
        if served.pipeline is None:
            found = served.engine.lookup(LookupRequest(served.keys(request.features)))
            return PredictResult(found.vectors, defaulted=found.defaulted, degraded=found.degraded)
        keys = served.keys(request.features)
        return served.pipeline.predict(replace(request, features=keys))

    @contextmanager
    def submitting(self, threads: int) -> Iterator[Submit]:
        """Answers at once: a node in this process has the machine's cores to itself as it is."""
        yield lambda model, request: Done(self.predict(model, request))

    def lookup(self, model: str, features: Mapping[str, JaggedKeys]) -> LookupResult:
        return self.node.lookup(model, features, want_source=True)

    def network_inputs(self, model: str) -> Mapping[str, str]:
        spec = self.node.model(model).spec
        if spec.dense is None:
            return {}
        vectors = [name for feature in spec.served_features for name in feature.vectors]
        return {name: spec.dense.embeddings.get(name, name) for name in vectors}


@contextmanager
def open_target(
    server: str,
    config: Path | None,
    overrides: list[str] | None,
    api_key: str | None,
    tls: str | None = None,
) -> Iterator[Target]:
    """The node of ``config`` when it is given, else the server."""
    if config is not None:
        with open_here(config, overrides) as node:
            yield NodeTarget(node)
        return
    refuse_overrides(overrides)
    from hps.client import Client

    with Client(server, api_key=api_key, tls=tls_of(tls)) as client:
        client.ready()  # what requests need is loaded before the first is timed
        yield ServerTarget(client)


def open_admin(url: str, api_key: str | None, tls: str | None, *, timeout_s: float = 30.0) -> Admin:
    """What asks the admin port at ``url``."""
    from hps.client import Admin

    return Admin(url, api_key=api_key, tls=tls_of(tls), timeout_s=timeout_s)


def tls_of(given: str | None) -> Tls | None:
    """What ``--tls`` says; each of its parts may be left out."""
    from hps.client import Tls

    if not given:
        return None
    files = dict(part.partition("=")[::2] for part in given.split(","))
    if not all(files.values()) or not files.keys() <= {"ca", "certificate", "key"}:
        raise ConfigError(
            f"--tls is {given!r}; it must look like ca=FILE,certificate=FILE,key=FILE"
        )
    return Tls(files.get("ca"), files.get("certificate"), files.get("key"))


def refuse_overrides(overrides: list[str] | None) -> None:
    if overrides:
        raise ConfigError("--set changes a configuration; give --config FILE with it")


@contextmanager
def open_here(config: Path, overrides: list[str] | None) -> Iterator[Node]:
    """The node of a configuration file, opened in this process and closed at the end."""
    from hps.build import open_node
    from hps.cli.output import warn
    from hps.cli.progress import ConsoleProgress
    from hps.config import load_config

    configuration = load_config(config, overrides or ())
    for warning in configuration.warnings:
        warn(warning)
    node = open_node(configuration, ConsoleProgress())
    try:
        yield node
    finally:
        node.close()


def source_names(codes: NDArray[np.uint8]) -> list[str]:
    """Per key, the name of the tier that answered: rocksdb, cpu, …, default."""
    from hps.types import Source

    return [Source(code).name.lower() for code in codes.reshape(-1).tolist()]
