"""The interfaces of uvicorn and grpc that this test run uses: private (``auto``), or only public ones.

`make test-fallbacks` chooses the public ones by environment variables. Processes read these as settings;
tests that make servers in their own process pass the values below.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

VARIABLES = {
    "http": ("HPS__SERVER__HTTP__PROTOCOL", "HPS__SERVER__ADMIN__PROTOCOL"),
    "grpc": ("HPS__SERVER__GRPC__CALLS",),
}
HTTP_PROTOCOL = os.environ.get(VARIABLES["http"][0], "auto")
GRPC_CALLS = os.environ.get(VARIABLES["grpc"][0], "auto")
CHOSEN = {"http": HTTP_PROTOCOL, "grpc": GRPC_CALLS}


def environment(server: Mapping[str, Any]) -> dict[str, str]:
    """The environment of a process with these settings of `server`: without those of a port that it has not,
    which would open it."""
    unset = VARIABLES["grpc"] if server.get("grpc", {}) is None else ()
    return {name: value for name, value in os.environ.items() if name not in unset}
