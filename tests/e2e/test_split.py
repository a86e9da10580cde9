"""Front ends, lookup nodes and ingest as processes, and a Triton: import, scores and updates of a model.

Replicas are replaced, killed and given another version under load. No request fails."""

import json
import re
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest
import tritonclient.grpc as triton
import yaml
from typer.testing import CliRunner

from benchmarks.peers.redis_server import RedisServer
from benchmarks.peers.triton import start_triton
from hps.cli.main import app
from hps.config.model_schema import ModelSpec
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.triton.export import export_dense
from hps.updates import Producer
from hps.updates.topics import native_topic
from tests.deploy.charts import NAMESPACE, ROOT, helm_template, objects, values_file
from tests.support.deployment import Deployment, Load, Part, by_grpc, by_http
from tests.support.kafka_brokers import SEES_NEW_TOPICS_SOON, make_topic, shared_broker, unique
from tests.support.prometheus import alerts, filled, looking_at, queries
from tests.support.redis_servers import need
from tests.support.small_models import RANKING, network
from tests.support.waiting import until

# What is started for the first test counts as that test's time.
pytestmark = pytest.mark.timeout(900)

USERS, ITEMS, HISTORY = [3, 40, 99], [5, -7, 33], [1, 2, 49]
DENSE = [0.25, 0.5, 0.75]
SERVE = "serve", "--role"
WIDTHS = {"user": 4, "item": 2, "history": 2, "dense": 3}


def rows(keys, dim, factor=1.0):
    return (factor * keys[:, None] / 64 + np.arange(dim) / 8).astype(np.float32)


USER_KEYS, ITEM_KEYS = np.arange(100), np.arange(-50, 50)


def scores(users, items, first):
    """The network's scores for these rows, which are indexed by key from the table's first."""
    dense = np.tile(np.float32(DENSE), (3, 1))
    parts = [users[USERS], items[np.add(ITEMS, 50)], items[np.add(HISTORY, 50)], dense]
    weights = np.linspace(first, -first, sum(WIDTHS.values()), dtype=np.float32)
    return 1 / (1 + np.exp(-np.concatenate(parts, axis=1) @ weights))


class Model:
    """One of its own in the shared broker, imported into a repository."""

    def __init__(self, folder):
        self.name = unique("clicks")
        self.folder = folder
        self.repository = folder / "models"
        self.spec = {**RANKING, "name": self.name}
        for name, keys, dim in (("users", USER_KEYS, 4), ("items", ITEM_KEYS, 2)):
            (folder / name).mkdir()
            keys.astype("<i8").tofile(folder / name / "key")
            rows(keys, dim).tofile(folder / name / "emb_vector")
        (folder / "spec.yaml").write_text(json.dumps(self.spec))
        (folder / "network.onnx").write_bytes(network())
        options = ["--name", self.name, "--to", self.repository, "--spec", folder / "spec.yaml"]
        options += ["--table", f"users={folder / 'users'}", "--dense", folder / "network.onnx"]
        command = ["model", "import", folder / "items", "--table", f"items={folder / 'items'}"]
        result = CliRunner().invoke(app, [str(word) for word in [*command, *options]])
        assert result.exit_code == 0, result.output

    def second_version(self):
        tables = {
            "users": (USER_KEYS, rows(USER_KEYS, 4, -2.0)),
            "items": (ITEM_KEYS, rows(ITEM_KEYS, 2, -2.0)),
        }
        spec = ModelSpec.model_validate(self.spec)
        write_version(self.repository, spec, 2, tables, dense=network(0.5))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    broker = shared_broker()
    made = Model(tmp_path_factory.mktemp("model"))
    make_topic(broker, native_topic(made.name), 2)
    return made


@pytest.fixture(scope="module")
def settings(model, tmp_path_factory):
    """The settings that all processes share, without the nodes' own store."""
    need("redis-server")
    redis = RedisServer(tmp_path_factory.mktemp("redis")).start()
    kafka = {
        "brokers": shared_broker().address,
        "shared_writer": "ingest",
        "shared_group": model.name,
        "options": SEES_NEW_TOPICS_SOON,
    }
    yield {
        "models": {"repository": str(model.repository)},
        "tiers": {"redis": {"addresses": [redis.address], "guard": {"deadline_ms": 5000}}},
        "updates": {"kafka": kafka},
    }
    redis.kill()


def with_kafka(settings, **given):
    return {**settings, "updates": {"kafka": {**settings["updates"]["kafka"], **given}}}


def asking(lookups):
    return {"nodes": [part.grpc for part in lookups]}


