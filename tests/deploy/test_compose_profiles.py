"""The profiles of ``docker-compose.yml``, started in addition to the services without one:
observability, load, a GPU. The profile triton is in `test_compose`."""

from __future__ import annotations

import json
import re
import secrets
import urllib.error
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.client import Client
from hps.errors import Unauthenticated
from tests.deploy.compose_file import ROOT, of_hps
from tests.deploy.stack import (
    CORE,
    PATIENCE_S,
    START_S,
    UP,
    Stack,
    hardened,
    logits,
    of_profile,
)
from tests.deploy.test_monitoring import DASHBOARDS, panels, rules
from tests.support.waiting import until

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(3600)]


def test_observability_profile(stack: Stack, clicks: str) -> None:
    """Prometheus scrapes every process of hps, evaluates the alerts, and answers each panel's query."""
    stack.up("triton")
    hardened(stack, stack.up("observability"))

    def query_prometheus(path: str, **parameters: str) -> Any:
        answer = stack.get(
            "PROMETHEUS_PORT", f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        )
        assert answer["status"] == "success"
        return answer["data"]

    def up() -> set[str]:
        targets = query_prometheus("targets")["activeTargets"]
        return {each["labels"]["instance"] for each in targets if each["health"] == "up"}

    of_ours = {f"{name}:8002" for name in (*CORE, "frontend-triton") if name in of_hps()}
    until(lambda: up() >= of_ours, PATIENCE_S)
    until(
        lambda: all(
            group["lastEvaluation"][:4] != "0001" for group in query_prometheus("rules")["groups"]
        )
    )
    reported_rules = [
        rule for group in query_prometheus("rules")["groups"] for rule in group["rules"]
    ]
    assert len(reported_rules) == len(rules())
    assert {rule["health"] for rule in reported_rules} == {"ok"}
    firing = query_prometheus(
        "query", query='ALERTS{alertname=~"HpsDown|HpsNotReady",alertstate="firing"}'
    )
    assert firing["result"] == []
    ready = query_prometheus("query", query="sum(hps_ready)")["result"]
    assert float(ready[0]["value"][1]) == len(of_ours)

    boards = {json.loads(path.read_text())["title"] for path in DASHBOARDS}
    assert {board["title"] for board in stack.get("GRAFANA_PORT", "/api/search")} == boards
    (source,) = stack.get("GRAFANA_PORT", "/api/datasources")
    assert source["url"] == "http://prometheus:9090"
    for path in DASHBOARDS:
        for panel in panels(path):
            for target in panel["targets"]:
                query_prometheus("query", query=re.sub(r"\$__rate_interval", "1m", target["expr"]))
    for profile in ("observability", "triton"):
        stack.project("--profile", profile, "stop", *of_profile(profile))


def test_load_profile_ends_without_failed_requests(stack: Stack, clicks: str) -> None:
    """The load profile exits with 0 when no request failed."""
    print(stack.project.once("load"))


def test_gpu_profile(stack: Stack, clicks: str) -> None:
    """Without a GPU, the server starts if none is required, else it reports the missing one."""
    stack.engine.make_gpu_image()
    hardened(stack, stack.up("gpu"))
    before = logits_of(stack.url("GPU_HTTP_PORT"))
    np.testing.assert_allclose(before, logits_of(f"http://{stack.front.http}"), rtol=0, atol=1e-5)
    required = ("--env", "HPS__TIERS__GPU__USE=required")
    with pytest.raises(AssertionError, match=r"tiers\.gpu\.use is required, but"):
        stack.project.once(*required, "node-gpu")
    stack.project("--profile", "gpu", "stop", "node-gpu")


def logits_of(url: str) -> np.ndarray:
    with Client(url) as client:
        return logits(client)


def test_services_require_api_keys_if_configured(stack: Stack, clicks: str, tmp_path: Path) -> None:
    """``deploy/compose/keys.yaml`` over the file, on the services as they run."""
    keys = {name: secrets.token_hex(16) for name in ("client", "frontend")}
    entries = [{"name": name, "role": "read", "key": key} for name, key in keys.items()]
    (tmp_path / "keys.yaml").write_text(json.dumps(entries))
    (tmp_path / "frontend.key").write_text(keys["frontend"])
    for file in tmp_path.iterdir():
        file.chmod(0o640)
    names = {"HPS_KEYS": "keys.yaml", "HPS_FRONTEND_KEY": "frontend.key"}
    settings = tmp_path / "keys.env"
    settings.write_text("".join(f"{k}={tmp_path / name}\n" for k, name in names.items()))
    over = ("--file", f"{ROOT}/deploy/compose/keys.yaml", "--env-file", str(settings))
    stack.project(*over, *UP, timeout=START_S)
    url = f"http://{stack.front.http}"
    with Client(url) as client, pytest.raises(Unauthenticated):
        logits(client)
    with Client(url, api_key=keys["client"]) as client:
        assert len(logits(client))
    with pytest.raises(urllib.error.HTTPError, match="401"):
        stack.get("LOOKUP_1_ADMIN_PORT", "/v1/status")
