"""Checks of running servers: readiness, version, status, and whether several are alike."""

from __future__ import annotations

import email.utils
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from hps import __version__
from hps.errors import Forbidden, HpsError, NotFound, Unauthenticated
from hps.tools.doctor.certificate_validity import shown
from hps.tools.doctor.check import DoctorCheck, attempt, catch_errors
from hps.tools.doctor.clocks import clock, least_skew
from hps.tools.doctor.server_status import state

if TYPE_CHECKING:
    from hps.client import Tls

_TIMEOUT_S = 5.0
_PARALLEL = 32


@dataclass(slots=True)
class ServerFindings:
    """Checks of one server, and the versions of hps and of its models, if known."""

    url: str
    checks: list[DoctorCheck] = field(default_factory=list)
    version: str = ""
    models: Mapping[str, int] | None = None


def servers(urls: Sequence[str], api_key: str | None, tls: Tls | None) -> Iterator[DoctorCheck]:
    """Check the servers in parallel, since one that hangs takes its time; then compare them."""
    names = ["server" if len(urls) == 1 else f"server {url}" for url in urls]
    with ThreadPoolExecutor(max(1, min(_PARALLEL, len(urls)))) as threads:
        found = list(threads.map(lambda url, name: server(url, api_key, tls, name), urls, names))
    for each in found:
        yield from each.checks
    yield from check_same_versions(found)


def server(url: str, api_key: str | None, tls: Tls | None, name: str = "server") -> ServerFindings:
    """Check the server at an address, for requests or administration, over HTTP or gRPC.

    ``tls`` is not used for an unsecured address."""
    found = ServerFindings(url)
    secured = url.startswith(("https:", "grpcs:"))
    checks = _checks(name, url, api_key, tls if secured else None, found)
    found.checks = list(catch_errors(name, checks))
    return found


def check_same_versions(found: Sequence[ServerFindings]) -> Iterator[DoctorCheck]:
    """Check that servers run one version of hps and serve the same versions of the models they share."""
    versions = {each.version for each in found if each.version}
    if len(versions) > 1:
        by_server = ", ".join(f"{each.url} {each.version}" for each in found if each.version)
        yield DoctorCheck(
            "servers", "WARN", f"of several versions: {by_server}", "have all of one version"
        )
    serving = [each for each in found if each.models is not None]
    if len(serving) < 2:
        return
    differing = []
    for model in sorted({name for each in serving for name in each.models or ()}):
        at = {each.url: (each.models or {}).get(model) for each in serving}
        if len(set(at.values())) > 1:
            said = ", ".join(f"{url} {'not' if n is None else n}" for url, n in at.items())
            differing.append(f"{model}: {said}")
    if differing:
        remedy = "load the version at the others: POST /v2/repository/models/NAME/load on their admin ports"
        yield DoctorCheck(
            "servers", "WARN", f"do not serve the same: {'; '.join(differing)}", remedy
        )
    elif len(versions) == 1:
        yield DoctorCheck(
            "servers", "OK", f"{len(serving)} serve the same versions of the same models"
        )


def _checks(
    name: str, url: str, api_key: str | None, tls: Tls | None, found: ServerFindings
) -> Iterator[DoctorCheck]:
    answers = attempt(name, partial(_answers, name, url, api_key, tls, found))
    yield answers
    if answers.verdict == "FAIL" and not found.version:
        return
    if url.startswith(("https:", "grpcs:")):
        yield _certificate(f"{name}: certificate", url, tls)
    if url.startswith("grpc"):
        return
    yield attempt(f"{name}: clock", partial(_clock, f"{name}: clock", url, tls))
    from hps.client import Admin

    with Admin(url, api_key=api_key, timeout_s=_TIMEOUT_S, tls=tls) as admin:
        try:
            status = admin.status()
        except NotFound:  # an address for requests
            return
        except (Unauthenticated, Forbidden) as error:
            remedy = "give --api-key of role admin, to check its state"
            yield DoctorCheck(f"{name}: state", "WARN", str(error), remedy)
            return
        except HpsError as error:
            yield DoctorCheck(f"{name}: state", "FAIL", str(error), "see its log")
            return
        if "models" in status:
            found.models = {
                model["name"]: int(model["version"])
                for model in status["models"]
                if model.get("current", True)
            }
        yield from state(name, status, admin)


def _answers(
    name: str, url: str, api_key: str | None, tls: Tls | None, found: ServerFindings
) -> DoctorCheck:
    from hps.client import Client

    with Client(url, api_key=api_key, timeout_s=_TIMEOUT_S, retries=0, tls=tls) as client:
        about = client.about()
        known_as = str(about.get("name", ""))
        if not known_as.startswith("hps"):
            what = f" but {known_as}" if known_as else ""
            return DoctorCheck(
                name, "FAIL", f"{url} is not an hps server{what}", "check the address"
            )
        found.version = str(about.get("version", ""))
        if not client.ready():
            remedy = "wait while it loads, then see hps status"
            return DoctorCheck(name, "FAIL", f"{url} answers but is not ready", remedy)
    if found.version != __version__:
        text = f"{url} is ready; it is hps {found.version}, this is {__version__}"
        return DoctorCheck(name, "WARN", text, "have all parts of one version")
    return DoctorCheck(name, "OK", f"{url} is ready, hps {found.version}")


def _certificate(name: str, url: str, tls: Tls | None) -> DoctorCheck:
    try:
        return shown(name, url, tls, _TIMEOUT_S)
    except OSError as error:
        return DoctorCheck(name, "WARN", f"cannot be checked: {error}", "check --tls")


def _clock(name: str, url: str, tls: Tls | None) -> DoctorCheck:
    from hps.client.address import address
    from hps.client.http_messages import Request
    from hps.client.rest import HttpConnectionPool

    line = HttpConnectionPool(address(url, tls))

    def now() -> float:
        reply = line.send(Request("GET", "/v2/health/live", {}), time.monotonic() + _TIMEOUT_S)
        try:
            return email.utils.parsedate_to_datetime(reply.headers["date"]).timestamp()
        except (KeyError, ValueError):
            return math.nan

    try:
        if math.isnan(now()):  # then the round trip is short
            return DoctorCheck(name, "OK", "it does not report its time")
        return clock(name, least_skew(now, resolution_s=1.0))
    finally:
        line.close()
