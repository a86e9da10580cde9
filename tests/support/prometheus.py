"""A real Prometheus that scrapes test servers, and the queries of alerts and dashboards."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.peers.process import free_ports, serving

_ROOT = Path(__file__).parents[2]
ALERTS = _ROOT / "helm/hps/files/alerts.yaml"
DASHBOARDS = sorted((_ROOT / "helm/hps/files/dashboards").glob("*.json"))
# What stands for all in Grafana, and a range in which there are some looks.
_VARIABLES = dict.fromkeys(("namespace", "job", "role", "instance", "model"), ".*")
_RANGE = {"__rate_interval": "2m"}


class Prometheus:
    """One that runs; see `looking_at`."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The current value of an expression: samples, each with its labels (``metric``)."""
        query = urllib.parse.urlencode({"query": expression})
        url = f"http://{self._address}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            found: list[dict[str, Any]] = json.loads(answer.read())["data"]["result"]
            return found


@contextmanager
def looking_at(
    program: str, folder: Path, targets: Mapping[str, Mapping[str, str]]
) -> Iterator[Prometheus]:
    """``program``, with all data in ``folder``, looks at the admin ports ``targets`` each second, and at the
    product's rules as often. What it finds at a target has the labels given with it."""
    rules = yaml.safe_load(ALERTS.read_text())
    for group in rules["groups"]:
        group["interval"] = "1s"
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {
                "job_name": "hps",
                "static_configs": [
                    {"targets": [target], "labels": dict(labels)}
                    for target, labels in targets.items()
                ],
            }
        ],
    }
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    (port,) = free_ports(1)
    command = [
        program,
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with serving(command, port, ready_path="/-/ready") as server:
        yield Prometheus(server.address)


def alerts() -> Mapping[str, str]:
    """The expression of each alert."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return {
        rule["alert"]: rule["expr"]
        for group in groups
        for rule in group["rules"]
        if "alert" in rule
    }


def queries() -> Iterator[tuple[str, str]]:
    """Each panel's board and title, and its expression with all variables selected."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.stem}: {panel['title']}", filled(target["expr"])


def filled(expression: str) -> str:
    for name, value in {**_VARIABLES, **_RANGE}.items():
        expression = expression.replace(f"${name}", value)
    return expression
