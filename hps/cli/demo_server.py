"""Entry point of the demo's server: ``hps serve``, which ends with the demo, however that ends.

Standard input is a pipe that only the demo holds open. It also closes when the demo is killed, which
no signal handler of the demo could report."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import threading
from pathlib import Path


def end_with_the_demo() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def parent_exited() -> bool:
    """True if the demo has exited: it writes nothing, so stdin is readable only at its end."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def serve(config: Path) -> None:
    """Serve ``config`` until a signal; remove its folder if the demo cannot."""
    # SIGTERM must run the `finally` blocks even before the server has installed its handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    from hps.cli.main import app

    try:
        try:
            threading.Thread(target=end_with_the_demo, daemon=True).start()
            app(["serve", "--output", "json", "--config", str(config)])
        finally:  # the demo may end while the server shuts down
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finally:
        if parent_exited():
            shutil.rmtree(config.parent, ignore_errors=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
