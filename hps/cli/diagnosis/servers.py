"""Servers that run: whether they are ready, of which version, and what they say of themselves."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from hps import __version__
from hps.cli.diagnosis.check import Check, attempt
from hps.cli.diagnosis.clocks import clock, skew
from hps.cli.output import age, count
from hps.errors import Forbidden, HpsError, NotFound, Unauthenticated

if TYPE_CHECKING:
    from hps.client import Admin, Tls

_PATIENCE_S = 5.0
_LATE_S = 60.0


def server(url: str, api_key: str | None, tls: Tls | None, name: str = "server") -> Iterator[Check]:
    """One by its address, for requests or for administration, over HTTP or gRPC. ``tls`` is not used where
    the address is not secured."""
    secured = url.startswith(("https:", "grpcs:"))
    tls = tls if secured else None
    found = attempt(name, partial(_answers, name, url, api_key, tls))
    yield found
    if found.verdict == "FAIL" or url.startswith("grpc"):
        return
    yield attempt(f"{name}: clock", partial(_clock, f"{name}: clock", url, tls))
    from hps.client import Admin

    with Admin(url, api_key=api_key, timeout_s=_PATIENCE_S, tls=tls) as admin:
        try:
            status = admin.status()
        except NotFound:  # an address for requests
            return
        except (Unauthenticated, Forbidden) as error:
            mend = "give --api-key of role admin, to have its state looked at"
            yield Check(f"{name}: state", "WARN", str(error).partition("; ")[0], mend)
            return
        except HpsError as error:
            yield Check(f"{name}: state", "FAIL", str(error), "see its log")
            return
        yield from _state(name, status, admin)


def _answers(name: str, url: str, api_key: str | None, tls: Tls | None) -> Check:
    from hps.client import Client

    with Client(url, api_key=api_key, timeout_s=_PATIENCE_S, retries=0, tls=tls) as client:
        told = client.about()
        if not str(told.get("name", "")).startswith("hps"):
            return Check(name, "FAIL", f"{url} is not an hps server", "check the address")
        if not client.ready():
            mend = "wait while it loads, then see hps status"
            return Check(name, "FAIL", f"{url} answers but is not ready", mend)
    version = told.get("version", "")
    if version != __version__:
        found = f"{url} is ready; it is hps {version}, this is {__version__}"
        return Check(name, "WARN", found, "have all parts of one version")
    return Check(name, "OK", f"{url} is ready, hps {version}")


def _clock(name: str, url: str, tls: Tls | None) -> Check:
    from hps.client.address import address
    from hps.client.http_wire import Request
    from hps.client.rest import Http

    line = Http(address(url, tls))

    def now() -> float:
        reply = line.send(Request("GET", "/v2/health/live", {}), time.monotonic() + _PATIENCE_S)
        try:
            return email.utils.parsedate_to_datetime(reply.headers["date"]).timestamp()
        except (KeyError, ValueError):
            raise NotFound("it does not tell its time") from None

    try:
        return clock(name, skew(now, resolution_s=1.0))
    except NotFound as error:
        return Check(name, "OK", str(error))
    finally:
        line.close()


def _state(name: str, status: Mapping[str, Any], admin: Admin) -> Iterator[Check]:
    """What ``/v1/status`` and the metrics say."""
    for warning in status.get("warnings", ()):
        yield Check(f"{name}: warning", "WARN", str(warning), "see the text")
    for tier in status.get("tiers", ()):
        yield from _tier(name, tier)
    for node in status.get("lookup_nodes", ()):
        if node.get("state", "ready") != "ready":
            found = f"{node['address']} is {node['state']}: {node.get('problem', '')}"
            yield Check(f"{name}: lookup node", "WARN", found, "see that node's log")
    for stream in status.get("updates", ()):
        yield _stream(name, stream)
    yield _lag(name, admin)


def _tier(name: str, tier: Mapping[str, Any]) -> Iterator[Check]:
    label = f"{name}: {tier['name']}"
    if tier.get("problem"):
        yield Check(
            label, "WARN", f"does not answer: {tier['problem']}", f"look after {tier['name']}"
        )
    elif tier.get("circuit", "closed") != "closed":
        found = f"is passed over (circuit {tier['circuit']})"
        yield Check(
            label, "WARN", found, f"look after {tier['name']}; hps top shows when it is back"
        )
    if tier.get("writes_stopped"):
        mend = "writes wait for compactions: more tiers.rocksdb.threads, or a faster disk"
        yield Check(label, "WARN", "writes are stopped", mend)
    if tier.get("background_errors"):
        yield Check(label, "FAIL", f"{tier['background_errors']} background errors", "see its log")


def _stream(name: str, stream: Mapping[str, Any]) -> Check:
    label = f"{name}: updates of {stream.get('group', '')}"
    if stream.get("problem"):
        return Check(label, "FAIL", str(stream["problem"]), "see hps updates status")
    if stream.get("state") == "paused":
        return Check(label, "WARN", "paused", "hps updates resume")
    return Check(label, "OK", "are read")


def _lag(name: str, admin: Admin) -> Check:
    from hps import metric_names as m

    samples = admin.metrics()
    late = max((s.value for s in samples if s.name == m.UPDATE_AGE), default=0.0)
    lag = sum(s.value for s in samples if s.name == m.UPDATE_LAG)
    dead = sum(s.value for s in samples if s.name == m.UPDATE_DEAD)
    label = f"{name}: freshness"
    found = f"updates wait for {age(late)}, {count(int(lag))} messages"
    if dead:
        mend = "hps updates dlq list shows them and why"
        return Check(label, "WARN", f"{found}; {count(int(dead))} could not be taken", mend)
    if late > _LATE_S:
        return Check(
            label, "WARN", found, "hps updates status tells which stream, and what it waits for"
        )
    return Check(label, "OK", found)
