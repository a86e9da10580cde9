"""KServe with custom models: ``python -m benchmarks.peers.kserve_server HTTP_PORT GRPC_PORT`` in the
environment ``.peers/kserve``. One process, without request log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer

from benchmarks.peers.rows_and_network import TABLES, Rows, Scores


class Answers(Model):
    def __init__(self, name: str, output: str, work: Callable[[list[Any]], Any]) -> None:
        super().__init__(name)
        self._output, self._work = output, work
        self.ready = True

    def predict(self, payload: InferRequest, headers: Any = None) -> InferResponse:
        array = self._work([tensor.as_numpy() for tensor in payload.inputs])
        output = InferOutput(self._output, list(array.shape), "FP32")
        output.set_data_from_numpy(array)
        binary = payload.use_binary_outputs
        return InferResponse(payload.id, self.name, [output], use_binary_outputs=binary)


def rows(name: str) -> Answers:
    table = Rows(name)
    return Answers(name, "VECTORS", lambda tensors: table(tensors[0]))


if __name__ == "__main__":
    logging.disable(logging.INFO)
    http, grpc = map(int, sys.argv[1:])
    ModelServer(http_port=http, grpc_port=grpc, enable_latency_logging=False).start(
        [*map(rows, TABLES), Answers("ctr", "score", Scores())]
    )
