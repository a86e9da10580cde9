"""``hps plan``: size the caches from a recorded key trace."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from hps.cli.command_options import CommandApp, argument, option
from hps.cli.options import (
    OptionalAdminServer,
    ReportOptions,
    RepositoryLocation,
    SetOption,
    load_with_warnings,
    open_repository,
    reject_overrides,
    repository_option,
)
from hps.errors import ConfigError

if TYPE_CHECKING:
    from hps.tiers.cpu.cache import Eviction
    from hps.tools.plan.allocation import TableDemand
    from hps.tools.plan.gpu import GpuCachePlan
    from hps.tools.plan.latency import Calibration
    from hps.tools.plan.model import PlannedModel
    from hps.tools.plan.planner import Goals, Prices
    from hps.tools.plan.report import PlanReport
    from hps.tools.plan.trace import Trace

app = CommandApp(add_completion=False)

EXAMPLES = """\b
Examples:
  hps plan requests.npz --config hps.yaml --hit-rate 0.9
  hps plan keys.parquet --repository models --batch 64 --p99-ms 5
  hps plan keys.npy --table items=258368x32 --batch 1024 --memory 8000000
  hps plan keys.parquet -c hps.yaml --gpu-hit-rate 0.8 --calibration gpu.json
  hps plan --server http://127.0.0.1:8002 --seconds 600 --hit-rate 0.95
  hps plan day.csv --table user=1000000x32 --table ad=50000x16 --plot day.svg