@pytest.fixture(scope="module")
def deployment(model, settings, tmp_path_factory):
    """Two front ends, started before any lookup node, two lookup nodes, and `hps ingest`."""
    folder = tmp_path_factory.mktemp("split")
    stored = {**settings, "tiers": {**settings["tiers"], "rocksdb": {}}}
    lookups = [
        Part(folder / name, with_kafka(stored, group=f"{model.name}-{name}"), *SERVE, "lookup")
        for name in ("lookup-1", "lookup-2")
    ]
    frontend_settings = {**settings, "lookup": asking(lookups)}
    frontends = [
        Part(folder / name, frontend_settings, *SERVE, "frontend")
        for name in ("frontend-1", "frontend-2")
    ]
    made = Deployment(frontends, lookups, [Part(folder / "ingest", settings, "ingest")])
    try:
        for part in frontends:
            part.start()
        for part in frontends:
            until(
                lambda part=part: part.ask("/v2/health/ready")[1].count("Connection refused") == 2
            )
            assert part.ask("/v2/health/live")[0] == 200
            assert "no lookup node is ready" in part.ask("/v2/health/ready")[1]
        for part in (*lookups, *made.others):
            part.start()
        for part in made.parts:
            part.wait()
        until(made.all_asked)
        yield made
    finally:
        made.close()


def inputs_of():
    data = {"user": USERS, "item": ITEMS, "history": HISTORY, "dense": [DENSE] * 3}
    return [
        {
            "name": name,
            "datatype": "FP32" if name == "dense" else "INT64",
            "shape": list(np.shape(values)) if name == "dense" else [3, 1],
            "data": values,
        }
        for name, values in data.items()
    ]


def triton_inputs():
    made = []
    for given in inputs_of():
        array = np.array(given["data"], np.float32 if given["name"] == "dense" else np.int64)
        made.append(triton.InferInput(given["name"], given["shape"], given["datatype"]))
        made[-1].set_data_from_numpy(array.reshape(given["shape"]))
    return made


@contextmanager
def load(deployment, model):
    """Send requests until the block ends; none of them may fail."""
    with ExitStack() as stack:
        make = {
            "http": by_http(model.name, inputs_of(), stack),
            "grpc": by_grpc(model.name, triton_inputs(), "score", stack),
        }
        with Load(deployment.frontends, make) as running:
            yield running
            running.more()
        assert not running.failures, "\n".join(
            [*running.failures, *(part.said for part in deployment.parts)]
        )


def answered(deployment, model):
    """The distinct (version, scores) that the front ends return over REST and gRPC."""
    with ExitStack() as stack:
        http, grpc = (
            by_http(model.name, inputs_of(), stack),
            by_grpc(model.name, triton_inputs(), "score", stack),
        )
        parts = deployment.frontends
        return {http(part.http)() for part in parts} | {grpc(part.grpc)() for part in parts}


def replaced(deployment, part):
    """Restart a process as a rolling update does, and wait until it is ready."""
    assert part.terminate() == 0
    part.start()
    part.wait()
    until(deployment.all_asked)


@contextmanager
def with_triton(deployment, model, settings, folder):
    """A Triton that runs the network, and a front end that uses it."""
    export_dense(Repository(model.repository).open(model.name), folder / "triton", "python")
    with start_triton(folder / "triton", timeout_s=300) as server:
        dense = {"triton": {"url": server.grpc, "timeout_ms": 60_000}}
        frontend_settings = {**settings, "lookup": asking(deployment.lookups), "dense": dense}
        part = Part(folder / "frontend", frontend_settings, *SERVE, "frontend")
        try:
            part.start()
            part.wait()
            yield Deployment([part], deployment.lookups)
        finally:
            part.kill()
        with triton.InferenceServerClient(server.grpc) as client:
            stats = client.get_inference_statistics(f"{model.name}.dense", as_json=True)
        assert int(stats["model_stats"][0]["inference_count"]) > 0


def updated(deployment, model, factor):
    """``factor`` times the items' rows as they were imported, sent by Kafka; returns the expected scores."""
    users, items = rows(USER_KEYS, 4), rows(ITEM_KEYS, 2)
    items[np.add(ITEMS, 50)] *= factor
    (ingest,) = deployment.others
    before = ingest.counted("hps_update_rows_total")
    with Producer(shared_broker().address, model=model.name, partitions=2) as producer:
        producer.send("items", np.array(ITEMS), items[np.add(ITEMS, 50)])
        producer.flush()
    until(lambda: ingest.counted("hps_update_rows_total") >= before + len(ITEMS))
    wanted = scores(users, items, -1.0)
    until(lambda: all_close(deployment, model, wanted))
    return wanted


