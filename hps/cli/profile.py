"""``hps profile``: time per part of a model's requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hps.cli.command_options import CommandApp, argument, option
from hps.cli.options import (
    ADMIN,
    Credentials,
    JsonReportOptions,
    LocalNode,
    RequestLoadOptions,
    former_target,
    only_model,
)
from hps.tools.output import FormattedNumber, percentage, plural, print_line, print_table

if TYPE_CHECKING:
    from hps.cli.profile_targets import ProfileTarget
    from hps.client.http_messages import Request
    from hps.tools.bench.load import Tensors

app = CommandApp(add_completion=False)

EXAMPLES = """\b
Examples:
  hps profile ctr --batch 64
  hps profile ctr --batch 64 --protocol grpc
  hps profile ctr -s http://127.0.0.1:8002 --requests requests.npz --json
  hps profile ctr --config config.yaml
"""
_MEANING = {
    "parse": "bytes to arrays",
    "encode": "arrays to bytes",
    "node": "round trip to a lookup node, including its work",
    "decode": "bytes to arrays",
    "memory": "the cache in one pass: no dedup, bags pooled as rows are read",
    "dedup": "keys by table, or those that memory missed, each once",
    "wait": "for a thread that may block",
    "return": "until the waiting thread resumes",
    "merge": "rows of all tiers, defaults, every key's row",
    "feed": "vectors in the form that the network takes",
    "triton_infer": "the call to Triton, including the round trip",
    "device": "rows and network on the GPU, in one pass",
    "rows": "rows requested there; the GPU may not have them yet",
    "network": "the network there, and the unfinished part of the rows",
    "serialise": "arrays to bytes",
}


class WireProtocol(StrEnum):
    http = "http"
    grpc = "grpc"


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(JsonReportOptions):
    model: str | None = argument(None)
    """The model to profile; required if there are several."""
    second: str | None = argument(None, hidden=True)
    server: str = option(ADMIN, "--server", "-s", metavar="URL")
    """The server's admin address."""
    count: int = option(200, min=1)
    """Number of requests to profile."""
    warmup: int = option(20, min=0)
    """Requests before them, which are not profiled."""
    load: RequestLoadOptions
    protocol: WireProtocol = option(WireProtocol.http)
    """Encoding of the requests: HTTP with binary tensors, or gRPC messages."""
    local: LocalNode
    credentials: Credentials


@app.command(epilog=EXAMPLES)
def profile(options: ProfileOptions) -> None:
    """Show the time of each part of a request: parsing, tiers, pooling, network, serialising.

    Sends requests one at a time to the admin address of a running server or, with --config, to a node
    opened in this process. Keys are the hottest ones of its caches, if it has any. Other requests of
    the server are neither profiled nor slowed down."""
    former, model = former_target(options.model, options.second)
    if former is not None and "://" in former:
        options = replace(options, server=former)
    elif former is not None:
        options = replace(options, local=replace(options.local, config=Path(former)))
    with _open(options) as target:
        name = model or only_model(target.models(), "profile")
        report = _measure(target, name, options)
    options.report(report, _show)


def _measure(target: ProfileTarget, model: str, options: ProfileOptions) -> dict[str, Any]:
    from hps.cli.profile_summary import account
    from hps.tools.bench.load import RequestSource, made_requests

    count, warmup, load = options.count, options.warmup, options.load
    recipe = load.recipe(min(count, 256))
    source = RequestSource(load.requests, load.repository)
    tensors, keys_of = made_requests(model, recipe, source, target.metadata, target.hot_keys)
    sent = _messages(model, tensors, options.protocol)
    profiles = [target.profile(model, sent[i % len(sent)]) for i in range(warmup + count)][warmup:]
    plain = [target.plain(sent[i % len(sent)]) for i in range(warmup + count)][warmup:]
    report = account(profiles)
    report["keys"] = {"of": keys_of, **report["keys"]}
    times = sorted(seconds for seconds in plain if seconds is not None)
    report["round_trip_p50_us"] = 1e6 * times[len(times) // 2] if times else None
    return report


def _messages(model: str, made: Sequence[Tensors], protocol: WireProtocol) -> list[Request]:
    from hps.client.calls import InferCall
    from hps.client.http_wire import HttpCodec

    calls = [InferCall(model, dict(tensors)) for tensors in made]
    if protocol is WireProtocol.http:
        wire = HttpCodec("", None)
        return [wire.request(call) for call in calls]
    from hps.cli.profile_targets import of_grpc
    from hps.client.grpc import GrpcCodec

    grpc = GrpcCodec(None)
    return [of_grpc(grpc.request(call).content.SerializeToString()) for call in calls]


@contextmanager
def _open(options: ProfileOptions) -> Iterator[ProfileTarget]:
    from hps.cli.profile_targets import LocalProfileTarget, ServerProfileTarget

    local = options.local.open()
    if local is not None:
        with local as node:
            yield LocalProfileTarget(node)
    else:
        with ServerProfileTarget(options.server, options.credentials) as server:
            yield server


def _show(report: dict[str, Any]) -> None:
    from hps.tools.bench.result_tables import in_words, warn_of_defaults

    about, keys = report["about"], report["keys"]
    print_line(
        f"{about['model']}, version {about['version']}, batch {about['batch']}, {about['protocol']}: "
        f"{report['requests']} requests, mean {report['mean_us']:,.0f} µs, "
        f"p50 {report['p50_us']:,.0f}, p99 {report['p99_us']:,.0f}"
    )
    sources = f": {in_words(keys['from'])}" if keys["from"] else ""
    print_line(f"keys {keys['of']}{sources}")
    print_line()
    print_table(
        ("part", "mean µs", "share", "p50 µs", "p99 µs", "requests", ""),
        [_part_row(part) for part in report["parts"]],
    )
    if report["round_trip_p50_us"] is not None:
        _show_round_trip(report["round_trip_p50_us"], report["p50_us"])
    if about["workers"]:
        print_line()
        print_line(
            "This is the node, whose caches are its own. Its clients are answered by "
            f"{plural(about['workers'], 'worker')}, which ask it for what the shared cache misses."
        )
    warn_of_defaults(keys["from"].get("default", 0.0))


def _part_row(part: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        "  " * (len(part["path"]) - 1) + part["path"][-1],
        FormattedNumber(f"{part['mean_us']:,.1f}"),
        percentage(part["share"], 1.0),
        FormattedNumber(f"{part['p50_us']:,.1f}"),
        FormattedNumber(f"{part['p99_us']:,.1f}"),
        part["requests"],
        _meaning(part["path"]),
    )


def _show_round_trip(round_trip_us: float, profiled_us: float) -> None:
    outside = round_trip_us - profiled_us
    difference = f"{outside:,.0f} µs more, for HTTP, the round trip, and this client"
    if outside < 0:
        difference = "less, so other work ran in between"
    print_line()
    print_line(
        f"Without a profile the same requests take {round_trip_us:,.0f} µs (p50) here, at "
        f"their caller: {difference}."
    )


def _meaning(path: Sequence[str]) -> str:
    if tuple(path[-2:]) == ("node", "rest"):
        return "round trip, and gRPC at both ends"
    return _MEANING.get(path[-1], "")
