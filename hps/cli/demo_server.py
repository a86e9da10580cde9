"""The demo's server: ``hps serve`` that ends with the demo, however the demo ends.

Standard input is a pipe that the demo alone holds open: it closes when the demo is killed, too, which
no signal handler of the demo could notice.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from pathlib import Path

ABANDONED = threading.Event()


def end_with_the_demo() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    ABANDONED.set()
    os.kill(os.getpid(), signal.SIGTERM)


def serve(config: Path) -> None:
    """Serve ``config`` until told to stop; its folder goes too when the demo cannot remove it."""
    from hps.cli.main import app

    threading.Thread(target=end_with_the_demo, daemon=True).start()
    try:
        app(["serve", "--output", "json", "--config", str(config)])
    finally:
        if ABANDONED.is_set():
            shutil.rmtree(config.parent, ignore_errors=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
