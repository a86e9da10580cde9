"""A connection to the data port without a socket."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import orjson
import pytest
from uvicorn.server import ServerState

from services.frontend.http.server import HttpPortOptions, port_config
from tests.support.fallbacks import HTTP_PROTOCOL

PATH = "/v2/models/words.lookup/infer"


class Wire(asyncio.Transport):
    """A transport that collects what is written."""

    def __init__(self):
        super().__init__()
        self.data = b""
        self.closed = self.aborted = self.paused = False
        self.unsent = 0
        self.protocol = None

    def write(self, data):
        if self.closed:  # as uvloop does
            raise RuntimeError("the handler is closed")
        self.data += data

    def set_protocol(self, protocol):
        self.protocol = protocol

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True

    def abort(self):
        self.closed = self.aborted = True

    def get_write_buffer_size(self):
        return self.unsent

    def pause_reading(self):
        self.paused = True

    def resume_reading(self):
        self.paused = False

    @property
    def statuses(self):
        return [int(part[:3]) for part in self.data.split(b"HTTP/1.1 ")[1:]]


class Http:
    """Opens connections without a socket, builds requests and reads answers."""

    def __init__(self, app):
        self._app = app

    def connect(self, app=None):
        """A protocol and its wire, on the running loop."""
        config = port_config(app or self._app, HttpPortOptions(60, protocol=HTTP_PROTOCOL))
        if not config.loaded:
            config.load()
        protocol = config.http_protocol_class(
            config, ServerState(), {}, _loop=asyncio.get_running_loop()
        )
        wire = Wire()
        protocol.connection_made(wire)
        return wire.protocol or protocol, wire

    @staticmethod
    def request(keys, *, path=PATH, request_id="", more=""):
        tensor = {"name": "left", "shape": [1, len(keys)], "datatype": "INT64", "data": keys}
        body = json.dumps({"inputs": [tensor], "id": request_id})
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(body)}\r\n\r\n"
        return (head + body).encode()

    @staticmethod
    def post(path, document, *, more=""):
        """The bytes of a JSON request."""
        body = json.dumps(document)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(body)}\r\n\r\n"
        return (head + body).encode()

    @staticmethod
    def binary(keys, *, more="", length=None):
        tensor = {
            "name": "left",
            "shape": [len(keys), 1],
            "datatype": "INT64",
            "parameters": {"binary_data_size": 8 * len(keys)},
        }
        text = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
        body = text + np.array(keys, np.int64).tobytes()
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: {len(text)}\r\n"
            f"{more}Content-Length: {length or len(body)}\r\n\r\n"
        )
        return head.encode() + body

    @staticmethod
    def vectors(wire):
        """The first column of the vectors ``(n, 3)`` of each binary answer on the wire."""
        found = []
        for answer in wire.data.split(b"HTTP/1.1 200 OK\r\n")[1:]:
            head, _, body = answer.partition(b"\r\n\r\n")
            lines = dict(line.split(b": ", 1) for line in head.split(b"\r\n"))
            assert int(lines[b"content-length"]) == len(body)
            size = int(lines[b"inference-header-content-length"])
            found.append(np.frombuffer(body[size:], np.float32).reshape(-1, 3)[:, 0].tolist())
        return found

    @staticmethod
    def run(scenario):
        async def bounded():
            async with asyncio.timeout(120):
                await scenario()

        asyncio.run(bounded())

    @staticmethod
    async def read(protocol, data):
        """Pass ``data`` as an event loop does, outside all tasks; return the statuses right afterwards."""
        loop = asyncio.get_running_loop()
        there = loop.create_future()

        def callback():
            protocol.data_received(data)
            there.set_result(protocol.transport.statuses)

        loop.call_soon(callback)
        return await there

    @staticmethod
    async def until(condition):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
def http(data):
    return Http(data)
