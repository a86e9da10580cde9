"""Small clients, REST and gRPC: NumPy in, NumPy out, errors that name the remedy.

from hps.client import Client

with Client("http://127.0.0.1:8000") as client:  # or grpc://127.0.0.1:8001
    scores = client.predict("ctr", {"user": [17], "ad": [4, 8]}, {"depth": [[2.0]]}).outputs"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hps.client.address import Tls
    from hps.client.admin import Admin
    from hps.client.client import AsyncClient, Client
    from hps.client.wire import Answer

__all__ = ["Admin", "Answer", "AsyncClient", "Client", "Tls"]

# Imported on first use: `Admin` needs no NumPy, so commands start without it.
_HOMES = {
    "Admin": "hps.client.admin",
    "Answer": "hps.client.wire",
    "AsyncClient": "hps.client.client",
    "Client": "hps.client.client",
    "Tls": "hps.client.address",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hps.client' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
