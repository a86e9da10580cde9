"""``hps ingest`` as a process that can be killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.peers.process import free_ports
from tests.support.waiting import until


class IngestProcess:
    """One by its ``settings``, with an admin port of its own; its files are in ``folder``."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (self.port,) = free_ports(1)
        self.log = folder / "log.txt"
        self.config = folder / "hps.yaml"  # JSON is YAML
        self.config.write_text(json.dumps({**settings, "server": {"admin": {"port": self.port}}}))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> IngestProcess:
        """Returns once it is ready."""
        command = [sys.executable, "-m", "hps.cli.main", "ingest", "--config", str(self.config)]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until(self._is_ready)
        return self

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"it ended:\n{self.log.read_text()[-3000:]}"
        return self.ask("/v2/health/ready")[0] == 200

    def ask(
        self, path: str, body: Any = None, key: str | None = None, method: str | None = None
    ) -> tuple[int, str]:
        """Status and text of the admin port's answer; 0 without one."""
        data = None if body is None else json.dumps(body).encode()
        headers = {} if key is None else {"X-API-Key": key}
        request = urllib.request.Request(self.admin + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def updates(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.ask("/v1/updates")[1])["updates"]
        return found

    def counted(self, metric: str) -> float:
        """The sum of a metric's values."""
        lines = self.ask("/metrics")[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(metric + "{"))

    def kill(self) -> None:
        """``kill -9``, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(120)
        self._process = None
        return code
