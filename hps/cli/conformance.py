"""``hps conformance``: the Open Inference Protocol's checks, run against any server."""

from __future__ import annotations

from typing import Annotated

import typer

from hps.cli.output import Output, OutputFormat, complain, print_json, print_table
from hps.cli.targets import ApiKeyOption
from hps.errors import Unavailable

app = typer.Typer(add_completion=False)

EXAMPLES = """\b
Examples:
  hps conformance localhost:8000 localhost:8001
  hps conformance triton:8000 triton:8001 --model resnet --output json
"""


@app.command(epilog=EXAMPLES)
def conformance(
    http: Annotated[str, typer.Argument(metavar="HTTP", help="host:port of its HTTP.")],
    grpc: Annotated[str, typer.Argument(metavar="GRPC", help="host:port of its gRPC.")],
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
        samples = samples_of(http, headers)
    except (OSError, Deviation) as error:
        raise Unavailable(f"{http} cannot be asked what it serves: {error}") from None
    samples = tuple(each for each in samples if not model or each.model in model)
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
