"""A deployment of processes, each in its role, and load on it: front ends, lookup nodes, ``hps ingest``."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tritonclient.grpc as triton

from benchmarks.peers.process import free_ports
from tests.support.waiting import until

_PAUSE_S = 0.01
_START_S = 300.0
DRAIN_DELAY_S = 1.2
"""Twice what a front end or a balancer takes to notice, and something for a busy machine."""


class Part:
    """One process, by the ``settings`` that all share, and what is its own. It can be started again and
    again, on the same ports, by the same files."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], *command: str) -> None:
        """``command``: arguments of `hps` before the configuration."""
        folder.mkdir(parents=True)
        self.command = command
        self.http, self.grpc, self.admin = (f"127.0.0.1:{port}" for port in free_ports(3))
        ports = {name: {"port": self._port(name)} for name in ("http", "grpc", "admin")}
        own = {**settings, "server": {"drain_delay_s": DRAIN_DELAY_S, **ports}}
        if "rocksdb" in settings["tiers"]:
            rocksdb = {**settings["tiers"]["rocksdb"], "path": str(folder / "rocksdb")}
            own["tiers"] = {**settings["tiers"], "rocksdb": rocksdb}
        self.log = folder / "log.txt"
        self._config = folder / "hps.yaml"  # JSON is YAML
        self._config.write_text(json.dumps(own))
        self._process: subprocess.Popen[bytes] | None = None

    def _port(self, name: str) -> int:
        return int(getattr(self, name).rpartition(":")[2])

    def start(self) -> None:
        """Returns at once."""
        command = [sys.executable, "-m", "hps.cli.main", *self.command, "--config", self._config]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def ask(self, path: str, body: Any = None) -> tuple[int, str]:
        """Status and text of the admin port's answer; 0 without one."""
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(f"http://{self.admin}{path}", data, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ask("/v1/status")[1])
        return found

    @property
    def ready(self) -> bool:
        """Raises AssertionError when it has ended by itself."""
        process = self._process
        assert process is None or process.poll() in (None, -signal.SIGKILL), self.said
        return self.ask("/v2/health/ready")[0] == 200

    @property
    def said(self) -> str:
        """The end of its log."""
        return f"{' '.join(self.command)}:\n{self.log.read_text()[-3000:]}"

    def wait(self) -> None:
        """Until it is ready; several start at the same time, each imports a lot."""
        until(lambda: self.ready, _START_S)

    def kill(self) -> None:
        """``kill -9``, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop the process without notice; connections stay open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """After `pause`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        assert self._process is not None
        self._process.terminate()
        code = self._process.wait(120)
        self._process = None
        return code

    def counted(self, metric: str) -> float:
        """The sum of a metric's values."""
        lines = self.ask("/metrics")[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(metric + "{"))


@dataclass
class Deployment:
    frontends: list[Part]
    lookups: list[Part]
    others: list[Part] = field(default_factory=list)

    @property
    def parts(self) -> list[Part]:
        return [*self.others, *self.lookups, *self.frontends]

    def all_asked(self) -> bool:
        """True if every front end sends lookups to every lookup node."""
        return all(
            [node["state"] for node in part.status().get("lookup_nodes", [])]
            == ["ready"] * len(self.lookups)
            for part in self.frontends
        )

    def close(self) -> None:
        for part in self.parts:
            with suppress(ProcessLookupError):
                part.kill()


Ask = Callable[[], Any]


class Balancer:
    """The ready ones of several servers, polled as often as a cluster updates a service."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self.ready = [part for part in parts if part.ready]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.05):
            self.ready = [part for part in self._parts if part.ask("/v2/health/ready")[0] == 200]

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


class Load:
    """Threads that ask ready front ends, by HTTP and gRPC in turns, each by connections of its own that last.
    Nobody repeats a request that fails: it is in ``failures``."""

    def __init__(self, parts: Sequence[Part], make: Mapping[str, Callable[[str], Ask]]) -> None:
        """``make``: by protocol (``http``, ``grpc``), what asks the server at an address."""
        self.answers: Counter[Any] = Counter()
        self.failures: list[str] = []
        self._balancer = Balancer(parts)
        self._make = make
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(4)]
        for thread in self._threads:
            thread.start()

    def _run(self, turn: int) -> None:
        protocol = ("http", "grpc")[turn % 2]
        asks: dict[str, Ask] = {}
        while not self._ended.wait(_PAUSE_S):
            ready = self._balancer.ready
            if not ready:
                self.failures.append("no front end was ready")
                return
            # As clients do: what has left the balancer is not kept up.
            asks = {at: asks[at] for part in ready if (at := getattr(part, protocol)) in asks}
            turn += 1
            address = getattr(ready[turn // 2 % len(ready)], protocol)
            if address not in asks:
                asks[address] = self._make[protocol](address)
            began = time.monotonic()
            try:
                answer = asks[address]()
            except Exception as error:  # whatever it was, the request failed
                took = time.monotonic() - began
                self.failures.append(f"{protocol} {address} after {took:.3f} s: {error!r}")
                return
            with self._lock:
                self.answers[answer] += 1

    def more(self, n: int = 40) -> None:
        """Until there are ``n`` more answers."""
        before = self.answers.total()
        until(lambda: self.failures or self.answers.total() >= before + n)

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._balancer.close()

    def __enter__(self) -> Load:
        self.more()
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()


def by_http(
    model: str, inputs: Sequence[Mapping[str, Any]], stack: ExitStack
) -> Callable[[str], Ask]:
    """Scores by REST: the version and the first output's bytes as text."""
    body = json.dumps({"inputs": list(inputs)})

    def at(address: str) -> Ask:
        connection = http.client.HTTPConnection(address, timeout=60)
        stack.callback(connection.close)

        def ask() -> Any:
            connection.request("POST", f"/v2/models/{model}/infer", body)
            reply = connection.getresponse()
            found = json.loads(reply.read())
            assert reply.status == 200, found
            return found["model_version"], tuple(found["outputs"][0]["data"])

        return ask

    return at


def by_grpc(
    model: str, inputs: Sequence[triton.InferInput], output: str, stack: ExitStack
) -> Callable[[str], Ask]:
    """The same by gRPC, rounded as JSON has it."""

    def at(address: str) -> Ask:
        client = stack.enter_context(triton.InferenceServerClient(address))

        def ask() -> Any:
            found = client.infer(model, inputs, client_timeout=60)
            values = found.as_numpy(output).ravel()
            return found.get_response().model_version, tuple(float(str(v)) for v in values)

        return ask

    return at