"""


class EvictionPolicy(StrEnum):
    lru = "lru"
    lfu = "lfu"
    random = "random"
    fifo = "fifo"


@dataclass(frozen=True, kw_only=True)
class GoalOptions:
    """The target."""

    hit_rate: float | None = option(None, min=0.0, max=1.0)
    """Target: the share of the keys that the caches answer, from 0 to 1."""
    p50_ms: float | None = option(None, min=0.0001)
    """Target: half of the lookups take at most this many milliseconds."""
    p99_ms: float | None = option(None, min=0.0001)
    """Target: 99 % of the lookups take at most this many milliseconds."""
    requests_per_s: float | None = option(None, min=0.001)
    """Target: requests per second, from which the number of cores follows."""
    memory: int | None = option(None, min=0, metavar="BYTES")
    """Most bytes of the CPU cache and of mapped files in memory; alone: the best use of that memory."""
    gpu_memory: int | None = option(None, min=1, metavar="BYTES")
    """Also fill a GPU cache of this size, in bytes per GPU."""
    gpu_hit_rate: float | None = option(None, min=0.0, max=1.0)
    """Also plan the smallest GPU cache that answers this share of the keys, within --gpu-memory if given."""

    def goals(self) -> Goals:
        from hps.tools.plan.planner import Goals

        return Goals(self.hit_rate, self.p50_ms, self.p99_ms, self.requests_per_s, self.memory)


@dataclass(frozen=True, kw_only=True)
class PriceOptions:
    """Prices per hour."""

    gib_price: float = option(0.0, min=0.0)
    """Price of a GiB of memory for an hour."""
    core_price: float = option(0.0, min=0.0)
    """Price of a processor core for an hour."""
    gpu_price: float = option(0.0, min=0.0)
    """Price of a GPU for an hour."""
    gpu_gib_price: float = option(0.0, min=0.0)
    """Price of a GiB of GPU memory for an hour, instead of whole GPUs or beside them."""

    def prices(self) -> Prices:
        from hps.tools.plan.planner import Prices

        return Prices(self.gib_price, self.core_price, self.gpu_price, self.gpu_gib_price)


@dataclass(frozen=True, kw_only=True)
class PlannedModelOptions:
    """The tables."""

    config: Path | None = option(None, "--config", "-c", metavar="FILE")
    """The configuration of the node that will serve the model; it is not opened."""
    overrides: SetOption = None
    repository: RepositoryLocation | None = repository_option(None, "--repository", "-r")
    """The model repository, if there is no configuration yet."""
    model: str | None = option(None, metavar="NAME")
    """The model; required if there are several."""
    table: list[str] | None = option(None, metavar="NAME=ROWSxDIM")
    """A table, if there are no files yet, such as user=1000000x32 or ad=50000x16:int8; repeatable."""
    redis: str | None = option(None, metavar="HOST:PORT")
    """A Redis that nodes will share, in place of the addresses of --config; measured with generated rows."""

    @property
    def is_given(self) -> bool:
        """One of the descriptions is given."""
        return sum(each is not None for each in (self.config, self.repository, self.table)) == 1

    def open(self) -> PlannedModel:
        """Describe the model. Raises ConfigError, ModelError, NotFound."""
        from hps.tools.plan import model

        opened = self._opened()
        return opened if self.redis is None else model.with_redis(opened, self.redis)

    def _opened(self) -> PlannedModel:
        from hps.tools.plan import model

        if not self.is_given:
            raise ConfigError(
                "say where the tables are described, by one of --config FILE, --repository DIR, or --table "
                "NAME=ROWSxDIM for each"
            )
        if self.config is not None:
            configuration = load_with_warnings(self.config, self.overrides)
            return model.model_of_configuration(configuration, self.model)
        reject_overrides(self.overrides)
        if self.repository is not None:
            return model.model_of_repository(open_repository(self.repository), self.model)
        return model.model_of_specs(self.table or (), self.model)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ReportOptions):
    trace: list[Path] | None = argument(None)
    """Files of keys in the order of the requests: .npz, .parquet, .csv, .tsv, .jsonl, .npy, .trace."""
    live: OptionalAdminServer
    seconds: float = option(60.0, min=1.0, max=3600.0)
    """Seconds for which to record the keys of --server."""
    save_trace: Path | None = option(None, metavar="FILE")
    """Write what is recorded of --server to this .npz, a trace."""
    planned: PlannedModelOptions
    batch: int = option(1, min=1)
    """Samples per request, in files that do not say it."""
    goal: GoalOptions
    eviction: EvictionPolicy | None = option(None, show_default="that of --config, else lru")
    """The policy by which the CPU cache evicts rows."""
    price: PriceOptions
    calibration: Path | None = option(None, metavar="FILE")
    """Use the latencies of this file, which --save-calibration wrote here or on another machine."""
    save_calibration: Path | None = option(None, metavar="FILE")
    """Write the measured latencies to this file."""
    no_latency: bool = option(False)
    """Predict no latencies: measures nothing, saves some 8 seconds."""
    keys: int = option(1 << 18, min=1024, max=1 << 24)
    """Different keys to sample of each table; more are more exact and take more memory."""
    plot: Path | None = option(None, metavar="FILE")
    """Draw the curves into this .svg or (needs Matplotlib) .png."""
    yaml: Path | None = option(None, metavar="FILE")
    """Write the fragment of the configuration to this file."""


@app.command(epilog=EXAMPLES)
def plan(options: PlanOptions) -> None:
    """Size the caches from a trace of keys: hit rates, latencies, bytes, cost, and a configuration.

    Reads which keys your requests ask for, computes the hit rate of each table's cache for every size,
    measures lookups with generated rows (some 8 seconds; as long for Redis and for a GPU), and prints
    the smallest caches that meet the target, as YAML for your configuration. Without a target it plans
    for 95 % of the hits that the trace allows. The trace should be several times as long as the tables
    are used: a row's first access always misses. Latencies are those of a lookup in the process, without
    HTTP and queues. docs/sizing.md explains the numbers. Exit code 2: no cache meets the target."""
    from hps.cli.plan_show import chart_lines, show
    from hps.tools.plan.chart import save_chart

    if options.no_latency and (options.calibration or options.save_calibration):
        raise ConfigError("--no-latency measures nothing; remove it, or the calibration")
    _require_writable(options)
    report = make_report(options)
    if options.plot is not None:
        save_chart(options.plot, f"{report.model.name}: hit rate by size", chart_lines(report))
    if options.yaml is not None:
        options.yaml.write_text(report.configuration())
    if options.as_json:
        options.report(report.as_json(), lambda _: None)
    else:
        show(report, options.price.prices())


def _require_writable(options: PlanOptions) -> None:
    """Raise ConfigError before the work for a file that cannot be written after it."""
    for name in ("save_trace", "save_calibration", "plot", "yaml"):
        path: Path | None = getattr(options, name)
        if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            option_name = "--" + name.replace("_", "-")
            raise ConfigError(f"{option_name} {path}: {path.parent} is not a folder to write into")


def make_report(options: PlanOptions) -> PlanReport:
    """Read the trace, and choose a cache. Raises ConfigError, BadRequest and others."""
    from hps.cli.plan_calibration import calibration_of
    from hps.tools.plan.gpu import NO_GPU, configured_gpu
    from hps.tools.plan.inputs import demands_of
    from hps.tools.plan.memory import configured_memory
    from hps.tools.plan.node_latency import redis_share_of
    from hps.tools.plan.planner import Planner
    from hps.tools.plan.report import PlanReport

    model, trace = _recorded(options) if options.live.server else _read(options)
    demands = demands_of(model, trace, _evictions(options, model, trace))
    gpu, present_gpu = _gpu_plan(options.goal, demands), NO_GPU
    if options.planned.config is not None:
        present_gpu = configured_gpu(model)
    calibration: Calibration | None = None
    unknown: Mapping[str, str] = {}
    if not options.no_latency:
        has_gpu = bool(gpu.rows or present_gpu.rows)
        files = options.calibration, options.save_calibration
        calibration, unknown = calibration_of(model, trace, has_gpu, *files)
    planner = Planner(
        trace,
        demands,
        calibration,
        goals=options.goal.goals(),
        prices=options.price.prices(),
        gpu=gpu,
        gpus=len(model.settings.tiers.gpu.devices),
        files={name: size for name, size in model.direct_files().items() if name in demands},
        redis_share=redis_share_of(model.settings),
    )
    chosen, current = planner.choose(), None
    if options.planned.config is not None:
        rows, in_memory = configured_memory(model)
        in_memory = tuple(name for name in in_memory if name in demands)
        current = planner.predict(rows, in_memory, present_gpu)
    return PlanReport(
        model,
        trace,
        demands,
        chosen,
        gpu.rows,
        current,
        calibration,
        files=planner.files,
        unknown_latency=unknown,
    )


def _gpu_plan(goal: GoalOptions, demands: Mapping[str, TableDemand]) -> GpuCachePlan:
    from hps.tools.plan.gpu import NO_GPU, GpuCachePlan, gpu_allocation, gpu_bytes

    if goal.gpu_memory is None and goal.gpu_hit_rate is None:
        return NO_GPU
    rows = gpu_allocation(demands, goal.gpu_memory, goal.gpu_hit_rate)
    return GpuCachePlan(rows, gpu_bytes(demands, rows))


def _read(options: PlanOptions) -> tuple[PlannedModel, Trace]:
    from hps.cli.plan_trace import read_trace
    from hps.cli.progress import ConsoleProgress

    if not options.trace:
        raise ConfigError("give files of keys, or --server URL to record those of a running node")
    model = options.planned.open()
    trace = read_trace(
        options.trace,
        model,
        batch=options.batch,
        max_keys=options.keys,
        progress=ConsoleProgress(),
    )
    return model, trace


def _recorded(options: PlanOptions) -> tuple[PlannedModel, Trace]:
    """Record the keys that a running node is asked for."""
    from hps.cli.options import open_admin
    from hps.cli.plan_live import record, trace_of_recording
    from hps.cli.progress import ConsoleProgress
    from hps.lookup.key_sampling import MAX_KEYS
    from hps.tools.plan.model import model_of_status, with_redis

    if options.trace:
        raise ConfigError("--server records a trace, so remove the files of keys")
    with open_admin(options.live.server or "", options.live.credentials) as admin:
        if options.planned.is_given:
            model = options.planned.open()
        else:
            model = model_of_status(admin.status(), options.planned.model)
            if options.planned.redis is not None:
                model = with_redis(model, options.planned.redis)
        keys = min(options.keys, MAX_KEYS)
        packed = record(admin, model.name, options.seconds, keys, ConsoleProgress())
    if options.save_trace is not None:
        options.save_trace.write_bytes(packed)
    return model, trace_of_recording(packed, model)


def _evictions(options: PlanOptions, model: PlannedModel, trace: Trace) -> Mapping[str, Eviction]:
    from hps.node.cpu_cache_plan import eviction_of

    default = model.settings.tiers.cpu_cache.eviction
    if options.eviction is not None:
        return dict.fromkeys(trace.samples, options.eviction.value)
    tables = {name: model.tables[name].table for name in trace.samples}
    return {name: eviction_of(model.settings, table) or default for name, table in tables.items()}
