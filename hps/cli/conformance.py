"""``hps conformance``: run the checks of the Open Inference Protocol against any server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

import typer

from hps.cli.command_options import CommandApp, argument, option
from hps.cli.options import HTTP, Credentials, JsonReportOptions, former_urls
from hps.errors import ConfigError, Unavailable
from hps.tools.output import plural, print_line, print_problem, print_table, warn

if TYPE_CHECKING:
    from hps.client import Tls
    from hps.tools.conformance import CheckedServer

_SCHEMES = ("", "http", "https", "grpc", "grpcs")
GOOD, DIFFERS, KNOWN, LACKS = "as it should", "differs", "known", "not offered"
_STYLES = {GOOD: "green", DIFFERS: "red", KNOWN: "yellow"}

app = CommandApp(add_completion=False)

EXAMPLES = """\b
Examples:
  hps conformance
  hps conformance --server localhost:8000 --server grpc://localhost:8001
  hps conformance -s triton:8000 -s grpc://triton:8001 --model resnet --json
  hps conformance -s https://a:8000 -s grpcs://a:8001 --tls ca=ca.crt \\
      --api-key KEY
"""


def _checked(values: list[str] | None) -> list[str] | None:
    for value in values or ():
        scheme, _, at = value.rstrip("/").rpartition("://")
        host, _, port = at.rpartition(":")
        number = int(port) if port.isascii() and port.isdigit() else 0
        if scheme not in _SCHEMES or not host or "/" in host or not 0 < number < 1 << 16:
            raise typer.BadParameter(
                f"{value!r} is not host:port; localhost:8000 would be, https://… and grpcs://… where there "
                "are certificates"
            )
    return values


@dataclass(frozen=True, kw_only=True)
class ConformanceOptions(JsonReportOptions):
    urls: list[str] | None = argument(None, hidden=True, callback=_checked)
    server: list[str] | None = option(
        None, "--server", "-s", metavar="URL", show_default=HTTP, callback=_checked
    )
    """The server's HTTP or gRPC address; give the option twice for both. Without a scheme, the
    first one is HTTP."""
    model: list[str] | None = option(None, metavar="NAME")
    """Check only this model; default: all that are ready; repeatable."""
    changing: bool = option(False)
    """Also check unloading and loading a model; it is unavailable meanwhile."""
    strict: bool = option(False)
    """Known deviations of the server fail, too."""
    credentials: Credentials


@app.command(epilog=EXAMPLES)
def conformance(options: ConformanceOptions) -> None:
    """Check that a server conforms to the Open Inference Protocol and Triton's extensions.

    Works with hps and with other servers. Requests are generated from the models' metadata. Known
    deviations of a server, for example of Triton, are shown with their reason and do not fail. Exit
    code 0: the server conforms; 1: it deviates or does not answer. A request without an answer times
    out after 30 s."""
    from hps.tools.conformance.checks import CHECKS
    from hps.tools.conformance.known_deviations import known_of

    api_key = options.credentials.api_key
    headers = {"x-api-key": api_key} if api_key else {}
    addresses = former_urls(options.server, options.urls) or [HTTP]
    target, name = _target(
        addresses, options.model or (), headers, options.credentials.client_tls()
    )
    known = known_of(name)
    addresses_of = {"http": target.http, "grpc": target.grpc}
    checks = [c for c in CHECKS if addresses_of[c.protocol] and (options.changing or not c.changes)]
    rows = [_judged(check.name, *check.verdict(target), known) for check in checks]
    options.report(rows, lambda rows: _show(rows, target, name))
    failing = {DIFFERS, KNOWN} if options.strict else {DIFFERS}
    if differs := sum(row["verdict"] in failing for row in rows):
        print_problem(
            f"{differs} of {plural(len(rows), 'check')} found a deviation from the protocol"
        )
        raise typer.Exit(1)


def _show(rows: Sequence[dict[str, Any]], target: CheckedServer, name: str) -> None:
    addresses = ", ".join(address for address in (target.http, target.grpc) if address)
    models = ", ".join(sample.model for sample in target.samples)
    print_table(
        ("check", "verdict", "found"),
        [(row["check"], row["verdict"], _findings(row, name)) for row in rows],
        title=f"{addresses}{f' ({name})' if name else ''}: {models}",
        styles=_STYLES,
    )
    print_line()
    counts = {v: sum(row["verdict"] == v for row in rows) for v in (GOOD, KNOWN, LACKS)}
    print_line(", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n) + ".")


def _judged(check: str, verdict: str, found: Sequence[str], known: Any) -> dict[str, Any]:
    """Build a check's result row; ``why``: per finding, why it is known of this server, or ""."""
    from hps.tools.conformance.known_deviations import reasons

    why = reasons(known, check, found) if verdict == DIFFERS else []
    if why and all(why):
        verdict = KNOWN
    return {"check": check, "verdict": verdict, "found": [*found], "why": why}


