"""Latencies for ``hps plan``: measured on this machine, or read from a file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hps.errors import GpuUnavailable, TierError

if TYPE_CHECKING:
    from pathlib import Path

    from hps.tools.plan.calibration_requests import TableLoad
    from hps.tools.plan.latency import Calibration
    from hps.tools.plan.model import PlannedModel
    from hps.tools.plan.trace import Trace

Unknown = dict[str, str]
"""The tiers that the latencies leave out, and why."""


def calibration_of(
    model: PlannedModel, trace: Trace, gpu: bool, file: Path | None, save: Path | None
) -> tuple[Calibration, Unknown]:
    """Read the latencies of lookups from ``file``; None: measure them, and write them to ``save``.

    ``gpu``: the plan has a GPU cache. A file that is written has the latencies of this machine's GPU, too.
    Also returns the tiers that the latencies leave out. Raises ConfigError for a wrong file."""
    from hps.cuda.loader import missing_requirement
    from hps.tools.output import console
    from hps.tools.plan.inputs import loads_of
    from hps.tools.plan.latency import Calibration

    if file is not None:
        found = Calibration.load(file)
        redis = model.settings.tiers.redis
        needed = {"Redis": (redis, found.redis), "the GPU": (gpu, found.gpu)}
        absent = [tier for tier, (used, measured) in needed.items() if used and not measured]
        return found, dict.fromkeys(absent, f"{file} does not have it")
    with console(stderr=True).status("measuring lookups on this machine"):
        gpu = gpu or (save is not None and missing_requirement() is None)
        measured, unknown = _measure(model, trace, loads_of(model, trace), gpu)
    if save is not None:
        measured.save(save)
    return measured, unknown


def _measure(
    model: PlannedModel, trace: Trace, loads: list[TableLoad], gpu: bool
) -> tuple[Calibration, Unknown]:
    from hps.tools.plan.calibration import calibrate, calibrate_gpu, calibrate_redis

    unknown: Unknown = {}
    mapped = all(model.tables[name].mapped_bytes is not None for name in trace.samples)
    in_memory = not trace.samples.keys().isdisjoint(model.direct_files())
    measured = calibrate(loads, mapped=mapped, in_memory=in_memory)
    redis = model.settings.tiers.redis
    if redis is not None:
        try:
            measured = replace(measured, redis=calibrate_redis(loads, redis))
        except TierError as error:
            unknown["Redis"] = str(error)
    if gpu:
        try:
            device = model.settings.tiers.gpu.devices[0]
            measured = replace(measured, gpu=calibrate_gpu(loads, device=device))
        except GpuUnavailable as error:
            unknown["the GPU"] = str(error)
    return measured, unknown
