"""Dashboards, alerts and runbooks: what they name is there, and they do what they say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import typer
import yaml
from prometheus_client.parser import text_string_to_metric_families
from typer.core import TyperGroup

from benchmarks.peers.hps_server import Hps, start_hps
from hps.cli.main import app
from hps.config.schema import Settings
from hps.config.schema_paths import settings_of
from hps.observability import metric_names as m
from hps.observability.metric_scheduler import SCHEDULER
from hps.observability.metric_table import METRICS
from hps.observability.metric_traffic import TRAFFIC
from hps.observability.metric_triton import TRITON
from hps.types import Source
from tests.support.promql import grouped, selected
from tests.support.small_models import write_models
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "helm/hps/files/alerts.yaml"
ALERT_TESTS = sorted((ROOT / "deploy/prometheus").glob("alerts_*test.yaml"))
DASHBOARDS = sorted((ROOT / "helm/hps/files/dashboards").glob("*.json"))
RUNBOOKS = ROOT / "docs/runbooks"

SPECS = {spec.name: spec for spec in (*METRICS, *TRITON)}
# Given by Prometheus, and by where it finds its targets.
OF_TARGETS = {"job", "instance", "namespace"}
# What a server without GPUs, Redis, Kafka, Triton and lookup nodes never has.
ELSEWHERE = {
    m.GPU_MEMORY_USED,
    m.GPU_MEMORY_TOTAL,
    m.CERTIFICATE_EXPIRY,
    m.UPDATE_LOST,
    m.UPDATE_RESTARTED,
    m.UPDATE_HOLD_EXPIRED,
    m.UPDATE_HELD,
    m.MODEL_DENSE_SKEW,
    m.MODEL_STEP_SKEW,
    m.LOOKUP_NODE_UP,
    m.LOOKUP_NODE_RETRIES,
    m.LOOKUP_NODE_REQUESTS,
    m.LOOKUP_NODE_RUNNING,
    m.LOOKUP_NODE_EJECTIONS,
    m.LOOKUP_DEGRADED,
    m.TIER_SKIPPED,
    m.TABLE_BYTES,
    m.EXPIRED_ROWS,
    m.DENSE_FALLBACKS,
    m.MODEL_LABEL,
    *(spec.name for spec in TRAFFIC if "_shadow_" in spec.name),
    m.DOWNLOAD_BYTES,
    m.DOWNLOAD_SECONDS,
    m.DOWNLOAD_FAILURES,
    *(spec.name for spec in SCHEDULER),
    "nv_gpu_memory_total_bytes",
    "nv_gpu_memory_used_bytes",
}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERT_RULES = {rule["alert"]: rule for rule in rules() if "alert" in rule}
RECORDED = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}


def panels(path: Path) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]


EXPRESSIONS = [
    *(pytest.param(rule["expr"], id=rule.get("alert", rule.get("record"))) for rule in rules()),
    *(
        pytest.param(target["expr"], id=f"{path.stem}: {panel['title']} {target['refId']}")
        for path in DASHBOARDS
        for panel in panels(path)
        for target in panel["targets"]
    ),
]

# -- a running server ------------------------------------------------------------------------------

USED = {
    "inputs": [
        {"name": "user", "datatype": "INT64", "shape": [1, 1], "data": [7]},
        {"name": "item", "datatype": "INT64", "shape": [2, 1], "data": [3, 9999]},
        {"name": "history", "datatype": "INT64", "shape": [2, 2], "data": [1, 2, 3, 4]},
        {"name": "dense", "datatype": "FP32", "shape": [2, 3], "data": [0.5] * 6},
    ]
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hps]:
    """With a worker, batches and a folder of updates; it has answered, failed, refused, and taken rows."""
    folder = tmp_path_factory.mktemp("monitored")
    write_models(folder / "models")
    (folder / "updates").mkdir()
    limits = {
        "workers": 1,
        "batching": {},
        "max_body_bytes": 4096,
        "metrics": {"triton_names": True},
    }
    updates = {"directory": {"path": str(folder / "updates")}}
    with start_hps(folder, limits=limits, updates=updates) as server:
        infer = f"http://{server.address}/v2/models/clicks/infer"
        for body, status in ((USED, 200), ({"inputs": []}, 400), ({"inputs": "x" * 5000}, 413)):
            assert requests.post(infer, json=body, timeout=60).status_code == status
        rows = {"keys": [5], "vectors": [[1.0] * 8]}
        there = f"http://{server.admin}/v1/tables/words/words/rows"
        assert requests.post(there, json=rows, timeout=60).status_code == 200
        yield server


@pytest.fixture(scope="module")
def exposed(server: Hps) -> dict[str, Any]:
    """The server's metrics, by their names in the table."""

    def read() -> dict[str, Any]:
        text = requests.get(f"http://{server.admin}/metrics", timeout=60).text
        found: dict[str, Any] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                # The parser gives every counter that ending.
                shorter = re.sub("_(bucket|sum|count|total)$", "", sample.name)
                name = sample.name if sample.name in SPECS else shorter
                found.setdefault(name, []).append(sample)
        return found

    until(lambda: m.TIER_KEYS in read() and m.PROMOTIONS in read())
    return read()


