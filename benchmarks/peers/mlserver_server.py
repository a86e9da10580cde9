"""MLServer with custom models, in the environment ``.peers/mlserver``:
``python -m benchmarks.peers.mlserver_server HTTP_PORT GRPC_PORT METRICS_PORT``.

Models run in the server's process, which is faster than workers for little work, without request log.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from benchmarks.peers.rows_and_network import TABLES, Rows, Scores


class RowsModel(MLModel):
    async def load(self) -> bool:
        self._rows = Rows(self.name)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        keys = NumpyCodec.decode_input(payload.inputs[0])
        output = NumpyCodec.encode_output("VECTORS", self._rows(keys))
        return InferenceResponse(model_name=self.name, outputs=[output])


class ScoresModel(MLModel):
    async def load(self) -> bool:
        self._scores = Scores()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        scores = self._scores([NumpyCodec.decode_input(each) for each in payload.inputs])
        output = NumpyCodec.encode_output("score", scores)
        return InferenceResponse(model_name=self.name, outputs=[output])


async def serve(http: int, grpc: int, metrics: int) -> None:
    settings = Settings(
        debug=False,
        parallel_workers=0,
        host="127.0.0.1",
        http_port=http,
        grpc_port=grpc,
        metrics_port=metrics,
        gzip_enabled=False,
    )
    models = [ModelSettings(name=name, implementation=RowsModel) for name in TABLES]
    models.append(ModelSettings(name="ctr", implementation=ScoresModel))
    await MLServer(settings).start(models)


if __name__ == "__main__":
    logging.disable(logging.INFO)
    asyncio.run(serve(*map(int, sys.argv[1:])))
