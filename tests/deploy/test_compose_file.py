"""``docker-compose.yml``: what holds for every service, and that all it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from hps.cli.ingest import app as ingest_app
from hps.cli.serve import app as serve_app
from hps.config import load_config
from hps.config.auth import check_exposure
from tests.deploy.compose_file import ROOT, compose, defaults, example, of_hps, services, serving

EVERY = sorted(services())
LONG_RUNNING = sorted(name for name, s in services().items() if s["restart"] != "no")
PROFILES = {"triton", "gpu", "observability", "load"}
CORE = {"demo", "frontend", "lookup-1", "lookup-2", "ingest", "redis", "kafka"}


def test_services_without_a_profile() -> None:
    assert {name for name, s in services().items() if "profiles" not in s} == CORE
    assert {p for s in services().values() for p in s.get("profiles", ())} == PROFILES


def test_example_has_every_variable_with_its_default() -> None:
    shown = example()
    for name, given in defaults().items():
        assert set(given) == {shown.get(name)}, f"{name} in .env.example and docker-compose.yml"
    assert shown.keys() == defaults().keys()


@pytest.mark.parametrize("name", EVERY)
def test_services_are_hardened(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    limits = service["deploy"]["resources"]["limits"]
    assert limits["cpus"]
    assert limits["memory"]
    assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*", service["image"]), "a version, not `latest`"


@pytest.mark.parametrize("name", LONG_RUNNING)
def test_running_services_have_healthcheck_and_restart_policy(name: str) -> None:
    service = services()[name]
    assert service["restart"] == "unless-stopped"
    form, *words = service["healthcheck"]["test"]
    assert form == "CMD"  # no shell in between: an image need not have one
    assert not any(re.search(r"\s", word) for word in words)
    assert service["healthcheck"].keys() >= {"interval", "timeout", "retries", "start_period"}


def test_dependencies_wait_for_health() -> None:
    for service in services().values():
        for other, how in service.get("depends_on", {}).items():
            once = services()[other]["restart"] == "no"
            wanted = "service_completed_successfully" if once else "service_healthy"
            assert how == {"condition": wanted}
            assert set(services()[other].get("profiles", ())) <= set(service.get("profiles", ()))


def test_mounted_files_and_volumes_exist() -> None:
    volumes = compose()["volumes"]
    used = set()
    for service in services().values():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (ROOT / source).exists(), source
                assert mount.endswith(":ro")
            else:
                used.add(source)
    assert used == volumes.keys()


@pytest.mark.parametrize("name", sorted(serving()))
def test_the_configuration_is_valid_for_each_service(name: str) -> None:
    """Read the settings from the service's environment and command; reject unknown ones."""
    service = serving()[name]
    command, *options = service["command"]
    app = {"serve": serve_app, "ingest": ingest_app}[command]
    parsed = get_command(app).make_context(command, list(options))
    mounted = {m.split(":")[1]: m.split(":")[0] for m in service["volumes"]}
    path = ROOT / mounted["/etc/hps/config.yaml"]
    assert not parsed.params.get("role"), "in the environment, where `exec … hps doctor` sees it"
    configuration = load_config(path, environ=service.get("environment", {}))
    assert configuration.warnings == ()
    settings = configuration.settings
    check_exposure(settings)
    kept = {str(settings.models.repository), str(settings.tiers.rocksdb.path.parent)}
    assert kept <= {"/var/lib/hps/models", "/var/lib/hps/rocksdb"}
    if "/var/lib/hps/rocksdb" not in mounted:
        assert settings.server.role == "frontend" or command == "ingest", "no volume, no rows"


def test_services_have_the_role_of_their_name() -> None:
    for name, service in serving().items():
        role = service.get("environment", {}).get("HPS__SERVER__ROLE", "all")
        assert name.startswith("node" if role == "all" else role), name


def test_service_addresses_use_existing_names() -> None:
    settings = load_config(ROOT / "deploy/compose/config.yaml").settings
    names = [node.rpartition(":")[0] for node in settings.lookup.nodes]
    assert names == [name for name in services() if name.startswith("lookup-")]
    assert settings.tiers.redis is not None
    assert settings.updates.kafka is not None
    for address in (*settings.tiers.redis.addresses, settings.updates.kafka.brokers):
        assert address.partition(":")[0] in services()
    for name in names:
        assert services()[name]["hostname"] == name, "the reader's name, over restarts"


def test_stop_grace_period_covers_the_drain() -> None:
    server = load_config(ROOT / "deploy/compose/config.yaml").settings.server
    for service in serving().values():
        assert float(service["stop_grace_period"].removesuffix("s")) > (
            server.drain_delay_s + server.drain_s
        )


def test_prometheus_scrapes_every_service() -> None:
    text = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
    (job,) = [j for j in yaml.safe_load(text)["scrape_configs"] if j["job_name"] == "hps"]
    core = {f"{name}:8002" for name, s in serving().items() if "profiles" not in s}
    assert core == set(job["static_configs"][0]["targets"])
    assert serving().keys() - {name.removesuffix(":8002") for name in core} == set(
        job["dns_sd_configs"][0]["names"]
    )


def test_page_lists_every_service_and_variable() -> None:
    page = (Path(ROOT) / "docs/containers.md").read_text()
    for name in of_hps():
        assert f"`{name}`" in page, name


def test_key_file_names_existing_services_and_settings() -> None:
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (ROOT / "deploy/compose/keys.yaml").read_text())
    over = yaml.safe_load(text)["services"]
    load = over.pop("load")
    assert load == {"environment": {"HPS_API_KEY": ""}}  # the key of who runs it
    assert over.keys() == serving().keys()
    for service in over.values():
        given = service["environment"]
        settings = load_config(ROOT / "deploy/compose/config.yaml", environ=given).settings
        mounted = {mount.split(":")[1] for mount in service["volumes"]}
        assert settings.auth.mode == "api_key"
        assert {str(settings.auth.keys_file), str(settings.lookup.api_key_file)} == mounted
