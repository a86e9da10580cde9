"""A real Apache Kafka broker (KRaft, one node, no ZooKeeper) as a process, for tests and benchmarks.

Its jars come from Maven Central by ``tools/kafka/pom.xml`` into ``.peers/kafka``: `make test-services`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.environments import ROOT, PeerMissing
from benchmarks.peers.process import free_ports

POM = Path(__file__).parents[2] / "tools/kafka/pom.xml"
INSTALL = Path(__file__).parents[2] / "tools/install"


class KafkaJars:
    """The broker's jars in ``folder``."""

    name = "kafka"
    folder = ROOT / "kafka"

    def ready(self) -> bool:
        done = self.folder / ".done"
        return (
            done.exists() and done.read_text() == self._stamp() and shutil.which("java") is not None
        )

    def build(self) -> None:
        """Fetch the jars if they are missing. Raises PeerMissing with the remedy."""
        if self.ready():
            return
        packages = {"java": "default-jre-headless", "mvn": "maven"}
        missing = [package for program, package in packages.items() if not shutil.which(program)]
        if missing and subprocess.run([str(INSTALL), *missing], check=False).returncode:
            raise PeerMissing(f"install {' '.join(missing)} (their Debian names) and try again")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        copy = [
            "mvn",
            "-q",
            "-B",
            "--strict-checksums",
            "-f",
            str(POM),
            "dependency:copy-dependencies",
        ]
        done = subprocess.run(
            [*copy, "-DincludeScope=runtime", f"-DoutputDirectory={self.folder}"],
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        if done.returncode:
            raise PeerMissing(
                f"mvn cannot fetch Kafka: {(done.stdout + done.stderr).strip()[-2000:]}"
            )
        (self.folder / ".done").write_text(self._stamp())

    def _stamp(self) -> str:
        return hashlib.sha256(POM.read_bytes()).hexdigest()


KAFKA = KafkaJars()


class KafkaBroker:
    """A broker whose loopback ports and folder stay the same over restarts, so that it keeps acknowledged
    messages. ``options`` are server properties."""

    def __init__(self, folder: Path, options: Mapping[str, str | int] | None = None) -> None:
        self.folder = folder
        self.port, controller = free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None
        listeners = f"PLAINTEXT://{self.address},CONTROLLER://127.0.0.1:{controller}"
        self._properties: dict[str, str | int | Path] = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": listeners,
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "log.dirs": folder / "data",
            "offsets.topic.replication.factor": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "group.initial.rebalance.delay.ms": 0,
            "auto.create.topics.enable": "true",
        } | dict(options or {})  # fmt: skip

    def ask_for_passwords(self) -> str:
        """Add a second listener, whose clients authenticate with passwords (SCRAM), and return its address.

        Call it before `start`. Users are created through the first listener."""
        (port,) = free_ports(1)
        address = f"127.0.0.1:{port}"
        for name in ("listeners", "advertised.listeners"):
            self._properties[name] = f"{self._properties[name]},USERS://{address}"
        protocols = "listener.security.protocol.map"
        self._properties[protocols] = f"{self._properties[protocols]},USERS:SASL_PLAINTEXT"
        module = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        self._properties |= {
            "sasl.enabled.mechanisms": "SCRAM-SHA-256",
            "listener.name.users.scram-sha-256.sasl.jaas.config": module,
        }
        return address

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / "broker.log"

    def start(self, timeout_s: float = 180.0) -> KafkaBroker:
        """Start it. Raises PeerMissing without the jars, RuntimeError with its log when it does not
        listen."""
        if not KAFKA.ready():
            raise PeerMissing("Kafka is not set up: run `make test-services`")
        file = self.folder / "server.properties"
        if not file.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            file.write_text(
                "".join(f"{name}={value}\n" for name, value in self._properties.items())
            )
            self._tool(
                "kafka.tools.StorageTool", "format", "-t", "AAAAAAAAAAAAAAAAAAAAAQ", "-c", str(file)
            )
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._java("-Xmx512m", "kafka.Kafka", str(file)), stdout=log, stderr=log
            )
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return self
            except OSError:
                time.sleep(0.1)
        self.kill()
        text = self.log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"the Kafka broker does not listen on {self.address}:\n{text}")

    def _java(self, *arguments: str) -> list[str]:
        *flags, main, last = arguments
        fast_start = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]  # starts sooner on two cores
        return ["java", *fast_start, *flags, "-cp", f"{KAFKA.folder}/*", main, last]

    def _tool(self, main: str, *arguments: str) -> None:
        command = ["java", "-cp", f"{KAFKA.folder}/*", main, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise RuntimeError(f"{main} failed: {(done.stdout + done.stderr)[-2000:]}")

    def pause(self) -> None:
        """Stop the process (SIGSTOP): connections stay open, requests are not answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "the broker does not run"
        os.kill(self._process.pid, number)

    def stop(self) -> None:
        """Stop it by SIGTERM if it runs, by SIGKILL after 20 s."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def kill(self) -> None:
        """``kill -9``."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def kafka_broker(folder: Path, **options: str | int) -> Iterator[KafkaBroker]:
    """A running broker until the block ends."""
    broker = KafkaBroker(folder, {k.replace("_", "."): v for k, v in options.items()})
    try:
        yield broker.start()
    finally:
        broker.kill()
