"""Key traces of a running node: recorded over the admin port, and planned by ``hps plan --server``."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

import hps
from benchmarks.peers.hps_server import start_hps
from hps.cli.main import app
from hps.client import Admin, Client
from hps.config.server_settings import ServerSettings
from hps.lookup.key_sampling import unpack_samples
from hps.native import COMPILED
from hps.node.key_traces import record_keys
from services.frontend.auth import Authorizer
from services.frontend.http.app import admin_app
from services.frontend.state import FrontendState
from tests.support.small_models import write_models
from tests.support.waiting import PATIENT_GUARD


@pytest.fixture
def node(tmp_path):
    write_models(tmp_path / "models")
    config = {
        "models": {"repository": str(tmp_path / "models")},
        "tiers": {"rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD}},
    }
    with hps.open(config) as opened:
        yield opened


def ask(node: Any, method: str, path: str, body: Any = None) -> httpx.Response:
    state = FrontendState()
    state.serve(node)
    asked = admin_app(state, ServerSettings(), Authorizer())

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=asked)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.request(method, path, json=body)

    return asyncio.run(send())


def samples_of(packed: bytes) -> Any:
    return unpack_samples(np.load(BytesIO(packed)))


def test_lookups_and_predictions_are_recorded_by_table(node):
    node.lookup("clicks", {"user": [1]})
    assert ask(node, "POST", "/v1/traces/clicks", {"seconds": 60}).status_code == 200
    keys = np.array([3, -4, 3])
    node.lookup("clicks", {"item": keys, "user": [7, 8, 9]})
    keys[:] = 0  # the caller's own
    node.lookup("clicks", {"items": [5]}, by_table=True)
    dense = np.zeros((2, 3), np.float32)
    node.predict("clicks", {"user": [11], "item": [1, 2], "history": [[6], [6]]}, {"dense": dense})
    samples, requests, batch = samples_of(ask(node, "GET", "/v1/traces/clicks").content)
    assert requests == 3
    assert batch == pytest.approx((3 + 1 + 2) / 3, abs=0.5)
    assert samples["users"].keys.tolist() == [7, 8, 9, 11]
    assert samples["users"].requests.tolist() == [0, 0, 0, 2]
    assert sorted(samples["items"].keys.tolist()) == [-4, 1, 2, 3, 3, 5, 6, 6]
    assert ask(node, "DELETE", "/v1/traces/clicks").status_code == 200
    assert ask(node, "GET", "/v1/traces/clicks").status_code == 404


def test_recording_ends_by_itself(node):
    record_keys(node.model("words"), 0.2)
    recorder = node.model("words").engine.recorder
    deadline = time.monotonic() + 30
    while recorder.is_running and time.monotonic() < deadline:
        time.sleep(0.05)
    node.lookup("words", {"word": [1, 2]})
    assert samples_of(ask(node, "GET", "/v1/traces/words").content)[1] == 0


def test_rejected_requests_do_not_end_a_recording(node):
    record_keys(node.model("words"), 60)
    with pytest.raises(hps.HpsError):
        node.lookup("words", {"none": [1, 2]})
    node.lookup("words", {"word": [1, 2]})
    samples, _, _ = samples_of(ask(node, "GET", "/v1/traces/words").content)
    assert samples["words"].keys.tolist() == [1, 2]


def test_overflow_drops_requests(node, monkeypatch):
    monkeypatch.setattr("hps.lookup.key_recorder._MOST_WAITING", 10)
    monkeypatch.setattr("hps.lookup.key_recorder._DRAIN_EVERY_S", 60)
    record_keys(node.model("words"), 60)
    for _ in range(5):
        node.lookup("words", {"word": np.arange(8)})
    assert node.model("words").engine.recorder.dropped == 3
    assert samples_of(ask(node, "GET", "/v1/traces/words").content)[0]["words"].accesses == 16


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("none", {}, 404, "none"),
        ("words", {"seconds": 0}, 400, "'seconds' must be above 0"),
        ("words", {"seconds": "9"}, 400, "'seconds' must be a number"),
        ("words", {"seconds": True}, 400, "'seconds' must be a number"),
        ("words", {"seconds": 1e9}, 400, "at most 3600"),
        ("words", {"keys": 1}, 400, "'keys' must be from 1,024"),
    ],
)
def test_wrong_recordings_are_rejected(node, path, body, status, reason):
    reply = ask(node, "POST", f"/v1/traces/{path}", body)
    assert (reply.status_code, reason in reply.json()["error"]) == (status, True), reply.text


def test_running_server_is_planned(small_server, tmp_path):
    """Requests arrive while the command records."""
    done = threading.Event()
    random = np.random.default_rng(1)

    def send() -> None:
        with Client(f"http://{small_server.address}") as client:
            while not done.is_set():
                keys = np.minimum(random.zipf(1.3, (8, 4)) - 1, 999)
                client.lookup("words", {"word": keys})

    sender = threading.Thread(target=send)
    sender.start()
    saved = tmp_path / "trace.npz"
    words = ["plan", "--no-latency", "--model", "words", "--hit-rate", "0.5", "-o", "json"]
    live = [
        "--server",
        f"http://{small_server.admin}",
        "--seconds",
        "2",
        "--save-trace",
        str(saved),
    ]
    try:
        found = CliRunner().invoke(app, [*words, *live])
    finally:
        done.set()
        sender.join()
    assert found.exit_code == 0, found.stderr
    report = json.loads(found.stdout)
    assert report["tables"][0]["rows"] == 1000
    assert report["trace"]["keys"] == 32 * report["trace"]["requests"]
    again = CliRunner().invoke(app, [*words, str(saved), "--table", "words=1000x8"])
    assert json.loads(again.stdout)["plan"] == report["plan"]
    other = CliRunner().invoke(app, [*words, str(saved), "--table", "users=1000x8"])
    assert "has no table 'words'" in other.stderr


@pytest.mark.skipif(not COMPILED, reason="a shared cache needs the native core")
def test_workers_record_too(tmp_path):
    write_models(tmp_path / "models")
    with (
        start_hps(tmp_path, limits={"workers": 2}) as server,
        Admin(f"http://{server.admin}") as admin,
    ):
        admin.record_keys("words", 60, 4096)
        for start in range(40):  # a connection each, so that both workers answer some
            with Client(f"http://{server.address}") as client:
                client.lookup("words", {"word": np.arange(start, start + 8)})
        samples, requests, batch = samples_of(admin.recorded_keys("words"))
        admin.end_recording("words")
        with pytest.raises(hps.HpsError, match="no keys of model 'words'"):
            admin.recorded_keys("words")
    assert (requests, batch) == (40, 8)
    words = samples["words"]
    assert words.accesses == 320
    assert np.bincount(words.requests).tolist() == [8] * 40
    assert (
        np.bincount(words.keys).tolist()
        == np.bincount(
            np.concatenate([np.arange(start, start + 8) for start in range(40)])
        ).tolist()
    )
    for request in range(40):
        assert np.diff(words.keys[words.requests == request]).tolist() == [1] * 7