def test_every_metric_of_the_table_is_recorded(exposed: dict[str, Any]) -> None:
    assert SPECS.keys() - exposed.keys() == ELSEWHERE
    for name, spec in SPECS.items():
        for sample in exposed.get(name, ()):
            assert sample.labels.keys() - {"le"} == set(spec.labels), sample


def test_worker_metrics_are_counted_once(exposed: dict[str, Any]) -> None:
    def one(name: str, suffix: str = "", **labels: str) -> float:
        (value,) = [
            sample.value
            for sample in exposed[name]
            if sample.name == name + suffix and labels.items() <= sample.labels.items()
        ]
        return float(value)

    clicks = {"model": "clicks", "version": "1"}
    assert one(m.SCORES, "_count", **clicks, output="score") == 2
    assert one(m.SCORES, "_sum", **clicks, output="score") > 0
    of_items = {**clicks, "feature": "item"}
    assert one(m.FEATURE_KEYS, **of_items, result="found") == 1
    assert one(m.FEATURE_KEYS, **of_items, result="defaulted") == 1
    assert one(m.FEATURE_KEYS, **clicks, feature="history", result="found") == 4
    assert one(m.REQUEST_SECONDS, "_count", **clicks, code="200") == 1
    assert one(m.READY, role="node") == one(m.READY, role="worker") == one(m.WORKERS) == 1
    for process in ("node", "worker"):
        assert one(m.PROCESS_CPU, process=process) > 0
        assert one(m.PROCESS_MEMORY, process=process, kind="anonymous") > 1 << 20


def test_triton_metric_names_have_triton_semantics(exposed: dict[str, Any]) -> None:
    def total(name: str, **labels: str) -> float:
        wanted = {"model": "clicks", "version": "1", **labels}
        return sum(s.value for s in exposed[name] if wanted.items() <= s.labels.items())

    assert total("nv_inference_request_success") == total("nv_inference_exec_count") == 1
    assert total("nv_inference_count") == 2  # samples
    assert total("nv_inference_request_failure", reason="OTHER") == 2
    assert total("nv_inference_pending_request_count") == 0
    stages = ("queue", "compute_input", "compute_infer", "compute_output")
    parts = sum(total(f"nv_inference_{stage}_duration_us") for stage in stages)
    assert 0 < parts <= total("nv_inference_request_duration_us") <= parts + len(stages)


# -- what is read of them ----------------------------------------------------------------------------


