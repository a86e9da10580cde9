"""``hps`` commands in forks of a process that has loaded its packages once: each costs what it does itself.

Exit code and output are those of a process of its own; what a process does when Python ends is left out.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOADED = (
    *(
        "services.frontend.main",
        "services.ingest.main",
        "hps.node.build",
        "hps.client",
        "hps.dense.onnx",
    ),
    *("hps.cli.main", "hps.cli.progress", "hps.cli.serve", "hps.cli.ingest", "hps.cli.predict"),
    *(
        "hps.cli.doctor",
        "hps.tools.doctor.configuration",
        "hps.cli.tables",
        "hps.config.validation",
    ),
    *("hps.tiers.rocksdb", "hps.tiers.redis", "hps.updates.kafka"),
    *("rich.console", "rich.table", "rich.text", "typer.core"),
)
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Ended:
    """``code``: None where it did not end within `PATIENCE_S`."""

    code: int | None
    out: str
    err: str = ""

    @property
    def output(self) -> str:
        return self.out + self.err

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("error: ")]

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Commands:
    """For one thread."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder = process, folder

    def run(self, *words: str | Path, stdin: str = "", cwd: Path | None = None) -> Ended:
        """``hps WORDS``."""
        files = [self._folder / name for name in ("in", "out", "err")]
        files[0].write_text(stdin)
        command = {
            "words": [str(word) for word in words],
            "files": [str(file) for file in files],
            "cwd": str(cwd or Path.cwd()),
            "environment": dict(os.environ),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        code = json.loads(self._process.stdout.readline())
        return Ended(code, files[1].read_text(), files[2].read_text())


@contextmanager
def commands(folder: Path) -> Iterator[Commands]:
    """``folder`` is for its own files."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.forked_hps"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        yield Commands(process, folder)
        assert process.stdin is not None
        process.stdin.close()


def _serve() -> None:
    for name in LOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        command = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_run(command))
        print(json.dumps(_code(child)), flush=True)


def _run(command: dict[str, Any]) -> int:
    from hps.cli.main import main

    for number, file in enumerate(command["files"]):
        made = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if number else os.O_RDONLY
        os.dup2(os.open(file, made, 0o666), number)
    sys.stdin = os.fdopen(0, closefd=False)
    os.chdir(command["cwd"])
    os.environ.clear()
    os.environ.update(command["environment"])
    sys.argv = ["hps", *command["words"]]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _code(child: int) -> int | None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    _serve()
