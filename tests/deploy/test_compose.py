"""``docker-compose up``, really: services come up healthy and answer, whatever is replaced or killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from benchmarks.peers.process import free_ports
from hps.client import Client
from hps.errors import Unavailable
from hps.updates import Producer
from tests.deploy.stack import (
    CORE,
    PATIENCE_S,
    START_S,
    UP,
    USERS,
    Front,
    Stack,
    expected,
    hardened,
    logits,
    request_inputs,
)
from tests.support.deployment import Ask, Load
from tests.support.waiting import until

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_printed_command_returns_the_printed_score(stack: Stack) -> None:
    log = stack.project("logs", "--no-log-prefix", "demo")
    command = next(line.strip() for line in log.splitlines() if "curl -s" in line)
    assert f"{stack.front.http}/" in command
    answer = json.loads(subprocess.check_output(command, shell=True))
    score = next(o["data"][0] for o in answer["outputs"] if o["name"] == "click")
    trained = re.search(r"click for this request is (\d+\.\d+)", log)
    assert trained is not None
    assert abs(score - float(trained[1])) < 2e-6


def test_every_service_is_hardened_where_it_runs(stack: Stack) -> None:
    hardened(stack, CORE)


@pytest.mark.parametrize("name", ["frontend", "lookup-1", "lookup-2", "ingest"])
def test_doctor_passes_inside_the_services(stack: Stack, name: str) -> None:
    # As with workers, which read the cache in shared memory.
    has_rows = name.startswith("lookup")
    workers = ("--env", "HPS__SERVER__WORKERS=2") if has_rows else ()
    doctor = ("exec", *workers, stack.project.container(name), "hps", "doctor", "--json")
    found: dict[str, dict[str, str]] = {}

    def well() -> bool:  # on a busy machine others may not answer in the time that it gives them
        checks = json.loads(stack.engine.podman(*doctor, check=False))
        found.update({check["name"]: check for check in checks})
        return all(check["verdict"] != "FAIL" for check in checks)

    until(well, PATIENCE_S)
    assert ("database" in found) == has_rows, "the role is known"
    assert ("Redis" in found) == (name != "frontend")
    if has_rows:
        assert found["open files"]["verdict"] == "OK", "nofile"
        assert found["memory"]["found"].startswith("2.1 GB"), "of the container, not of the machine"
        assert "/dev/shm has 1.1 GB free" in found["processes"]["found"], "shm_size"


def test_streamed_rows_are_served_and_scores_are_equal_everywhere(
    stack: Stack, clicks: str
) -> None:
    added = stack.up("triton")
    hardened(stack, added)
    before = USERS[:, None] + np.arange(4) / 8
    rows = np.random.default_rng(5).standard_normal((len(USERS), 4)).astype(np.float32)
    with ExitStack() as clients:
        rest, grpc, triton = (
            clients.enter_context(Client(url))
            for url in (
                f"http://{stack.front.http}",
                f"grpc://{stack.front.grpc}",
                stack.url("TRITON_FRONTEND_HTTP_PORT"),
            )
        )
        for client in (rest, grpc, triton):
            np.testing.assert_allclose(logits(client), expected(before), rtol=1e-4, atol=1e-4)
        with Producer(f"127.0.0.1:{stack.ports['KAFKA_PORT']}", model=clicks) as producer:
            producer.send("users", USERS, rows)
        fresh = expected(rows)

        def arrived() -> bool:  # at both nodes, which are asked in turns
            return all(np.allclose(logits(rest), fresh, atol=1e-4) for _ in range(20))

        until(arrived, PATIENCE_S)
        until(lambda: written_to_redis(stack) >= len(USERS), PATIENCE_S)
        assert logits(rest).tobytes() == logits(grpc).tobytes()
        np.testing.assert_allclose(logits(triton), logits(rest), rtol=0, atol=1e-6)
    # It was Triton that ran the network: without it there is no score.
    with Client(stack.url("TRITON_FRONTEND_HTTP_PORT"), retries=0) as client:
        stack.project("--profile", "triton", "stop", "triton")
        with pytest.raises(Unavailable):
            logits(client)
        stack.project("--profile", "triton", "start", "triton")
        until(lambda: answers(client), PATIENCE_S)
    stack.project("--profile", "triton", "stop", *added)


def written_to_redis(stack: Stack) -> float:
    """Rows, by ``hps ingest``'s own count."""
    with urllib.request.urlopen(stack.url("INGEST_ADMIN_PORT") + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    rows = [line for line in lines if line.startswith("hps_update_rows_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in rows if 'result="upserted"' in line)


def answers(client: Client) -> bool:
    try:
        return len(logits(client)) > 0
    except Unavailable:
        return False


@contextmanager
def load(stack: Stack, *more: Front) -> Iterator[Load]:
    """Requests over REST and gRPC to the front ends that are ready, none of them repeated. At the end all
    have been answered, with what is the answer now."""

    def asking(scheme: str) -> Callable[[str], Ask]:
        def at(address: str) -> Ask:
            client = Client(f"{scheme}://{address}", retries=0)
            clients.callback(client.close)
            return lambda: whole(client)

        return at

    with ExitStack() as clients:
        make = {"http": asking("http"), "grpc": asking("grpc")}
        now = make["http"](stack.front.http)()
        with Load([stack.front, *more], make) as running:  # type: ignore[list-item]
            yield running
            running.more()
        assert running.failures == []
        assert set(running.answers) == {now}


def whole(client: Client) -> bytes:
    """Scores of an answer that is not degraded and has no defaults."""
    answer = client.predict("clicks", *request_inputs())
    assert not answer.degraded, answer.degraded
    assert not answer.defaulted
    return bytes(answer.outputs["logit"].tobytes())


def test_no_request_fails_while_services_are_replaced(stack: Stack, clicks: str) -> None:
    http, grpc = free_ports(2)
    second, name = Front(f"127.0.0.1:{http}", f"127.0.0.1:{grpc}"), f"{stack.project.name}-second"
    published = ("--publish", f"{second.http}:8000", "--publish", f"{second.grpc}:8001")
    stack.project("run", "--detach", "--no-deps", "--name", name, *published, "frontend")
    try:
        until(lambda: second.ready, PATIENCE_S)
        with load(stack, second) as running:
            for service in ("lookup-1", "lookup-2", "ingest", "frontend"):
                gone = stack.project.container(service)
                stack.project(*UP, "--no-deps", "--force-recreate", service, timeout=START_S)
                assert stack.project.container(service) != gone
                until(lambda: set(stack.nodes()) == {"ready"}, PATIENCE_S)
                running.more()
        print(f"four services replaced under {running.answers.total()} requests")
    finally:
        stack.engine.podman("rm", "--force", "--time", "10", name, check=False)


def test_no_request_fails_while_a_lookup_node_is_killed_and_restarted(
    stack: Stack, clicks: str
) -> None:
    container = stack.project.container("lookup-2")
    before = stack.engine.inspect("container", container)["State"]["Pid"]
    with load(stack) as running:
        os.kill(before, signal.SIGKILL)

        def again() -> bool:
            state = stack.engine.inspect("container", container)["State"]
            return bool(state["Running"] and state["Pid"] != before)

        until(again, PATIENCE_S)
        until(lambda: set(stack.nodes()) == {"ready"}, PATIENCE_S)
    print(f"a lookup node killed under {running.answers.total()} requests")
