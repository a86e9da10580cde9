"""The demo's server process: started on free ports, watched, and ended with the demo."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hps.errors import ConfigError, Unavailable
from hps.tools.output import print_line

PORTS = {"http": 8000, "grpc": 8001, "admin": 8002}
START_S = 60.0


class PortTaken(Unavailable):
    """Another process uses the server's port."""


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Make SIGINT, SIGTERM and SIGHUP a KeyboardInterrupt, on the main thread.

    A shell starts background processes with SIGINT ignored, and Python leaves it ignored; the demo
    still stops on one. An ignored SIGHUP stays ignored, as nohup requires."""
    ends = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        ends.append(signal.SIGHUP)
    before = [(number, signal.signal(number, _interrupt)) for number in ends]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _interrupt(_signal: int, _frame: Any) -> None:
    raise KeyboardInterrupt


Started = tuple[subprocess.Popen[str], dict[str, str]]


def start(stack: ExitStack, repository: Path, scratch: Path, port: int | None) -> Started:
    """Start the server; return its process and addresses. ``stack`` ends it."""
    config = scratch / "config.yaml"
    config.write_text(json.dumps(_settings(repository, scratch, _ports(port)), indent=2))
    try:
        return stack.enter_context(_server(config))
    except PortTaken:
        # It was free when it was checked; another process has taken it since.
        if port is not None:
            raise
    free = dict.fromkeys(PORTS, 0)
    config.write_text(json.dumps(_settings(repository, scratch, free), indent=2))
    return stack.enter_context(_server(config))


def _ports(port: int | None) -> dict[str, int]:
    """Ports by listener: the default ones or free ones; with ``port``, that one and any free ones."""
    wanted = PORTS if port is None else {"http": port, "grpc": 0, "admin": 0}
    ports = {}
    for name, number in wanted.items():
        ports[name] = number
        if not _is_free(number):
            if port is not None:
                raise ConfigError(
                    f"port {number} is in use; without --port, the demo uses a free one"
                )
            ports[name] = _free_port()
            print_line(
                f"Port {number} is in use; the {name} port is {ports[name]}.", style="yellow"
            )
    return ports


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _settings(repository: Path, scratch: Path, ports: dict[str, int]) -> dict[str, Any]:
    """The configuration file: JSON, which is YAML."""
    return {
        "models": {"repository": str(repository.absolute())},
        "tiers": {
            "rocksdb": {"path": str(scratch / "rocksdb")},
            # Empty at first, so that the demo shows rows coming from disk and then from memory.
            "cpu_cache": {"warm": False},
            "mapped": {"enabled": False},
        },
        "server": {name: {"port": number} for name, number in ports.items()},
    }


def _is_free(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextmanager
def _server(config: Path) -> Iterator[Started]:
    """Run ``hps serve`` in a child process; yield the addresses that it printed when ready."""
    log = config.with_name("server.log")
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "hps.cli.demo_server", str(config)],
            stdin=subprocess.PIPE,  # closes with this process: see demo_server
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                process.wait(START_S)
                cause = _cause(log.read_text())
                kind = PortTaken if "cannot listen on" in cause else Unavailable
                raise kind(f"the demo's server did not start: {cause}")
            yield process, json.loads(line)["endpoints"]
        finally:
            process.terminate()
            try:
                process.wait(START_S)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):  # a second interrupt
                process.kill()


def _cause(log: str) -> str:
    """The server's error line; a log without one is shown whole on stderr."""
    lines = log.strip().splitlines() or ["its log is empty"]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1]
    sys.stderr.write(log)
    return lines[-1]


def wait(process: subprocess.Popen[str]) -> None:
    try:
        code = process.wait()
    except KeyboardInterrupt:
        print_line("Stopping.")
        return
    raise Unavailable(f"the demo's server ended unexpectedly with exit code {code}")
