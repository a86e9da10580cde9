"""``hps conformance``: the Open Inference Protocol's checks, run against any server."""

from __future__ import annotations

from http.client import HTTPException
from typing import Annotated

import typer

from hps.cli.output import Output, OutputFormat, complain, print_json, print_table, warn
from hps.cli.targets import ApiKeyOption
from hps.errors import Unavailable

app = typer.Typer(add_completion=False)

EXAMPLES = """\b
Examples:
  hps conformance localhost:8000 localhost:8001
  hps conformance triton:8000 triton:8001 --model resnet --output json
"""


def _address(value: str) -> str:
    host, _, port = value.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() else 0
    if not host or "/" in host or not 0 < number < 1 << 16:
        raise typer.BadParameter(f"{value!r} is not host:port; localhost:8000 would be")
    return value


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
    output: Output = OutputFormat.table,
) -> None:
    """Check that a server speaks the Open Inference Protocol; exit 1 where it does not."""
    from hps.conformance import Deviation, Target
    from hps.conformance.checks import CHECKS
    from hps.conformance.sampling import samples_of

    headers = {"x-api-key": api_key} if api_key else {}
    try:
        samples, left_out = samples_of(http, headers, model or ())
    except (OSError, HTTPException, Deviation) as error:
        raise Unavailable(
            f"{http} cannot be asked what it serves: {error}; name models with --model where it has no index"
        ) from None
    for name, why in left_out.items():
        warn(f"{name} is left out, it does not answer a request made from its metadata: {why}")
    if not samples:
        raise Unavailable(f"{http} has no model that answers a request made from its metadata")
    target = Target(http, grpc, samples, headers)
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
