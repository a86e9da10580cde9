"""PyTorch layers on an attached and on a connected node: the same bits as on the node itself."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

import hps
from hps.config.server_settings import GrpcSettings, ServerSettings
from hps.native import COMPILED
from services.frontend.auth import Authorizer
from services.frontend.grpc.server import GrpcServer
from services.frontend.state import FrontendState
from tests.support.pytorch import hps_torch, torch
from tests.support.server_thread import Running
from tests.support.waiting import PATIENT_GUARD


@pytest.fixture
def settings(small_repository: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="hps-") as runtime:  # pytest's names are too long
        yield {
            "models": {"repository": str(small_repository)},
            "tiers": {"rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD}},
            "server": {"runtime": runtime} if COMPILED else {},
        }


@contextmanager
def attached(_node: hps.Node, settings: dict[str, Any], _folder: Path) -> Iterator[hps.Attached]:
    with hps.attach(settings) as opened:
        yield opened


@contextmanager
def connected(node: hps.Node, settings: dict[str, Any], folder: Path) -> Iterator[hps.Connected]:
    repository = settings["models"]["repository"]
    shutil.copytree(repository, folder / "front", ignore=shutil.ignore_patterns("tables"))
    state = FrontendState()
    state.serve(node)
    running = Running(GrpcServer(GrpcSettings(port=0), state, ServerSettings(), Authorizer()))
    lookup = {"nodes": [running.server.url]}
    with hps.connect({"models": {"repository": str(folder / "front")}, "lookup": lookup}) as opened:
        yield opened
    running.stop(force=True)
    running.join()


Opener = Callable[[hps.Node, dict[str, Any], Path], AbstractContextManager[Any]]


@pytest.mark.parametrize(
    "opener",
    [
        pytest.param(
            attached,
            marks=pytest.mark.skipif(not COMPILED, reason="a shared cache needs the native core"),
        ),
        connected,
    ],
    ids=["attached", "connected"],
)
def test_layers_return_the_nodes_bits(opener: Opener, settings: dict, tmp_path: Path) -> None:
    keys, weights = torch.randint(-60, 60, (20, 5)), torch.rand(20, 5)
    with hps.open(settings) as node, opener(node, settings, tmp_path) as other:
        found, expected = (
            [
                hps_torch.Embedding(each, "clicks", "items")(keys),
                hps_torch.EmbeddingBag(each, "clicks", "items", "mean")(keys),
                hps_torch.EmbeddingBag(each, "clicks", "items", "sum")(keys, None, weights),
            ]
            for each in (other, node)
        )
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine, theirs)
            mine += 1  # its memory may be written
        assert (expected[0] == torch.tensor([1.0, 2.0])).all(-1).any()  # a default
