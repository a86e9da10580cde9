"""Checkpoints of a running node over the admin port."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import hps
from hps.config.auth import Role
from hps.config.model_schema import ModelSpec, TableSpec
from hps.config.server_settings import ServerSettings
from hps.errors import Forbidden
from hps.models.version_writer import write_version
from hps.tiers.rocksdb import bootstrap
from hps.tiers.rocksdb.checkpoint import complete_checkpoints
from services.frontend.auth import Authorizer
from services.frontend.http.app import admin_app
from services.frontend.state import FrontendState


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model ``m`` with a table ``items`` that holds 0 for the keys 0 to 9."""
    rows = {"items": (np.arange(10), np.zeros((10, 2), np.float32))}
    spec = ModelSpec(name="m", tables=[TableSpec(name="items", dim=2)])
    write_version(tmp_path / "models", spec, 1, rows)
    return tmp_path


def opened(folder: Path, **rocksdb: Any) -> Any:
    settings = {"path": str(folder / "db"), **rocksdb}
    return hps.open(
        {"models": {"repository": str(folder / "models")}, "tiers": {"rocksdb": settings}}
    )


def post(node: Any, body: Any, guard: Any = None) -> httpx.Response:
    state = FrontendState()
    state.serve(node)
    app = admin_app(state, ServerSettings(), guard or Authorizer())

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post("/v1/checkpoints", json=body)

    return asyncio.run(send())


def test_node_opened_from_a_checkpoint_has_its_rows(folder: Path) -> None:
    there = folder / "kept"
    with opened(folder, checkpoints=str(there)) as node:
        node.write("m", "items", [1, 77], [[1.5, 1], [7, 7]])
        reply = post(node, {"keep": 2})
        assert reply.status_code == 200
        node.write("m", "items", [1], [[9, 9]])
    assert [str(each) for each in complete_checkpoints(there)] == [reply.json()["checkpoint"]]
    assert bootstrap(there, folder / "new") == complete_checkpoints(there)[0]
    with opened(folder, path=str(folder / "new")) as node:
        found = node.lookup("m", {"items": np.array([1, 77, 2])}, by_table=True)
        assert found.vectors["items"][:, 0].tolist() == [1.5, 7.0, 0.0]


@pytest.mark.parametrize("keep", [0, "3", 1.5, True])
def test_keep_must_be_at_least_one(folder: Path, keep: Any) -> None:
    with opened(folder, checkpoints=str(folder / "kept")) as node:
        reply = post(node, {"keep": keep})
        assert reply.status_code == 400
        assert "keep" in reply.json()["error"]
    assert complete_checkpoints(folder / "kept") == []


def test_checkpoint_without_a_folder_raises_unsupported(folder: Path) -> None:
    with opened(folder) as node:
        reply = post(node, {})
    assert reply.status_code == 501
    assert "tiers.rocksdb.checkpoints" in reply.json()["error"]


def test_checkpoint_requires_the_admin_role(folder: Path) -> None:
    asked = []

    class Guarded(Authorizer):
        def check(self, headers: object, role: Role, certificate: object = None) -> None:
            asked.append(role)
            raise Forbidden("no")

    with opened(folder, checkpoints=str(folder / "kept")) as node:
        assert post(node, {}, Guarded()).status_code == 403
    assert asked == ["admin"]
    assert complete_checkpoints(folder / "kept") == []
