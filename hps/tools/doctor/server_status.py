"""Checks of a server's ``/v1/status`` and metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hps.observability import metric_names as m
from hps.tools.doctor.check import DoctorCheck
from hps.tools.output import age, count, plural, size

if TYPE_CHECKING:
    from hps.client import Admin
    from hps.client.admin import MetricSample

_LATE_S = 60.0
# Free space that compactions need, as a share of the tables: they write merged files before they delete.
_ROOM = 0.25


def state(name: str, status: Mapping[str, Any], admin: Admin) -> Iterator[DoctorCheck]:
    for warning in status.get("warnings", ()):
        yield DoctorCheck(f"{name}: warning", "WARN", str(warning), "see the text")
    for tier in status.get("tiers", ()):
        yield from _tier(name, tier)
    yield from _nodes(name, status.get("lookup_nodes", ()))
    for stream in status.get("updates", ()):
        yield _stream(name, stream)
    samples = admin.metrics()
    yield from _loads(name, samples)
    yield from _lost(name, samples)
    yield _freshness(name, samples)


def _tier(name: str, tier: Mapping[str, Any]) -> Iterator[DoctorCheck]:
    label = f"{name}: {tier['name']}"
    if tier.get("problem"):
        found = f"does not answer: {tier['problem']}"
        yield DoctorCheck(label, "WARN", found, f"look after {tier['name']}")
    elif tier.get("circuit", "closed") != "closed":
        found = f"is passed over (circuit {tier['circuit']})"
        remedy = f"look after {tier['name']}; hps top shows when it is back"
        yield DoctorCheck(label, "WARN", found, remedy)
    if tier.get("writes_stopped"):
        remedy = "writes wait for compactions: more tiers.rocksdb.threads, or a faster disk"
        yield DoctorCheck(label, "WARN", "writes are stopped", remedy)
    if tier.get("damaged_files"):
        remedy = "stop the node and run hps store verify --repair"
        yield DoctorCheck(label, "FAIL", f"{tier['damaged_files']} damaged table files", remedy)
    if tier.get("lost_writes"):
        found = (
            f"up to {count(int(tier['lost_writes']))} acknowledged writes were lost at its start"
        )
        yield DoctorCheck(label, "WARN", found, "write the rows of calls again; see its log")
    if tier.get("background_errors"):
        yield DoctorCheck(
            label, "FAIL", f"{tier['background_errors']} background errors", "see its log"
        )
    if tier.get("free_bytes") is not None:
        yield _disk(f"{label}: disk", tier)


def _disk(name: str, tier: Mapping[str, Any]) -> DoctorCheck:
    free, taken = int(tier["free_bytes"]), int(tier.get("table_bytes") or 0)
    least = int(tier.get("min_free_bytes") or 0)
    found = f"{size(free)} free beside {size(taken)} of tables"
    remedy = "make room: below tiers.rocksdb.min_free_bytes its updates wait"
    if free < least:
        return DoctorCheck(
            name, "FAIL", f"{found}, less than the {size(least)} it keeps free", remedy
        )
    if free < max(2 * least, _ROOM * taken):
        return DoctorCheck(name, "WARN", found, remedy)
    return DoctorCheck(name, "OK", found)


def _nodes(name: str, nodes: Sequence[Mapping[str, Any]]) -> Iterator[DoctorCheck]:
    """Check the lookup nodes of a front end."""
    label = f"{name}: lookup node"
    for node in nodes:
        if node.get("state", "ready") != "ready":
            found = f"{node['address']} is {node['state']}: {node.get('problem', '')}"
            yield DoctorCheck(label, "WARN", found, "see that node's log")
    ready = [node for node in nodes if node.get("state", "ready") == "ready"]
    if len({tuple(sorted(node.get("models", {}).items())) for node in ready}) > 1:
        versions = "; ".join(f"{node['address']}: {_models(node)}" for node in ready)
        remedy = "load the version at the others: POST /v2/repository/models/NAME/load on their admin ports"
        yield DoctorCheck(f"{label}s", "WARN", f"do not serve the same: {versions}", remedy)
    elif nodes and len(ready) == len(nodes):
        yield DoctorCheck(f"{label}s", "OK", f"{plural(len(ready), 'node')} ready")


def _models(node: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(node.get("models", {}).items())) or "none"


def _stream(name: str, stream: Mapping[str, Any]) -> DoctorCheck:
    label = f"{name}: updates of {stream.get('group', '')}"
    if stream.get("problem"):
        return DoctorCheck(label, "FAIL", str(stream["problem"]), "see hps updates status")
    if stream.get("state") == "paused":
        return DoctorCheck(label, "WARN", "paused", "hps updates resume")
    if stream.get("state") == "starting":
        found = "starting: it is not known yet which partitions it reads"
        return DoctorCheck(
            label, "WARN", found, "look again in a few seconds, then see hps updates status"
        )
    return DoctorCheck(label, "OK", "are read")


def _loads(name: str, samples: Sequence[MetricSample]) -> Iterator[DoctorCheck]:
    failed = {
        sample.labels.get("model", ""): int(sample.value)
        for sample in samples
        if sample.name == m.MODEL_LOADS and sample.labels.get("result") == "failed" and sample.value
    }
    for model, times in failed.items():
        found = f"{plural(times, 'load')} of {model} failed since it started"
        remedy = f"see its log; hps model verify {model} --repository DIR"
        yield DoctorCheck(f"{name}: models", "WARN", found, remedy)


def _lost(name: str, samples: Sequence[MetricSample]) -> Iterator[DoctorCheck]:
    for sample in samples:
        if sample.name == m.UPDATE_LOST and sample.value:
            topic, lost = sample.labels.get("topic", ""), count(int(sample.value))
            found = (
                f"{lost} messages of {topic} were deleted before they were read, since it started"
            )
            remedy = "publish a version with all rows and load it; keep messages for longer: retention.ms"
            yield DoctorCheck(
                f"{name}: updates of {sample.labels.get('group', '')}", "WARN", found, remedy
            )
        elif sample.name == m.UPDATE_RESTARTED and sample.value:
            topic, times = sample.labels.get("topic", ""), plural(int(sample.value), "partition")
            found = f"{times} of {topic} did not continue what was applied, since it started"
            remedy = "publish a version with all rows, unless all messages of the former topic were applied"
            yield DoctorCheck(
                f"{name}: updates of {sample.labels.get('group', '')}", "WARN", found, remedy
            )


def _freshness(name: str, samples: Sequence[MetricSample]) -> DoctorCheck:
    ages = [s.value for s in samples if s.name == m.UPDATE_AGE]
    late = max((value for value in ages if math.isfinite(value)), default=0.0)
    lag = sum(s.value for s in samples if s.name == m.UPDATE_LAG and math.isfinite(s.value))
    dead = sum(s.value for s in samples if s.name == m.UPDATE_DEAD)
    label = f"{name}: freshness"
    found = f"updates wait for {age(late)}, {count(int(lag))} messages"
    if dead:
        remedy = "hps updates dlq --config FILE shows them and why"
        return DoctorCheck(label, "WARN", f"{found}; {count(int(dead))} could not be taken", remedy)
    if late > _LATE_S or any(math.isinf(value) for value in ages):
        remedy = "hps updates status shows which stream, and what it waits for"
        return DoctorCheck(label, "WARN", found, remedy)
    return DoctorCheck(label, "OK", found)
