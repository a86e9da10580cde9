"""``hps model import``: other formats -> a version of the model repository."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hps.errors import ConfigError
from hps.tools.output import Output, OutputFormat, plural, print_json, print_line, warn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hps.models.importers import ImportPlan, TableChoice

DEFAULT_REPOSITORY = Path("models")

IMPORT_EXAMPLES = """\b
Examples:
  hps model import ps.json                          models of HPS's ps.json
  hps model import 0_sparse_2000.model --name ctr   HugeCTR's folders
  hps model import net.pt --name ctr --table users=user_emb.weight \\
      --table items=item_emb.weight --dense ctr.onnx
  hps model import net.pt --name ctr --table 'all=emb.*.weight'
      stacked, one feature with an offset per part
  hps model import items.parquet --name ctr --table items=items.parquet \\
      --keys items=item_id
  hps model import tables.npz --name ctr --table items=vectors \\
      --keys items=ids
  hps model import emb.safetensors --name ctr --table all=fused.weight \\
      --feature user=all+0:context \\
      --feature item=all+100000:mean:max_hotness=50
  hps model import tables.npz --name ctr --table deep=vectors \\
      --table wide=items.parquet --feature ad=deep,wide --default wide=-0.5
\b
A table's SOURCE is an array, a Parquet file or a folder; FILE:ARRAY is an
array of another file. An array T.vectors has the keys T.keys, a Parquet file
its only integer column; of other arrays row numbers become the keys, unless
--keys names them. The repository's model.yaml describes a second and later
version too, unless --spec, --feature or --default say otherwise.
"""


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            help="ps.json, HugeCTR folders, .npz, .parquet, .safetensors, or a PyTorch .pt/.pth file."
        ),
    ],
    repository: Annotated[
        Path, typer.Option("--to", "-r", metavar="DIR", help="The model repository to write to.")
    ] = DEFAULT_REPOSITORY,
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="The model's name in the repository.")
    ] = None,
    version: Annotated[
        int | None, typer.Option("--version", "-v", min=1, help="Default: the next one.")
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", help="Source format (default: inferred from the file name)."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Only this model of a ps.json.")
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(
            "--table",
            "-t",
            metavar="NAME=SOURCE[,...]",
            help="A table and its array, file or folder; several are stacked. Repeatable.",
        ),
    ] = None,
    keys: Annotated[
        list[str] | None,
        typer.Option("--keys", metavar="TABLE=SOURCE", help="Array or column of a table's keys."),
    ] = None,
    vectors: Annotated[
        list[str] | None,
        typer.Option("--vectors", metavar="TABLE=PATTERN", help="Parquet columns of the vectors."),
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(
            "--feature",
            "-f",
            metavar="NAME=TABLE[,TABLE...][+OFFSET][:OPTION...]",
            help="A feature of requests: its tables take the same keys, to which the offset is added. "
            "OPTION: sum, mean or none (pooling), context, hotness=N, max_hotness=N. Repeatable.",
        ),
    ] = None,
    default: Annotated[
        list[str] | None,
        typer.Option(
            "--default",
            metavar="TABLE=VALUE[,...]",
            help="The vector of unknown keys: one number, or as many as the table's dim. Repeatable.",
        ),
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option("--spec", metavar="FILE", help="A model.yaml that describes the model."),
    ] = None,
    dense: Annotated[
        Path | None, typer.Option("--dense", metavar="FILE", help="The network, an .onnx file.")
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option("--metadata", metavar="KEY=VALUE", help="Kept in the manifest. Repeatable."),
    ] = None,
    allow_nan: Annotated[
        bool, typer.Option("--allow-nan", help="Import NaN and infinite values as they are.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the version if it exists.")
    ] = False,
    replace_spec: Annotated[
        bool, typer.Option("--replace-spec", help="Replace a model.yaml that says something else.")
    ] = False,
    output: Output = OutputFormat.table,
) -> None:
    """Write tables, and a network, as a version of the repository."""
    from hps.cli import model_options as options
    from hps.cli.progress import ConsoleProgress
    from hps.config import load_model_spec
    from hps.models.check import repeated_by_table, repeated_text
    from hps.models.importers import import_model
    from hps.models.importers.import_model import describe
    from hps.models.repository import Repository

    chosen = options.choices(table, keys, vectors)
    given = options.features(feature)
    defaults = options.defaults(default)
    notes = options.pairs("--metadata", metadata, "KEY=VALUE")
    if spec is not None and (given or defaults):
        raise ConfigError(
            "--spec describes features and defaults; leave --feature and --default out"
        )
    written = []
    for plan in _plans(source, chosen, format_, model, name):
        called = name or (plan.spec.name if plan.spec else plan.source.stem)
        if spec is not None:
            described = options.rename_spec(load_model_spec(spec), called)
        else:
            exists = (repository / called / "model.yaml").is_file() and not (given or defaults)
            generated = dense is not None and not exists
            network = options.dense_spec(plan, given, dense) if generated and dense else None
            described = describe(repository, called, plan, given, network, defaults)
        options.check_wiring(described, dense)
        folder = import_model(
            repository,
            called,
            plan,
            version=version,
            spec=described,
            dense=dense,
            metadata=notes,
            allow_nan=allow_nan,
            replace=replace,
            replace_spec=replace_spec,
            progress=ConsoleProgress(),
        )
        written.append((called, int(folder.name), folder, plan))
    repeated = [
        repeated_by_table(Repository(repository).open(called, number))
        for called, number, *_ in written
    ]
    if output is OutputFormat.json:
        print_json([_imported(*entry) for entry in zip(written, repeated, strict=True)])
        return
    for (called, number, folder, plan), counts in zip(written, repeated, strict=True):
        for each in plan.tables:
            print_line(
                f"{called}/{number} {each.name}: {plural(each.rows, 'row')} of dim {each.dim}"
            )
            if counts[each.name]:
                warn(f"{called}/{number} {each.name}: {repeated_text(counts[each.name])}")
            for part, offset in each.parts:
                print_line(f"  {part}: keys from {offset:,} (its feature has key_offset {offset})")
        print_line(f"Written to {folder}. Serve it: hps serve --set models.repository={repository}")


def _plans(
    source: Path,
    chosen: Sequence[TableChoice],
    format_: str | None,
    model: str | None,
    name: str | None,
) -> list[ImportPlan]:
    """One plan, or one per model of a ps.json."""
    from hps.config import load_config
    from hps.models.importers import plan_import
    from hps.models.importers.hugectr import plan_legacy
    from hps.models.importers.sources import detect

    if not source.exists():
        raise ConfigError(f"there is no file or folder {source}")
    kind = format_ or detect(source)
    if kind != "ps.json" and name is None:
        raise ConfigError("give the model a name: --name NAME")
    if kind == "ps.json" and model is None and name is None and not chosen:
        return [plan_legacy(source, legacy) for legacy in load_config(source).legacy]
    return [plan_import(source, chosen, format=format_, model=model)]


def _imported(
    written: tuple[str, int, Path, ImportPlan], repeated: dict[str, int]
) -> dict[str, Any]:
    name, version, folder, plan = written
    return {
        "model": name,
        "version": version,
        "folder": folder,
        "tables": [
            {
                "name": t.name,
                "rows": t.rows,
                "repeated_keys": repeated[t.name],
                "dim": t.dim,
                "offsets": dict(t.parts),
            }
            for t in plan.tables
        ],
    }