def all_close(deployment, model, wanted):
    return all(np.allclose(s, wanted, rtol=1e-5) for _, s in answered(deployment, model))


def test_scores_follow_updates_over_every_interface(
    deployment, model, settings, tmp_path, triton_ready
):
    with with_triton(deployment, model, settings, tmp_path) as triton_frontend:
        before = scores(rows(USER_KEYS, 4), rows(ITEM_KEYS, 2), -1.0)
        for each in (deployment, triton_frontend):
            ((version, found),) = answered(each, model)
            assert version == "1"
            np.testing.assert_allclose(found, before, rtol=1e-5)
        wanted = updated(deployment, model, -0.5)
        assert len(answered(deployment, model)) == 1
        until(lambda: all_close(triton_frontend, model, wanted))


# Panels of other deployments: with GPUs, workers, batches, certificates, failures, rejections, mirrored
# requests, updates with a training step; of models that were served a day ago.
OTHER_DEPLOYMENTS = {
    *("gpus: Fetch (p99)", "gpus: Hit rate by table and version", "gpus: Fill level"),
    "gpus: Memory of GPU caches, and pinned host memory",
    *("gpus: Batches", "gpus: Batches that missed rows or failed, share"),
    *("gpus: Predictions, and those outside the lanes", "gpus: Samples per batch"),
    *("gpus: Memory used, share", "gpus: Memory used, bytes"),
    *("models: Failures by version", "models: Mean score, now and a day ago"),
    "models: Queued runs, and fallback runs without Triton",
    *("models: Mirrored requests", "models: Mirrored answers that differ, share of rows"),
    "models: Largest difference of mirrored answers (p99), and their duration (p99)",
    "models: Network behind its rows",
    *("overview: Certificates: days left", "overview: Errors", "overview: Failures by code"),
    *("overview: Failures by role", "overview: Rejected requests", "overview: Workers"),
    "overview: Batch size (mean)",
    *("tiers: Degraded lookups", "tiers: Fetches that skipped a tier"),
}
# Alerts that a slow or busy machine may rightly raise.
MACHINE_ALERTS = {
    "HpsLatencyHigh",
    "HpsLookupsDegraded",
    "HpsQueueLong",
    "HpsStoreSlow",
    "HpsMemoryNearLimit",
    "HpsDiskFull",
}


def test_dashboard_queries_return_data_and_no_alert_fires(deployment, model, program, tmp_path):
    """A real Prometheus scrapes every role."""
    unknown = [
        {**each, "data": [9999, 3, 3]} if each["name"] == "user" else each for each in inputs_of()
    ]
    targets = {part.admin: {} for part in deployment.parts}
    updated(deployment, model, -0.5)  # panels of streamed rows show nothing without an update
    with looking_at(program("prometheus"), tmp_path, targets) as prometheus:
        with load(deployment, model), ExitStack() as stack:
            ask = by_http(model.name, unknown, stack)(deployment.frontends[0].http)
            ask()
            until(lambda: len(prometheus.ask("hps_lookup_keys_total")) > 0)
            ask()
            until(
                lambda: prometheus.ask(
                    filled('rate(hps_feature_keys_total{result="defaulted"}[1m])')
                )
            )
            all_queries, empty = list(queries()), set()
            assert len(all_queries) > 80

            def all_found():  # processes are scraped one by one
                empty.clear()
                empty.update(title for title, query in all_queries if not prometheus.ask(query))
                return empty <= OTHER_DEPLOYMENTS

            with suppress(AssertionError):
                until(all_found)
            assert empty <= OTHER_DEPLOYMENTS
        raised = set()

        def none_raised():  # a late scrape makes rates 0 for a while
            raised.clear()
            raised.update(name for name, query in alerts().items() if prometheus.ask(query))
            return raised <= MACHINE_ALERTS

        with suppress(AssertionError):
            until(none_raised)
        assert raised <= MACHINE_ALERTS


