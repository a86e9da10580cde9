"""The composition root of a process whose rows are at other nodes: networks here, lookups there.

For front ends on machines of their own, and for user code: ``hps.connect(config)``. It has the model
repository's descriptions and networks, no tables, tiers or streams.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hps.config import Configuration, Settings, as_configuration
from hps.config.remote_settings import RemoteSettings, RemoteTlsSettings
from hps.config.schema import ModelOverride
from hps.errors import ConfigError, TierError
from hps.lookup.remote import Certificates, Picker, RemoteLookup, Targets
from hps.meters import DenseMeter, LookupMeter
from hps.metrics import Metrics
from hps.models.repository import Repository
from hps.open_models import OpenModels, ServedModel
from hps.opening import OpenedModel, open_model
from hps.pipeline import InferencePipeline
from hps.serving import dense_runs, lookup_lanes
from hps.types import NoProgress, Progress
from hps.workers import Workers

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.2


class Connected(OpenModels):
    """What ``hps.connect`` returns. Any number of threads may call it until ``close``."""

    __slots__ = ("_lookups", "_targets")

    def __init__(self, targets: Targets, lookups: Sequence[RemoteLookup], **given: Any) -> None:
        OpenModels.__init__(self, **given)
        self._targets, self._lookups = targets, lookups

    def status(self) -> dict[str, Any]:
        """As of any process, and the nodes it asks."""
        problems: dict[str, str] = {}
        for lookup in self._lookups:
            problems |= lookup.problems
        nodes = [
            {
                "address": each.address,
                "in_flight": each.in_flight,
                "problem": problems.get(each.address, ""),
            }
            for each in self._targets.all
        ]
        return {**OpenModels.status(self), "lookup_nodes": nodes}


def connect(
    config: Path | str | Mapping[str, Any] | Settings | Configuration | None = None,
    *,
    wait_s: float = 10.0,
    progress: Progress | None = None,
    picker: Picker | None = None,
) -> Connected:
    """The models of the nodes named by ``tiers.remote``: lookups are theirs, networks run here. Waits up to
    ``wait_s`` for one of the nodes to say which versions it serves.

    Raises ConfigError, ModelError (model.yaml here and there differ), or TierError when no node answers.
    """
    configuration = as_configuration(config)
    settings = configuration.settings
    remote = settings.tiers.remote
    if remote is None:
        raise ConfigError("tiers.remote is not set: the nodes that answer lookups")
    with ExitStack() as resources:
        targets = Targets(remote.targets, _certificates(remote.tls), _api_key(remote))
        resources.callback(targets.close)
        versions = _versions(settings, targets, wait_s, progress or NoProgress())
        opened = [_open(name, version, settings, resources) for name, version in versions.items()]
        metrics = Metrics()
        runs = dense_runs(settings, resources)
        served, lookups = [], []
        for model in opened:
            lookup = _lookup(model, remote, targets, picker, metrics)
            resources.callback(lookup.close)
            lookups.append(lookup)
            served.append(_served(model, lookup, runs, metrics))
        connected = Connected(
            targets,
            lookups,
            models={model.name: model for model in served},
            metrics=metrics,
            tiers=[],
            workers=lookup_lanes(settings, resources),
        )
        connected._resources.push(resources.pop_all())
        return connected
    raise AssertionError  # an ExitStack swallows nothing; for the type checker


def _lookup(
    model: OpenedModel,
    remote: RemoteSettings,
    targets: Targets,
    picker: Picker | None,
    metrics: Metrics,
) -> RemoteLookup:
    return RemoteLookup(
        model.lookup,
        targets,
        picker,
        in_flight=remote.in_flight,
        retries=remote.retries,
        timeout_s=remote.timeout_ms / 1e3,
        meter=LookupMeter(metrics, model.version.name),
    )


def _served(
    model: OpenedModel, lookup: RemoteLookup, runs: Workers, metrics: Metrics
) -> ServedModel:
    name, pipeline = model.version.name, None
    if model.dense is not None and model.spec.dense is not None:
        meter = DenseMeter(metrics, name)
        pipeline = InferencePipeline(name, model.spec.dense, lookup, model.dense, runs, meter)
    return ServedModel(name, model.version.version, model.spec, model.tables, lookup, pipeline)


def _open(name: str, version: int, settings: Settings, resources: ExitStack) -> OpenedModel:
    override = (settings.models.serve or {}).get(name)
    found = Repository(settings.models.repository).without_rows(name, version, override)
    return open_model(found, settings, resources)


def _versions(
    settings: Settings, targets: Targets, wait_s: float, progress: Progress
) -> dict[str, int]:
    """By model, the version to ask for: the settings', else what the first node that answers serves."""
    chosen: Mapping[str, ModelOverride] = settings.models.serve or {}
    names = list(chosen) or Repository(settings.models.repository).names()
    until = time.monotonic() + wait_s
    with progress.task("waiting for lookup nodes", 1, "node") as step:
        found: dict[str, int] = {}
        for name in names:
            override = chosen.get(name)
            stated = override.version if override is not None else None
            while name not in found:
                try:
                    found[name] = stated or targets.version_of(name)
                except TierError:
                    if time.monotonic() > until:
                        raise
                    step(0)
                    time.sleep(_LOOK_AGAIN_S)
        return found


def _api_key(remote: RemoteSettings) -> str | None:
    if remote.api_key_file is None:
        return None
    return _read(remote.api_key_file, "api_key_file").decode("ascii", "replace").strip()


def _certificates(tls: RemoteTlsSettings | None) -> Certificates | None:
    if tls is None:
        return None
    files = {
        "ca_file": tls.ca_file,
        "key_file": tls.key_file,
        "certificate_file": tls.certificate_file,
    }
    return Certificates(
        *[None if path is None else _read(path, f"tls.{name}") for name, path in files.items()]
    )


def _read(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tiers.remote.{setting}: {path}: {error.strerror}") from None
