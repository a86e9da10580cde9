"""``hps bench``: measure a server's latency and throughput, and compare two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hps.cli.command_options import CommandApp, argument, option
from hps.cli.options import (
    HTTP,
    Credentials,
    RequestLoadOptions,
    former_target,
    only_model,
    open_admin,
)
from hps.errors import ConfigError, HpsError

if TYPE_CHECKING:
    from hps.client import Client
    from hps.tools.bench.load import Tensors
    from hps.tools.bench.run import BenchPlan
    from hps.tools.bench.senders import Sender

app = CommandApp(add_completion=False)

EXAMPLES = """\b
Examples:
  hps bench ctr --batch 64
  hps bench ctr --server grpc://127.0.0.1:8001 --rate 2000 --json before.json
  hps bench ctr --requests requests.npz --concurrency 16
  hps bench --compare before.json after.json
"""
CALLERS, MOST_DUE = 8, 256
CONNECTIONS = 4
_DAY = 86_400
INTERRUPTED = 130


class ArrivalProcess(StrEnum):
    poisson = "poisson"
    constant = "constant"


@dataclass(frozen=True, kw_only=True)
class BenchOptions(RequestLoadOptions):
    model: str | None = argument(None)
    """The model to measure; required if the server has several."""
    second: str | None = argument(None, hidden=True)
    server: str | None = option(None, "--server", "-s", metavar="URL", show_default=HTTP)
    """The server: http://host:port or grpc://host:port."""
    duration: float = option(10.0, min=0.01, max=_DAY)
    """Length of the measurement in seconds."""
    warmup: float = option(2.0, min=0.0, max=_DAY)
    """Seconds of requests before the measurement, which are not counted."""
    count: int | None = option(None, min=1, show_default=False)
    """Stop after this many measured requests, or at the end of --duration."""
    concurrency: int | None = option(
        None, "--concurrency", "-n", min=1, show_default=f"{CALLERS}, with --rate {MOST_DUE}"
    )
    """Requests in flight: callers that each wait for their answer; with --rate the limit."""
    connections: int | None = option(
        None, min=1, max=1024, show_default=f"{CONNECTIONS}, or --concurrency if less"
    )
    """gRPC connections, used in turn; HTTP uses one per request in flight."""
    rate: float | None = option(None, min=0.01, max=1e6)
    """Send this many requests per second, however fast the server answers (open loop)."""
    arrivals: ArrivalProcess = option(ArrivalProcess.poisson)
    """Intervals between requests with --rate: random (poisson) or constant."""
    keys_from: str | None = option(None, metavar="URL", show_default="the same host, port 8002")
    """Admin address to get the hottest keys from."""
    distinct: int = option(1024, min=1)
    """Number of different requests, sent in turn."""
    version: int | None = option(None, min=1)
    """The model's version in --repository; default: the highest."""
    timeout: float = option(10.0, min=0.001, max=3600)
    """Timeout of a request in seconds."""
    json: Path | None = option(None, metavar="FILE")
    """Also write the result to this file."""
    compare: tuple[Path, Path] | None = option(None, metavar="BEFORE AFTER")
    """Compare two results of --json; sends no requests."""
    credentials: Credentials


@app.command(epilog=EXAMPLES)
def bench(options: BenchOptions) -> None:
    """Measure a server's latency and throughput; compare two runs.

    Without --rate (closed loop), each of --concurrency callers sends its next request when its
    answer arrives: this measures how much the server can do. With --rate (open loop), requests are
    due by the clock, and their latency counts from then: this measures how long users wait.

    Keys are the hottest ones of the server, if its admin address provides them. Exit code 1:
    requests failed; 130: interrupted. The results are printed in both cases."""
    former, model = former_target(options.model, options.second)
    if options.compare is not None:
        from hps.tools.bench.result_tables import show_comparison

        if options.server or former or model:
            raise ConfigError("--compare only reads two files; remove the server and the model")
        show_comparison(*options.compare)
        return
    if options.requests is not None and options.repository is not None:
        raise ConfigError("--requests and --repository exclude each other; remove one")
    from hps.tools.bench.report import errors_of, save
    from hps.tools.bench.result_tables import show

    result = _run(options.server or former or HTTP, model, options)
    if options.json is not None:
        save(options.json, result)
    show(result)
    if result["interrupted"]:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(0 if result["requests"] and not errors_of(result) else 1)


