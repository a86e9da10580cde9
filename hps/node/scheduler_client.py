"""The node's batch scheduler, as an attached process uses it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hps.config.model_schema import ModelSpec
from hps.errors import Unavailable
from hps.lookup.base import LookupModel
from hps.observability.meters import LookupMeter, TierMeter
from hps.observability.metrics import Metrics
from hps.predict.pipeline import InferencePipeline
from hps.predict.scheduler.channel_socket import connect
from hps.predict.scheduler.client import SchedulerClient
from hps.predict.scheduler.remote_network import RemoteNetwork, columns_of
from hps.predict.scheduler.scheduled_model import ScheduledModel
from hps.tiers.node import NodeConnectionPool
from hps.types import Source

log = logging.getLogger(__name__)
_ANSWER_S = 5.0
_GPU = Source.GPU.name.lower()


@dataclass(frozen=True, slots=True)
class NodeModel:
    """A model version whose predictions run in the node's process."""

    client: SchedulerClient
    number: int
    network: RemoteNetwork
    metrics: Metrics

    def use(self, lookup: LookupModel, spec: ModelSpec, pipeline: InferencePipeline) -> None:
        """Let ``pipeline`` send its predictions to the node."""
        dense = spec.dense
        assert dense is not None
        inputs, outputs = [t.name for t in dense.inputs], [t.name for t in dense.outputs]
        columns = columns_of(lookup, self.network, inputs, outputs)
        meters = (
            LookupMeter(self.metrics, lookup.name, lookup.version),
            TierMeter(self.metrics, _GPU),
        )
        pipeline.schedule(ScheduledModel(self.client, self.number, columns, meters, remote=True))


class NodeSchedulerClient:
    """The channel of this process to the node's scheduler, opened when a model needs it.

    A new one is opened once the node's process has ended: another one may have taken its place.
    ``resources`` closes it. Thread-safe."""

    def __init__(self, socket: Path, metrics: Metrics, resources: ExitStack) -> None:
        """``socket``: the node's."""
        self._socket = socket
        self._metrics = metrics
        self._lock = threading.Lock()
        self._client: SchedulerClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        resources.callback(self._close)

    def find(self, model: str, version: int) -> NodeModel | None:
        """Return the version if the node runs it in its scheduler. Raises ``TierError``."""
        try:
            with closing(NodeConnectionPool(self._socket)) as node:
                described: Mapping[str, Any] | None = node.ask(
                    "scheduler", time.monotonic() + _ANSWER_S
                )
        except Unavailable:  # the node has none
            return None
        found = None if described is None else described["models"].get(f"{model}/{version}")
        if described is None or found is None:
            return None
        with self._lock:
            if self._client is None or self._client.has_failed:
                self._client = connect(described["path"])
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._client.complete_on, self._loop)
            client = self._client
        log.info("model %s: predictions of version %d run on the node's GPU", model, version)
        return NodeModel(client, found["number"], RemoteNetwork(found["network"]), self._metrics)

    def complete_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """See `SchedulerClient.complete_on`."""
        with self._lock:
            self._loop = loop
            if self._client is not None:
                self._client.complete_on(loop)

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()
