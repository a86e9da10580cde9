"""``hps conformance``: the Open Inference Protocol's checks, run against any server."""

from __future__ import annotations

from http.client import HTTPException
from typing import TYPE_CHECKING, Annotated

import typer

from hps.cli.output import Output, OutputFormat, complain, print_json, print_table, warn
from hps.cli.targets import ApiKeyOption, TlsOption, tls_of
from hps.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from hps.client import Tls

_SCHEMES = ("", "http", "https", "grpc", "grpcs")

app = typer.Typer(add_completion=False)

EXAMPLES = """\b
Examples:
  hps conformance localhost:8000 localhost:8001
  hps conformance triton:8000 triton:8001 --model resnet --output json
  hps conformance https://a:8000 grpcs://a:8001 --tls ca=ca.crt --api-key KEY
"""


def _address(value: str) -> str:
    scheme, _, at = value.rpartition("://")
    host, _, port = at.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() else 0
    if scheme not in _SCHEMES or not host or "/" in host or not 0 < number < 1 << 16:
        raise typer.BadParameter(
            f"{value!r} is not host:port; localhost:8000 would be, https://… and grpcs://… where there are "
            "certificates"
        )
    return value


def _secured(value: str, tls: Tls | None) -> tuple[str, Tls | None]:
    """``host:port``, and the certificates it is spoken to with."""
    from hps.client import Tls

    scheme, _, at = value.rpartition("://")
    if tls is None and scheme in ("https", "grpcs"):
        return at, Tls()
    if tls is not None and scheme in ("http", "grpc"):
        raise ConfigError(f"{value} is not secured; write {scheme}s://{at}, or leave --tls out")
    return at, tls


HttpArgument = Annotated[
    str, typer.Argument(metavar="HTTP", help="host:port of its HTTP.", callback=_address)
]
GrpcArgument = Annotated[
    str, typer.Argument(metavar="GRPC", help="host:port of its gRPC.", callback=_address)
]


@app.command(epilog=EXAMPLES)
def conformance(
    http: HttpArgument,
    grpc: GrpcArgument,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Ask this model only; may be repeated."),
    ] = None,
    changing: Annotated[
        bool, typer.Option("--changing", help="Also unload a model and load it again.")
    ] = False,
    api_key: ApiKeyOption = None,
    tls: TlsOption = None,
    output: Output = OutputFormat.table,
) -> None:
    """Check that a server speaks the Open Inference Protocol; exit 1 where it does not."""
    from hps.conformance import Deviation, Target
    from hps.conformance.checks import CHECKS
    from hps.conformance.sampling import samples_of

    headers = {"x-api-key": api_key} if api_key else {}
    (http, http_tls), (grpc, grpc_tls) = (_secured(at, tls_of(tls)) for at in (http, grpc))
    try:
        samples, left_out = samples_of(http, headers, model or (), tls=http_tls)
    except (OSError, HTTPException, Deviation) as error:
        raise Unavailable(
            f"{http} cannot be asked what it serves: {error}; name models with --model where it has no index"
        ) from None
    for name, why in left_out.items():
        warn(f"{name} is left out, it does not answer a request made from its metadata: {why}")
    if not samples:
        raise Unavailable(f"{http} has no model that answers a request made from its metadata")
    target = Target(http, grpc, samples, headers, http_tls, grpc_tls)
    checks = [check for check in CHECKS if changing or not check.changes]
    rows = [(check.name, *check.verdict(target)) for check in checks]
    if output is OutputFormat.json:
        columns = ("check", "verdict", "found")
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table(
            ("check", "verdict", "found"),
            [(name, verdict, "\n".join(found)) for name, verdict, found in rows],
            title=f"{http}, {grpc}: {', '.join(sample.model for sample in samples)}",
            styles={"as it should": "green", "differs": "red"},
        )
    if differs := sum(verdict == "differs" for _, verdict, _ in rows):
        complain(f"{differs} of {len(rows)} checks find something else than the protocol says")
        raise typer.Exit(1)