def labels_of(name: str) -> set[str] | None:
    """Labels of a metric by its name in an expression; None if there is no such metric."""
    if name in RECORDED:
        return grouped(RECORDED[name])
    spec = SPECS.get(name)
    if spec is None and (cut := re.sub("_(bucket|sum|count)$", "", name)) in SPECS:
        spec = SPECS[cut] if SPECS[cut].kind == "histogram" else None
        return None if spec is None else {*spec.labels, *(["le"] if "_bucket" in name else [])}
    if spec is not None:
        return None if spec.kind == "histogram" else set(spec.labels)
    return set() if name in ("up", "process_start_time_seconds") else None


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_name_existing_metrics_and_labels(
    expression: str, exposed: dict[str, Any]
) -> None:
    everywhere = set(OF_TARGETS)
    assert selected(expression)
    for name, matchers in selected(expression):
        labels = labels_of(name)
        assert labels is not None, f"there is no metric {name}"
        everywhere |= labels
        for label, value in matchers:
            assert label in labels | OF_TARGETS, f"{name} has no label {label}"
            if label not in OF_TARGETS | {"code", "model"}:
                for each in re.split(r"\|", value):
                    assert is_known(name, label, each, exposed), f'{name}{{{label}="{each}"}}'
    assert grouped(expression) <= everywhere


def is_known(name: str, label: str, value: str, exposed: dict[str, Any]) -> bool:
    """Return True if a label may have that value: a server exposes it, or the metric's help names it."""
    table = name if name in SPECS else re.sub("_(bucket|sum|count)$", "", name)
    seen = {sample.labels.get(label) for sample in exposed.get(table, ())}
    if label == "tier":
        seen |= {source.name.lower() for source in Source}
    return value in seen or re.search(rf"\b{value}\b", SPECS[table].help) is not None


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: str(path.stem))
def test_dashboard_panels_are_complete(path: Path) -> None:
    board = json.loads(path.read_text())
    variables = {each["name"] for each in board["templating"]["list"]}
    assert "datasource" in variables
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels(path):
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            names = [name for name, _ in selected(target["expr"])]
            own = set().union(*(labels_of(name) or set() for name in names)) | OF_TARGETS
            assert legend <= (grouped(target["expr"]) or own), panel["title"]
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables | {"__rate_interval"}


def test_dashboard_names_are_unique() -> None:
    boards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert len({board["uid"] for board in boards}) == len(boards) >= 5


# -- alerts ------------------------------------------------------------------------------------------


def test_every_alert_has_description_and_runbook() -> None:
    index = (RUNBOOKS / "README.md").read_text()
    for name, rule in ALERT_RULES.items():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        page = ROOT / rule["annotations"]["runbook_url"]
        assert page == RUNBOOKS / f"{name}.md"
        words = page.read_text()
        assert words.startswith(f"# {name}\n")
        lasts = f", for {rule['for']}" if "for" in rule else ""
        assert f"Severity {rule['labels']['severity']}{lasts}." in words
        assert f"[{name}]({name}.md) | {rule['labels']['severity']} |" in index
    assert {path.stem for path in RUNBOOKS.glob("Hps*.md")} == ALERT_RULES.keys()


@pytest.mark.parametrize("path", sorted(RUNBOOKS.glob("*.md")), ids=lambda path: str(path.stem))
def test_runbooks_name_existing_commands_metrics_and_settings(path: Path) -> None:
    words = path.read_text()
    for command in re.findall(r"(?:^|`|; do )hps ([^`\n#;|]*)", words, re.MULTILINE):
        assert is_command(command.split()), command
    keys = {key for key, _ in settings_of(Settings)}
    known = {key.rsplit(".", n)[0] for key in keys for n in range(key.count(".") + 1)}
    groups = {key.split(".")[0] for key in keys}
    for setting in re.findall(r"`([a-z_]+(?:\.[a-zA-Z_]+)+)\b[^`/]*`", words):
        if setting.split(".")[0] in groups:
            assert re.sub("MODEL", "*", setting) in known, setting
    for link in re.findall(r"\]\(([^)#]+)", words):
        assert (path.parent / link).exists(), link
    for metric in re.findall(r"\bhps_[a-z_]+[a-z]\b", words):
        if metric != "hps_stale_s":
            begins = any(name.startswith(metric) for name in SPECS)
            assert begins or labels_of(metric) is not None, metric


