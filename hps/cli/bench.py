"""``hps bench``: its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hps.cli.options import HTTP, ApiKeyOption, RowsOption, TlsOption, former_target, tls_of
from hps.errors import ConfigError, HpsError

if TYPE_CHECKING:
    from hps.client import Client, Tls

app = typer.Typer(add_completion=False)

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


@app.command(epilog=EXAMPLES)
def bench(
    model: Annotated[
        str | None, typer.Argument(help="The model to ask; needed where there are several.")
    ] = None,
    second: Annotated[str | None, typer.Argument(hidden=True)] = None,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            "-s",
            metavar="URL",
            help="http://host:port or grpc://host:port.",
            show_default=HTTP,
        ),
    ] = None,
    duration: Annotated[
        float, typer.Option(min=0.01, max=_DAY, help="Seconds that are measured.")
    ] = 10.0,
    warmup: Annotated[float, typer.Option(min=0.0, max=_DAY, help="Seconds before that.")] = 2.0,
    count: Annotated[
        int | None, typer.Option(min=1, help="End after so many requests.", show_default=False)
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            "-n",
            min=1,
            help="Callers that each wait for their answer; with --rate the most requests under way.",
            show_default=f"{CALLERS}, with --rate {MOST_DUE}",
        ),
    ] = None,
    connections: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="Of gRPC, used in turn; HTTP has one for each request under way.",
            show_default=f"{CONNECTIONS}, or --concurrency if less",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=1e6, help="Requests due per second, however quick the server is."
        ),
    ] = None,
    arrivals: Annotated[
        ArrivalProcess, typer.Option(help="With --rate: when.")
    ] = ArrivalProcess.poisson,
    batch: Annotated[int, typer.Option(min=1, help="Samples in a request.")] = 1,
    keys: Annotated[
        str, typer.Option(help="uniform, zipf:S, hot:SHARE,COVERAGE, trace:FILE.npy.")
    ] = "zipf:1.2",
    rows: RowsOption = None,
    keys_from: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The server's admin address, which has its hot keys.",
            show_default="the same host, port 8002",
        ),
    ] = None,
    hotness: Annotated[
        int, typer.Option(min=1, help="Keys per sample, where the model does not say.")
    ] = 1,
    distinct: Annotated[int, typer.Option(min=1, help="Different requests, sent in turn.")] = 1024,
    repository: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Ask for keys that the model has here.")
    ] = None,
    version: Annotated[int | None, typer.Option(min=1, help="Its version there.")] = None,
    requests: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Send these, of hps generate requests.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, max=3600, help="Seconds for one request.")
    ] = 10.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed sends the same.")] = 1,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Keep the result here too.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="BEFORE AFTER", help="Say what two such files differ in."),
    ] = None,
    api_key: ApiKeyOption = None,
    tls: TlsOption = None,
) -> None:
    """Send a server requests for a while, and tell how long they took.

    Without --rate, callers send when they have their answer: how much can the server do? With --rate,
    requests are due by the clock, and their time counts from then: how long does a user wait? Requests ask
    for the server's hottest keys, where its admin address gives them. Exit 1 when requests failed, 130 when
    interrupted; what was measured is printed all the same.
    """
    from hps.tools.bench.result_tables import show, show_comparison

    former, model = former_target(model, second)
    if compare is not None:
        if server or former or model:
            raise ConfigError("--compare reads two files; leave the server and the model out")
        show_comparison(*compare)
        return
    url = server or former or HTTP
    if requests is not None and repository is not None:
        raise ConfigError("give --requests or --repository, not both")
    from hps.tools.bench.load import LoadRecipe, RequestSource
    from hps.tools.bench.report import errors_of, save
    from hps.tools.bench.run import BenchPlan

    plan = BenchPlan(
        duration,
        warmup,
        concurrency or (CALLERS if rate is None else MOST_DUE),
        rate,
        arrivals.value,
        count,
        timeout,
        seed,
    )
    recipe = LoadRecipe(distinct, batch, keys, rows, hotness, seed)
    lines = connections or min(CONNECTIONS, plan.concurrency)
    source = RequestSource(requests, repository, version)
    told = _run(url, model, plan, recipe, source, lines, keys_from, api_key, tls_of(tls))
    if json is not None:
        save(json, told)
    show(told)
    if told["interrupted"]:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(1 if errors_of(told) or not told["requests"] else 0)


def _run(
    url: str,
    model: str | None,
    plan: Any,
    recipe: Any,
    source: Any,
    connections: int,
    admin: str | None,
    api_key: str | None,
    tls: Tls | None,
) -> dict[str, Any]:
    from hps.client import Client
    from hps.client.calls import InferCall
    from hps.tools.bench.hot_key_pools import sources_of
    from hps.tools.bench.load import different_keys, made_requests, samples
    from hps.tools.bench.report import report
    from hps.tools.bench.run import run
    from hps.tools.bench.senders import Sender, open_sender

    with Client(url, api_key=api_key, timeout_s=plan.timeout_s, tls=tls) as client:
        name = model or _only(client)
        server = client.about()
        hot_keys = partial(_hot_keys, url, admin, api_key, tls, str(server.get("name", "")))
        tensors, keys = made_requests(name, recipe, source, client.metadata, hot_keys)
        try:
            client.infer(name, dict(tensors[0]))
        except HpsError as error:
            error.args = (f"the first request is refused, so none is sent: {error}",)
            raise

        def prepare(sender: Sender) -> Sequence[Any]:
            return [sender.message(InferCall(name, dict(each))) for each in tensors]

        outcome = run(lambda: open_sender(url, api_key, tls, connections), prepare, plan)
        sources = None if outcome.interrupted else sources_of(client, name, tensors)
    grpc = url.startswith("grpc")
    asked = {
        "url": url,
        "protocol": "grpc" if grpc else "http",
        "server": f"{server.get('name', '')} {server.get('version', '')}".strip(),
        "model": name,
        "batch": samples(tensors[0]),
        "keys": keys,
        "keys_from": sources,
        "different_requests": len(tensors),
        "different_keys": different_keys(tensors),
        "connections": connections if grpc else None,
        "concurrency": plan.concurrency,
        "rate": plan.rate,
        "arrivals": plan.arrivals if plan.rate else None,
        "warmup_s": plan.warmup_s,
    }
    return report(outcome, asked)


def _hot_keys(
    url: str, admin: str | None, api_key: str | None, tls: Tls | None, server: str, model: str
) -> Sequence[Mapping[str, Any]]:
    """See `hps.tools.bench.hot_key_pools.HotKeys`."""
    from hps.client import Admin
    from hps.tools.bench.hot_key_pools import MOST, guessed_admin, require_same

    if admin is None and not server.startswith("hps"):
        raise ConfigError("it is no hps server")
    try:
        with Admin(admin or guessed_admin(url), api_key=api_key, timeout_s=10, tls=tls) as asked:
            if admin is None:
                require_same(asked, url)
            return asked.hot_keys(model, limit=MOST)
    except HpsError as error:
        if admin is None:
            error.args = (f"{error}; give --keys-from URL",)
        raise


def _only(client: Client) -> str:
    """The model, where there is one."""
    names = client.models()
    main = [name for name in names if not name.endswith(".lookup")] or names
    if len(main) != 1:
        there = ", ".join(names) or "none at all"
        raise ConfigError(f"name the model: hps bench MODEL; the server has {there}")
    return main[0]