def _run(url: str, model: str | None, options: BenchOptions) -> dict[str, Any]:
    """Send requests to the server at ``url``; return the report of the run."""
    from hps.tools.bench.hot_key_pools import sources_of
    from hps.tools.bench.report import report
    from hps.tools.bench.run import run
    from hps.tools.bench.senders import open_sender

    plan = _plan(options)
    connections = options.connections or min(CONNECTIONS, plan.concurrency)
    api_key, tls = options.credentials.api_key, options.credentials.client_tls()
    with options.credentials.client(url, timeout_s=plan.timeout_s) as client:
        name = model or only_model(client.models(), "bench")
        server = client.about()
        tensors, keys = _requests(client, url, name, server, options)
        _send_first(client, name, tensors[0])
        outcome = run(
            lambda: open_sender(url, api_key, tls, connections),
            partial(_messages, name, tensors),
            plan,
        )
        sources = None if outcome.interrupted else sources_of(client, name, tensors)
    return report(
        outcome,
        {
            "url": url,
            "protocol": "grpc" if url.startswith("grpc") else "http",
            "server": f"{server.get('name', '')} {server.get('version', '')}".strip(),
            "model": name,
            **_load_facts(tensors, keys, sources),
            "connections": connections if url.startswith("grpc") else None,
            "concurrency": plan.concurrency,
            "rate": plan.rate,
            "arrivals": plan.arrivals if plan.rate else None,
            "warmup_s": plan.warmup_s,
        },
    )


def _plan(options: BenchOptions) -> BenchPlan:
    from hps.tools.bench.run import BenchPlan

    return BenchPlan(
        duration_s=options.duration,
        warmup_s=options.warmup,
        concurrency=options.concurrency or (CALLERS if options.rate is None else MOST_DUE),
        rate=options.rate,
        arrivals=options.arrivals.value,
        requests=options.count,
        timeout_s=options.timeout,
        seed=options.seed,
    )


def _requests(
    client: Client, url: str, model: str, server: Mapping[str, Any], options: BenchOptions
) -> tuple[list[Tensors], str]:
    """The tensors of the requests, and a phrase that describes their keys."""
    from hps.tools.bench.load import RequestSource, made_requests

    source = RequestSource(options.requests, options.repository, options.version)
    hot_keys = partial(_hot_keys, url, options, str(server.get("name", "")))
    return made_requests(model, options.recipe(options.distinct), source, client.metadata, hot_keys)


def _send_first(client: Client, model: str, tensors: Tensors) -> None:
    """Check that the server accepts a request, before a run."""
    try:
        client.infer(model, dict(tensors))
    except HpsError as error:
        error.args = (f"the server rejected the first request, so no other is sent: {error}",)
        raise


def _messages(model: str, tensors: Sequence[Tensors], sender: Sender) -> Sequence[Any]:
    from hps.client.calls import InferCall

    return [sender.message(InferCall(model, dict(each))) for each in tensors]


def _load_facts(tensors: Sequence[Tensors], keys: str, sources: Any) -> dict[str, Any]:
    from hps.tools.bench.load import different_keys, samples

    return {
        "batch": samples(tensors[0]),
        "keys": keys,
        "keys_from": sources,
        "different_requests": len(tensors),
        "different_keys": different_keys(tensors),
    }


def _hot_keys(
    url: str, options: BenchOptions, server: str, model: str
) -> Sequence[Mapping[str, Any]]:
    """Get the hottest keys; see `hps.tools.bench.hot_key_pools.HotKeys`."""
    from hps.tools.bench.hot_key_pools import MOST, guessed_admin, require_same

    address = options.keys_from
    if address is None and not server.startswith("hps"):
        raise ConfigError("it is not an hps server")
    try:
        with open_admin(address or guessed_admin(url), options.credentials, timeout_s=10) as admin:
            if address is None:
                require_same(admin, url)
            return admin.hot_keys(model, limit=MOST)
    except HpsError as error:
        if address is None:
            error.args = (f"{error}; give --keys-from URL",)
        raise