def is_command(words: list[str]) -> bool:
    """Return True if there is a command of that name with these options and number of arguments."""
    command: Any = typer.main.get_command(app)
    while isinstance(command, TyperGroup) and words:
        context = command.context_class(command)
        if command.get_command(context, words[0]) is None:
            return False
        _, command, words = command.resolve_command(context, words)
    options = {name: each for each in command.params for name in (*each.opts, *each.secondary_opts)}
    given = iter(words)
    arguments = 0
    for word in given:
        if not word.startswith("-"):
            arguments += 1
        elif word not in (*options, "--help"):
            return False
        elif word in options and not options[word].is_flag:
            next(given)
    most = [each.nargs for each in command.params if each.param_type_name == "argument"]
    return -1 in most or arguments <= sum(most)


@pytest.mark.parametrize(
    "wrong",
    ["config show hps.yaml", "config shown", "status --amdin http://HOST:8002", "nothing"],
)
def test_command_check_rejects_unknown_commands(wrong: str) -> None:
    assert not is_command(wrong.split())


def test_every_alert_is_tested() -> None:
    tests = [test for path in ALERT_TESTS for test in yaml.safe_load(path.read_text())["tests"]]
    assert {test["name"] for test in tests} == ALERT_RULES.keys()
    for test in tests:
        (expression_test,) = test["promql_expr_test"]
        fired = [each["labels"] for each in expression_test["exp_samples"]]
        assert fired
        assert all(f'alertname="{test["name"]}"' in labels for labels in fired)
        # The input also has a healthy series, which must not fire.
        assert "good" in str(test["input_series"])


def promtool(program: Callable[[str], str], *arguments: Any, cwd: Path) -> str:
    command = [program("promtool"), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_promtool_alert_tests_pass(program: Callable[[str], str], tmp_path: Path) -> None:
    assert not promtool(program, "check", "rules", ALERTS, cwd=ROOT)
    assert not promtool(program, "test", "rules", *ALERT_TESTS, cwd=ROOT)
    # The tests would notice: no alert fires any more.
    silent = yaml.safe_load(ALERTS.read_text())
    for group in silent["groups"]:
        group["rules"] = [{**rule, "expr": "vector(1) > 2"} for rule in group["rules"]]
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(silent))
    names = [group["name"] for group in silent["groups"]]
    for path in ALERT_TESTS:
        assert yaml.safe_load(path.read_text())["group_eval_order"] == names
        tests = yaml.safe_load(path.read_text()) | {"rule_files": ["alerts.yaml"]}
        (tmp_path / path.name).write_text(yaml.safe_dump(tests))
    said = promtool(program, "test", "rules", *tmp_path.glob("*test.yaml"), cwd=tmp_path)
    assert len(re.findall(r"got: ?nil", said)) == len(ALERT_RULES), said[:2000]


def test_prometheus_and_grafana_are_configured(
    program: Callable[[str], str], tmp_path: Path
) -> None:
    """A folder with the files side by side, as compose mounts them."""
    configuration = shutil.copy(ROOT / "deploy/prometheus/prometheus.yml", tmp_path)
    shutil.copy(ALERTS, tmp_path)
    assert not promtool(program, "check", "config", configuration, cwd=tmp_path)
    jobs = yaml.safe_load(Path(configuration).read_text())["scrape_configs"]
    (targets,) = [job["static_configs"][0]["targets"] for job in jobs if "hps" in job["job_name"]]
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert {target.removesuffix(":8002") for target in targets} <= services.keys()
    provisioning = ROOT / "deploy/grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = yaml.safe_load((provisioning / "dashboards/hps.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
