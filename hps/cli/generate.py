"""``hps generate``: synthetic models and requests for load tests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hps.cli.command_options import CommandApp, argument, option
from hps.cli.model import RepositoryOptions
from hps.cli.options import DEFAULT_REPOSITORY
from hps.tools.output import count, print_line

app = CommandApp(no_args_is_help=True, help="Generate models and requests for load tests.")


class Preset(StrEnum):
    none = "none"
    hugectr = "hugectr"


class RequestForm(StrEnum):
    features = "features"
    tables = "tables"


@dataclass(frozen=True, kw_only=True)
class SeedOptions:
    """Seed of random output."""

    seed: int = option(1, min=0)
    """Seed of the random numbers; the same seed gives the same output."""


MODEL_EXAMPLES = """\b
Examples:
  hps generate model ctr --preset hugectr --rows 1000000
  hps generate model words --tables 1 --dim 64 --dense 0
  hps generate model bags --ragged
"""


@dataclass(frozen=True, kw_only=True)
class GenerateModelOptions(SeedOptions):
    name: str = argument()
    """Name of the new model."""
    repository: Path = option(DEFAULT_REPOSITORY, "--repository", "-r", metavar="DIR")
    """The model repository."""
    preset: Preset = option(Preset.none)
    """Shape of the model; hugectr: 26 tables, 13 dense values."""
    tables: int | None = option(None, min=1, max=1000, show_default="2")
    """Number of tables, each with one feature."""
    rows: int = option(100_000, min=1)
    """Number of rows per table."""
    dim: int = option(16, min=1)
    """Number of values per row."""
    hotness: int | None = option(None, min=1, show_default="1")
    """Fixed number of keys per sample and feature."""
    ragged: bool = option(False)
    """Accept any number of keys per sample, instead of --hotness."""
    dense: int | None = option(None, min=0, show_default="4")
    """Number of dense input values per sample; 0: no network."""


@app.command(epilog=MODEL_EXAMPLES)
def model(options: GenerateModelOptions) -> None:
    """Generate a model: tables of random rows, and a small network."""
    from hps.cli.progress import ConsoleProgress
    from hps.errors import ConfigError
    from hps.tools.generate.model import model_spec, write_model

    preset, name, rows = options.preset, options.name, options.rows
    usual = (26, 13) if preset is Preset.hugectr else (2, 4)
    chosen = (options.tables or usual[0], options.dense or usual[1])
    if preset is not Preset.none and chosen != usual:
        raise ConfigError(
            f"--preset {preset} has {usual[0]} tables, and {usual[1]} dense numbers or, with --dense 0, no "
            "network; leave it out for others"
        )
    tables = usual[0] if options.tables is None else options.tables
    dense = usual[1] if options.dense is None else options.dense
    if options.ragged and options.hotness is not None:
        raise ConfigError("--ragged leaves the hotness to requests; leave --hotness out")
    hotness = None if options.ragged else options.hotness or 1
    spec = model_spec(name, tables, options.dim, hotness, dense, 65_536)
    with ConsoleProgress().task(f"writing {name}", tables * rows) as step:
        folder = write_model(options.repository, spec, rows, options.seed, step)
    print_line(f"{folder}: {tables} tables of {count(rows)} rows of {options.dim}")


REQUEST_EXAMPLES = """\b
Examples:
  hps generate requests ctr --out requests.json --count 1000
  perf_analyzer -m ctr -u localhost:8000 -b 64 --input-data requests.json
  hps generate requests words --form tables --distribution hot:0.2,0.8 \\
      --out keys.json
  hps generate requests bags --batch 64 --hotness 20 --ragged --out bags.npz

perf_analyzer puts samples together by itself (-b); an .npz has whole requests, arrays NUMBER/TENSOR.
"""


@dataclass(frozen=True, kw_only=True)
class GenerateRequestsOptions(SeedOptions):
    model: str = argument()
    """A model of the repository; its tables give the keys."""
    out: Path = option(metavar="FILE")
    """Output file: .json (single samples, also for perf_analyzer) or .npz (batches)."""
    source: RepositoryOptions
    count: int = option(100, min=1)
    """Number of requests."""
    batch: int = option(1, min=1)
    """Samples per request."""
    form: RequestForm = option(RequestForm.features)
    """Tensors of the requests: one per feature, or HPS's KEYS and NUMKEYS (tables)."""
    distribution: str = option("zipf:1.2")
    """Distribution of the keys: uniform, zipf:S, hot:SHARE,COVERAGE or trace:FILE.npy."""
    hotness: int | None = option(None, min=1, show_default="1")
    """Keys per sample, where the model does not say."""
    ragged: bool = option(False)
    """Random number of keys per sample, 1 to --hotness, for these features (jagged)."""
    unknown: float = option(0.0)
    """Share of unknown keys (without a row), from 0 to 1."""


@app.command(epilog=REQUEST_EXAMPLES)
def requests(options: GenerateRequestsOptions) -> None:
    """Generate requests: .json (also for perf_analyzer), or .npz."""
    from hps.cli.options import open_repository
    from hps.tools.generate.requests import GeneratedRequests, RequestRecipe, save

    recipe = RequestRecipe(
        options.form.value,
        options.batch,
        options.distribution,
        options.hotness,
        options.ragged,
        options.unknown,
    )
    version = open_repository(options.source.repository).open(options.model, options.source.version)
    made = GeneratedRequests(version, recipe, options.seed)
    save(options.out, made.many(options.count), options.form.value)
    print_line(f"{options.out}: {options.count} requests of {options.batch}")
