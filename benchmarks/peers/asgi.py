"""Python servers to compare with, on uvicorn with uvloop and httptools, without access log, otherwise with
default settings.

``python -m benchmarks.peers.asgi echo PORT SIZE…``: bare raw ASGI, the floor: it reads the body and
answers ``POST /SIZE`` with that many bytes of it and the headers of a binary answer.
``python -m benchmarks.peers.asgi fastapi PORT TABLE.npy``: the usual lookup in FastAPI,
with pydantic models for request and response.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


def echo(sizes: list[int]) -> Any:
    """A raw ASGI app that answers with the request's bytes, repeated up to the size in its path."""
    starts = {}
    for size in sizes:
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"inference-header-content-length", b"100"),
            (b"content-length", str(size).encode()),
        ]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        starts[f"/{size}"] = size, start

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        message = await receive()
        body = message["body"]
        while message.get("more_body"):
            message = await receive()
            body += message["body"]
        size, start = starts[scope["path"]]
        answer = (body * (size // len(body) + 1))[:size] if size else b""
        await send(start)
        await send({"type": "http.response.body", "body": answer})

    return app


class Tensor(BaseModel):
    name: str
    shape: list[int]
    datatype: str
    data: list[int]


class Request(BaseModel):
    inputs: list[Tensor]


class Vectors(BaseModel):
    name: str
    shape: list[int]
    datatype: str
    data: list[float]


class Response(BaseModel):
    model_name: str
    outputs: list[Vectors]


def fastapi(path: str) -> FastAPI:
    """One route; ``path`` is the table, float32 ``(rows, dim)``, looked up by row number."""
    app = FastAPI()
    table = np.load(path)

    @app.post("/v2/models/lookup/infer")
    async def infer(request: Request) -> Response:
        vectors = table[np.array(request.inputs[0].data, np.int64)]
        output = Vectors(
            name="VECTORS",
            shape=list(vectors.shape),
            datatype="FP32",
            data=vectors.ravel().tolist(),
        )
        return Response(model_name="lookup", outputs=[output])

    @app.get("/ready")
    def ready() -> dict[str, bool]:
        return {"ready": True}

    return app


def main(kind: str, port: int, rest: list[str]) -> None:
    app = fastapi(rest[0]) if kind == "fastapi" else echo([int(size) for size in ["0", *rest]])
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=port,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