def _findings(row: dict[str, Any], server: str) -> str:
    why = row["why"] or [""] * len(row["found"])
    return "\n".join(
        f"{text}  [{server}: {reason}]" if reason else text
        for text, reason in zip(row["found"], why, strict=True)
    )


def _target(
    addresses: Sequence[str], models: Sequence[str], headers: dict[str, str], tls: Tls | None
) -> tuple[CheckedServer, str]:
    """Return the server with sample requests that it answers, and the name that it reports.

    Raises ConfigError, Unavailable."""
    import grpc

    from hps.tools.conformance import CheckedServer, Deviation
    from hps.tools.conformance.sampling import named, samples_of

    by = _by_protocol(addresses)
    (http, http_tls), (rpc, rpc_tls) = (
        _secured(by[protocol], tls) if protocol in by else ("", None)
        for protocol in ("http", "grpc")
    )
    bare = CheckedServer(http, rpc, (), headers, http_tls, rpc_tls)
    try:
        samples, left_out = samples_of(bare, models)
        if http and not samples:  # the server may accept tensors only as JSON
            bare = replace(bare, binary=False)
            samples, left_out = samples_of(bare, models)
        name = named(bare)
    except (OSError, HTTPException, Deviation, grpc.RpcError) as error:
        why = error.details() if isinstance(error, grpc.RpcError) else error
        raise Unavailable(
            f"{http or rpc} does not list its models: {why}; name models with --model if it has no index"
        ) from None
    for model, why in left_out.items():
        warn(f"{model} skipped: no answer to a request generated from its metadata: {why}")
    if not samples:
        raise Unavailable(
            f"{http or rpc} has no model that answers a request made from its metadata; name others with "
            "--model"
        )
    return replace(bare, samples=samples), name


def _by_protocol(addresses: Sequence[str]) -> dict[str, str]:
    if len(addresses) > 2:
        raise ConfigError("give the address of its HTTP and that of its gRPC, of one server")
    found: dict[str, str] = {}
    for address in addresses:
        scheme = address.rpartition("://")[0]
        protocol = scheme.removesuffix("s") or ("grpc" if "http" in found else "http")
        if protocol in found:
            raise ConfigError(f"both addresses are of {protocol}; give one of each protocol")
        found[protocol] = address.rstrip("/")
    return found


def _secured(value: str, tls: Tls | None) -> tuple[str, Tls | None]:
    """Split ``value`` into ``host:port`` and its TLS settings; None: plain text."""
    from hps.client import Tls

    scheme, _, at = value.rpartition("://")
    if tls is None and scheme in ("https", "grpcs"):
        return at, Tls()
    if tls is not None and scheme in ("http", "grpc"):
        raise ConfigError(
            f"--tls needs a scheme with TLS, not {value}; write {scheme}s://{at}, or remove --tls"
        )
    return at, tls
