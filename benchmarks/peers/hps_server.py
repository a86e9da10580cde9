"""``hps serve`` as a process, for benchmarks and tests that need a real server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.process import Server, free_ports, serving


def write_lookup_model(root: Path, name: str, feature: str, rows: NDArray[np.float32]) -> None:
    """A model of one table whose keys are the row numbers; its feature is answered unpooled."""
    folder = root / name / "1/tables/rows"
    folder.mkdir(parents=True)
    np.arange(len(rows), dtype="<i8").tofile(folder / "key")
    rows.astype("<f4", copy=False).tofile(folder / "emb_vector")
    spec = {
        "name": name,
        "tables": [{"name": "rows", "dim": rows.shape[1]}],
        "features": [{"name": feature, "table": "rows", "pooling": "none"}],
    }
    (root / name / "model.yaml").write_text(json.dumps(spec))


@dataclass(frozen=True)
class Hps(Server):
    """Our running server; ``address`` is the data port's, ``admin`` the admin port's, ``grpc`` gRPC's."""

    admin: str
    grpc: str


@contextmanager
def start_hps(
    folder: Path,
    *,
    limits: Mapping[str, Any] | None = None,
    tiers: Mapping[str, Any] | None = None,
    auth: Mapping[str, Any] | None = None,
    models: Mapping[str, Any] | None = None,
    updates: Mapping[str, Any] | None = None,
    dense: Mapping[str, Any] | None = None,
    lookup: Mapping[str, Any] | None = None,
    tls: Mapping[str, Any] | None = None,
    core: int | None = None,
    open_files: int | None = None,
    timeout_s: float = 120.0,
) -> Iterator[Hps]:
    """``hps serve`` on ``folder/models``, defaults but for ports and paths; entered when ready.

    ``limits`` are further settings of the `server` section, ``tiers``, ``auth``, ``models``, ``updates``,
    ``dense`` and ``lookup`` of those, ``tls`` of the ports for requests; the admin port speaks plain text.
    ``open_files``: how many the process may have.
    Raises RuntimeError with the log when it does not become ready.
    """
    http, grpc, admin = free_ports(3)
    configuration = {
        "models": {"repository": str(folder / "models"), **(models or {})},
        "auth": dict(auth or {}),
        "updates": dict(updates or {}),
        "dense": dict(dense or {}),
        "lookup": dict(lookup or {}),
        "tiers": {"rocksdb": {"path": str(folder / "rocksdb")}, **(tiers or {})},
        "server": {
            "http": {"port": http, "tls": tls},
            "grpc": {"port": grpc, "tls": tls},
            "admin": {"port": admin},
            **(limits or {}),
        },
    }
    # JSON is YAML.
    (folder / "config.yaml").write_text(json.dumps(configuration))
    limited = [] if open_files is None else ["prlimit", f"--nofile={open_files}"]
    command = [
        *limited,
        sys.executable,
        "-m",
        "hps.cli.main",
        "serve",
        "--config",
        str(folder / "config.yaml"),
    ]
    with serving(
        command, admin, ready_path="/v2/health/ready", core=core, timeout_s=timeout_s
    ) as server:
        yield Hps(
            f"127.0.0.1:{http}",
            server.process,
            server.log,
            admin=f"127.0.0.1:{admin}",
            grpc=f"127.0.0.1:{grpc}",
        )