def test_autoscaler_queries_return_data(deployment, model, program, tmp_path):
    """Queries of KEDA in the chart and of an adapter in the docs, on a real Prometheus that labels the
    processes as pods."""
    scalers = {
        each["metadata"]["name"]: each["spec"]["triggers"][0]["metadata"]["query"]
        for each in scaled_objects()
    }
    parts = (deployment.lookups, deployment.frontends, deployment.others)
    pods = {
        f"ranking-{role}-{n}": part.admin
        for role, of_role in zip(("lookup", "frontend", "ingest"), parts, strict=True)
        for n, part in enumerate(of_role)
    }
    targets = {admin: {"namespace": NAMESPACE, "pod": pod} for pod, admin in pods.items()}
    answered(deployment, model)
    with looking_at(program("prometheus"), tmp_path, targets) as prometheus:
        until(lambda: {e["metric"]["pod"] for e in prometheus.ask("hps_ready")} == pods.keys())
        assert scalers.keys() == {"ranking-lookup", "ranking-frontend", "ranking-ingest"}
        for name, query in scalers.items():
            until(lambda query=query: len(prometheus.ask(query)) == 1)
            (inner,) = re.findall(r"^sum\((.*)\)$", query)
            own = {pod for pod in pods if pod.startswith(f"{name}-")}
            until(lambda q=inner, own=own: {e["metric"]["pod"] for e in prometheus.ask(q)} == own)
        fronts = "|".join(pod for pod in pods if "frontend" in pod)
        query = adapter_query("hps_running_requests", f'namespace="{NAMESPACE}",pod=~"{fronts}"')
        until(lambda: len(prometheus.ask(query)) == len(deployment.frontends))


def scaled_objects():
    keda = [f"{role}.keda.enabled=true" for role in ("lookup", "frontend", "ingest")]
    values = ("--values", values_file("everything"), "--set", "lookup.autoscaling.enabled=false")
    done = helm_template(*values, "--set", ",".join(keda))
    assert done.returncode == 0, done.stderr
    return [each for each in objects(done.stdout) if each["kind"] == "ScaledObject"]


def adapter_query(series, matchers):
    """The query of an adapter with the rule of docs/kubernetes.md."""
    page = (ROOT / "docs/kubernetes.md").read_text()
    (block,) = re.findall(r"```yaml\n(# prometheus-adapter\n.*?)```", page, re.DOTALL)
    (rule,) = yaml.safe_load(block)["rules"]
    query = rule["metricsQuery"].replace("<<.Series>>", series)
    return query.replace("<<.LabelMatchers>>", matchers).replace("<<.GroupBy>>", "pod")


def test_no_request_fails_while_replicas_are_replaced(deployment, model):
    with load(deployment, model) as running:
        for part in (*deployment.lookups, *deployment.others, *deployment.frontends):
            replaced(deployment, part)
            running.more()
    assert len(running.answers) == 1  # earlier updates are kept
    updated(deployment, model, 0.25)  # and new ones are applied


def test_no_request_fails_while_a_lookup_node_is_killed(deployment, model):
    gone = deployment.lookups[0]
    with load(deployment, model) as running:
        gone.kill()
        running.more(200)
        for part in deployment.frontends:
            assert states(part)[gone.grpc] in ("unreachable", "ejected")
            assert part.ready
        gone.start()  # as a process supervisor would
        gone.wait()
        until(deployment.all_asked)
    assert len(running.answers) == 1


def test_no_request_fails_while_a_lookup_node_hangs(deployment, model):
    """Stop the process as if its machine were lost: connections stay open, and nothing arrives."""
    hangs = deployment.lookups[1]
    with load(deployment, model) as running:
        hangs.pause()
        try:
            for part in deployment.frontends:
                until(lambda part=part: states(part)[hangs.grpc] in ("unreachable", "ejected"))
                until(lambda part=part: part.ready)
            running.more(200)
        finally:
            hangs.go_on()
        until(deployment.all_asked)
        running.more()
    assert len(running.answers) == 1


def states(part):
    """The states of a front end's lookup nodes by address."""
    return {node["address"]: node["state"] for node in part.status()["lookup_nodes"]}


def test_no_request_fails_while_a_version_is_loaded(deployment, model, settings, tmp_path):
    model.second_version()
    feeds = Part(
        tmp_path / "ingest", with_kafka(settings, shared_group=f"{model.name}-2"), "ingest"
    )
    deployment.others.append(feeds)
    feeds.start()
    feeds.wait()
    path = f"/v2/repository/models/{model.name}/load"
    with load(deployment, model) as running:
        for part in deployment.lookups:
            # Refused until Redis has the version's updates, too.
            until(lambda part=part: part.ask(path, {"parameters": {"version": 2}})[0] == 200)
            running.more()
        until(lambda: running.failures or {v for v, _ in answered(deployment, model)} == {"2"})
    assert {version for version, _ in running.answers} == {"1", "2"}
    assert len(running.answers) == 2, "an answer is of two versions"
    ((_, last),) = answered(deployment, model)
    np.testing.assert_allclose(
        last, scores(rows(USER_KEYS, 4, -2.0), rows(ITEM_KEYS, 2, -2.0), 0.5), rtol=1e-5
    )
