"""docs/first-deployment.md, command by command in one shell, on other ports: each says what the page says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from benchmarks.peers.process import free_ports
from tests.support.kafka_brokers import need_kafka
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/first-deployment.md"
BLOCK = re.compile(r"((?:^[^\n]+\n)*)\n```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
PORTS = (6390, 8000, 8001, 8002, 8101, 8102, 8201, 8202, 8302, 9390, 9392, 9393)
_SLOW_S = 300.0


class Shell:
    """A bash process that runs one script after the other."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            ["bash"], cwd=folder, env={**os.environ, **environment}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, script: str) -> str:
        """Run ``script`` in the shell and return its output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        (self.folder / "script").write_text(script)
        # By `source`, so that variables stay; what is run reads nothing of what we send.
        self._process.stdin.write(". ./script < /dev/null\necho; echo --$?--\n")
        self._process.stdin.flush()
        said: list[str] = []
        for line in self._process.stdout:
            if re.fullmatch(r"--\d+--\n", line):
                return "".join(said).removesuffix("\n")
            said.append(line)
        raise AssertionError("".join(said))

    def servers(self) -> list[psutil.Process]:
        """The started servers that still run; not other processes that reuse the PID of an ended one."""
        found = []
        for file in self.folder.glob("*.pid"):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(file.read_text()))
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                with suppress(psutil.AccessDenied):
                    if Path(process.cwd()) == self.folder.resolve():
                        found.append(process)
        return found

    def close(self) -> None:
        for process in self.servers():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # what has no number may hold the pipe
            self._process.communicate(timeout=60)


@pytest.fixture
def page() -> str:
    """With ports that are free."""
    text = PAGE.read_text()
    own = dict(zip(map(str, PORTS), map(str, free_ports(len(PORTS))), strict=True))
    text = re.sub(r"(?<![\d.])\d{4}(?!\d)", lambda found: own.get(found[0], found[0]), text)
    for role, ending in (("grpc", "01"), ("admin", "02")):
        text = text.replace(f"8${{n}}{ending}", f"${{{role}[n]}}")
    lists = (
        f"{role}=(0 {own[f'81{e}']} {own[f'82{e}']})"
        for role, e in (("grpc", "01"), ("admin", "02"))
    )
    usual = zip(("HTTP", "GRPC", "ADMIN"), ("8000", "8001", "8002"), strict=True)
    chosen = (f"export HPS__SERVER__{role}__PORT={own[port]}" for role, port in usual)
    return "\n".join([*lists, *chosen]) + "\0" + text


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    # An alert that waits for a minute does so for a second.
    files = tmp_path / "hps/helm/hps/files"
    files.mkdir(parents=True)
    alerts = (ROOT / "helm/hps/files/alerts.yaml").read_text()
    (files / "alerts.yaml").write_text(alerts.replace("for: 1m\n", "for: 1s\n"))
    (tmp_path / "hps/.peers").symlink_to(ROOT / ".peers")
    (tmp_path / "first").mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    opened = Shell(tmp_path / "first", {"PATH": path, "HPS": str(tmp_path / "hps")})
    yield opened
    opened.close()


@pytest.mark.timeout(1800)
def test_commands_of_the_page_run(program: Callable[[str], str], page: str, shell: Shell) -> None:
    need_kafka()
    for name in ("redis-server", "prometheus", "promtool", "curl", "java"):
        program(name)
    ports, text = page.split("\0")
    shell.run(ports)
    blocks = [(before, block) for before, block in BLOCK.findall(text) if "make setup" not in block]
    ran = 0
    for before, block in blocks:
        if block.startswith("$ "):
            for command, *said in transcript(block):
                says(shell, command, said)
                ran += 1
        elif block.startswith("…"):
            log_lines = [line for line in block.splitlines() if " INFO " in line]
            until(partial(logged, shell, log_lines), _SLOW_S)
        elif named := re.findall(r"`([a-z]+\.(?:yaml|properties|json|py))`", before):
            (shell.folder / named[-1]).write_text(block)
        elif not block.startswith("ALERTS"):
            shell.run(block.replace("5s", "1s"))
    assert ran > 12
    until(lambda: not shell.servers(), _SLOW_S)


def transcript(block: str) -> Iterator[list[str]]:
    """Each command with the lines that it printed."""
    for part in block.removeprefix("$ ").split("\n$ "):
        yield part.splitlines()


def says(shell: Shell, command: str, expected: list[str]) -> None:
    """Check a command's output: repeat a command with an expected output until it fits; run others once.
    The page's request is repeated meanwhile, since lookup nodes take turns."""
    last = ""
    if not expected and " query " not in command:
        shell.run(command)
        return

    def holds() -> bool:
        nonlocal last
        last = shell.run(command)
        if resembles(expected, last):
            return True
        shell.run(
            "curl -s http://127.0.0.1:$HPS__SERVER__HTTP__PORT/v2/models/ctr/infer -d @request.json"
        )
        return False

    try:
        until(holds, _SLOW_S)
    except AssertionError:
        raise AssertionError(f"$ {command}\n{last}\n-- not as in the page:\n{expected}") from None


def resembles(expected: list[str], found: str) -> bool:
    lines = [line.rstrip() for line in found.splitlines() if line.strip()]
    wanted = [line for line in expected if line.strip() not in ("", "…")]
    if not wanted:
        return "…" in expected or not lines
    return all(any(re.fullmatch(pattern(each), line) for line in lines) for each in wanted)


def pattern(line: str) -> str:
    """Pattern of a printed line: numbers may differ, scores beyond four digits, a query's values not."""
    exact = line.startswith("{")
    made = ""
    for word in re.findall(r"=> \S+|-?\d[\d.,]*(?: (?:µs|ms|s)\b)?|\s+|…|.", line):
        if word == "…":
            made += ".*"
        elif word.isspace():
            made += r"\s+"
        elif re.match(r"-?\d", word):
            made += rf"{re.escape(word[:6])}\d*,?" if exact else r"-?[\d.,]+( (µs|ms|s|min|h).*?)?"
        else:
            made += re.escape(word)
    return made


def logged(shell: Shell, lines: list[str]) -> bool:
    logs = "".join(file.read_text() for file in shell.folder.glob("*.log"))
    return resembles(lines, logs)
