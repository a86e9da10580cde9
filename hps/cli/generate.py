"""``hps generate``: synthetic models and requests for load tests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hps.cli.command_options import expand_options
from hps.cli.model import RepositoryOption, VersionOption
from hps.cli.model_import import DEFAULT_REPOSITORY
from hps.tools.output import count, print_line

app = typer.Typer(no_args_is_help=True, help="Make models and requests for load tests.")


class Preset(StrEnum):
    none = "none"
    hugectr = "hugectr"


class RequestForm(StrEnum):
    features = "features"
    tables = "tables"


SeedOption = Annotated[int, typer.Option(min=0, help="The same seed makes the same.")]

MODEL_EXAMPLES = """\b
Examples:
  hps generate model ctr --preset hugectr --rows 1000000
  hps generate model words --tables 1 --dim 64 --dense 0
  hps generate model bags --ragged
"""


@dataclass(frozen=True, kw_only=True)
class GenerateModelOptions:
    """Arguments and options of ``hps generate model``."""

    name: Annotated[str, typer.Argument(help="Its name.")]
    repository: RepositoryOption = DEFAULT_REPOSITORY
    preset: Annotated[Preset, typer.Option(help="hugectr: 26 tables and 13 dense numbers.")] = (
        Preset.none
    )
    tables: Annotated[
        int | None, typer.Option(min=1, max=1000, help="With a feature each.", show_default="2")
    ] = None
    rows: Annotated[int, typer.Option(min=1, help="Of each table.")] = 100_000
    dim: Annotated[int, typer.Option(min=1, help="Values per row.")] = 16
    hotness: Annotated[
        int | None, typer.Option(min=1, help="Keys per sample and feature.", show_default="1")
    ] = None
    ragged: Annotated[
        bool, typer.Option("--ragged", help="As many as a request brings, instead.")
    ] = False
    dense: Annotated[
        int | None, typer.Option(min=0, help="Dense numbers; 0: no network.", show_default="4")
    ] = None
    seed: SeedOption = 1


@app.command(epilog=MODEL_EXAMPLES)
@expand_options
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
class GenerateRequestsOptions:
    """Arguments and options of ``hps generate requests``."""

    model: Annotated[str, typer.Argument(help="A model of the repository.")]
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="A .json or an .npz.")]
    repository: RepositoryOption = DEFAULT_REPOSITORY
    version: VersionOption = None
    count: Annotated[int, typer.Option(min=1, help="How many.")] = 100
    batch: Annotated[int, typer.Option(min=1, help="Samples in each.")] = 1
    form: Annotated[
        RequestForm, typer.Option(help="A tensor per feature, or KEYS and NUMKEYS.")
    ] = RequestForm.features
    distribution: Annotated[
        str, typer.Option(help="uniform, zipf:S, hot:SHARE,COVERAGE, trace:FILE.npy.")
    ] = "zipf:1.2"
    hotness: Annotated[
        int | None,
        typer.Option(
            min=1, help="Keys per sample, where the model does not say.", show_default="1"
        ),
    ] = None
    ragged: Annotated[
        bool, typer.Option("--ragged", help="1 to --hotness keys there, by offsets.")
    ] = False
    unknown: Annotated[float, typer.Option(help="Share of keys that no row has.")] = 0.0
    seed: SeedOption = 1


@app.command(epilog=REQUEST_EXAMPLES)
@expand_options
def requests(options: GenerateRequestsOptions) -> None:
    """Generate requests to a model: JSON for perf_analyzer, or arrays in an .npz file."""
    from hps.models.repository import Repository
    from hps.tools.generate.requests import GeneratedRequests, RequestRecipe, save

    recipe = RequestRecipe(
        options.form.value,
        options.batch,
        options.distribution,
        options.hotness,
        options.ragged,
        options.unknown,
    )
    made = GeneratedRequests(
        Repository(options.repository).open(options.model, options.version), recipe, options.seed
    )
    save(options.out, made.many(options.count), options.form.value)
    print_line(f"{options.out}: {options.count} requests of {options.batch}")
