"""``hps model import``: convert other formats to a version of the model repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from hps.cli.command_options import argument, option
from hps.cli.options import DEFAULT_REPOSITORY, ReportOptions, RepositoryLocation, repository_option
from hps.cli.row_errors import errors_text, row_errors, row_errors_json
from hps.errors import ConfigError
from hps.tools.output import plural, print_json, print_line, warn

if TYPE_CHECKING:
    from hps.config import ModelSpec
    from hps.config.repository_uri import Location, RepositoryUri
    from hps.models.importers import ImportPlan, TableChoice
    from hps.models.repository import ModelVersion

IMPORT_EXAMPLES = """\b
Examples:
  hps model import ps.json                         # models of HPS's ps.json
  hps model import 0_sparse_2000.model --name ctr  # HugeCTR's folders
  hps model import net.pt --name ctr --table users=user_emb.weight \\
      --table items=item_emb.weight --dense ctr.onnx
  hps model import net.pt --name ctr --table 'all=emb.*.weight'
      # stacked, one feature with an offset per part
  hps model import items.parquet --name ctr --table items=items.parquet \\
      --keys items=item_id
  hps model import tables.npz --name ctr --table items=vectors \\
      --keys items=ids
  hps model import emb.safetensors --name ctr --table all=fused.weight \\
      --feature user=all+0:context \\
      --feature item=all+100000:mean:max_hotness=50
  hps model import net.pt --name ctr --table users=user_emb.weight \\
      --table items=item_emb.weight --rows int8 --rows users=int4
  hps model import tables.npz --name ctr --table deep=vectors \\
      --table wide=items.parquet --feature ad=deep,wide --default wide=-0.5
\b
A table's SOURCE is an array, a Parquet file or a folder; FILE:ARRAY is an
array of another file. An array T.vectors has the keys T.keys, a Parquet file
its only integer column; of other arrays row numbers become the keys, unless
--keys names them. The repository's model.yaml describes a second and later
version too, unless --spec, --feature or --default say otherwise.
"""


@dataclass(frozen=True, kw_only=True)
class ImportOptions(ReportOptions):
    source: Path = argument()
    """Sources: ps.json, HugeCTR folders, .npz, .parquet, .safetensors, or PyTorch .pt/.pth
    files."""
    repository: RepositoryLocation = repository_option(DEFAULT_REPOSITORY, "--to", "-r")
    """The model repository to write to; a remote one needs space for the version in TMPDIR."""
    name: str | None = option(None, "--name", "-n")
    """The model's name in the repository."""
    version: int | None = option(None, "--version", "-v", min=1)
    """The new version; default: the next one."""
    format_: str | None = option(None, "--format")
    """Source format (default: inferred from the file name)."""
    model: str | None = option(None)
    """Import only this model of a ps.json."""
    table: list[str] | None = option(None, "--table", "-t", metavar="NAME=SOURCE[,...]")
    """A table and its SOURCE: an array, a file or a folder; several are stacked. Repeatable."""
    keys: list[str] | None = option(None, metavar="TABLE=SOURCE")
    """Array or column that holds a table's keys. Repeatable."""
    vectors: list[str] | None = option(None, metavar="TABLE=PATTERN")
    """Parquet columns that hold a table's vectors. Repeatable."""
    feature: list[str] | None = option(
        None, "--feature", "-f", metavar="NAME=TABLE[,TABLE...][+OFFSET][:OPTION...]"
    )
    """A feature of requests: its tables take the same keys, to which the offset is added. OPTION:
    sum, mean, sqrtn or none (pooling), context, hotness=N, max_hotness=N, max_length=N,
    keep_first, keep_last. Repeatable."""
    default: list[str] | None = option(None, metavar="TABLE=VALUE[,...]")
    """The vector of unknown keys: one number, or as many as the table's dim. Repeatable."""
    rows: list[str] | None = option(None, metavar="[TABLE=]FORMAT")
    """Row format of all tables, or of one: float32, float16, bfloat16, float8_e4m3, int8, int4.
    Repeatable."""
    spec: Path | None = option(None, metavar="FILE")
    """A model.yaml to use as the model's description."""
    dense: Path | None = option(None, metavar="FILE")
    """The network: an .onnx file."""
    metadata: list[str] | None = option(None, metavar="KEY=VALUE")
    """An entry to store in the version's manifest. Repeatable."""
    watermark: list[str] | None = option(None, metavar="TOPIC/PARTITION=OFFSET")
    """Offset of the first message of an update stream that the tables do not contain: nodes read the
    partition from there. Repeatable."""
    base: str = option("latest", metavar="VERSION")
    """Version whose unchanged tables the new one shares: a number, latest or none."""
    allow_nan: bool = option(False)
    """Import NaN and infinite values unchanged instead of rejecting them."""
    replace: bool = option(False)
    """Replace the version if it exists."""
    replace_spec: bool = option(False)
    """Replace an existing model.yaml that differs."""

    @property
    def folder(self) -> Path:
        """The local repository to write to; of a remote one, `_import_all` got a temporary one."""
        assert isinstance(self.repository, Path)
        return self.repository


def import_(options: ImportOptions) -> None:
    """Import tables and a network as a version of the repository."""
    _check_options(options)
    if isinstance(options.repository, Path):
        _import_all(options, None)
        return
    if options.replace:
        raise ConfigError(
            f"--replace: versions in {options.repository} do not change; import another version number"
        )
    with TemporaryDirectory(prefix="hps-import-") as folder:
        _import_all(replace(options, repository=Path(folder)), options.repository)


def _import_all(options: ImportOptions, remote: RepositoryUri | None) -> None:
    """Import into the folder ``options.repository``, and publish from there to ``remote``, if given."""
    from hps.cli.model_options import choices, row_formats
    from hps.cli.model_publish import publish_to
    from hps.models.check import repeated_by_table
    from hps.models.repository import Repository

    chosen = choices(options.table, options.keys, options.vectors)
    written = []
    plans = _plans(options, chosen)
    formats = row_formats(options.rows, {t.name for plan in plans for t in plan.tables})
    for plan in plans:
        staged = options if remote is None else _staged(plan, options, remote)
        written.append(_import(plan, staged, formats, remote or options.repository))
    repository = Repository(options.folder)
    opened = [repository.open(each.model, each.version) for each in written]
    repeated = [repeated_by_table(each) for each in opened]
    if remote is not None:
        uris = [publish_to(remote, each, replace_spec=options.replace_spec) for each in opened]
        written = [each._replace(folder=uri) for each, uri in zip(written, uris, strict=True)]
    if options.as_json:
        print_json([_imported(*entry) for entry in zip(written, opened, repeated, strict=True)])
    else:
        for each, version, counts in zip(written, opened, repeated, strict=True):
            _show(each, version, counts, remote or options.repository)


def _staged(plan: ImportPlan, options: ImportOptions, remote: RepositoryUri) -> ImportOptions:
    """Options for a folder before publishing: with the remote model.yaml in it, and the next version."""
    from hps.models.remote.opening import open_writable_store
    from hps.models.remote.store import FileMissing

    store, model = open_writable_store(remote), _name(plan, options)
    versions: list[int] = []
    with suppress(FileMissing):
        versions = store.versions(model)
        text = store.read(f"{model}/model.yaml")
        (options.folder / model).mkdir(parents=True, exist_ok=True)
        (options.folder / model / "model.yaml").write_bytes(text)
    return replace(options, version=options.version or max(versions, default=0) + 1)


def _name(plan: ImportPlan, options: ImportOptions) -> str:
    return options.name or (plan.spec.name if plan.spec else plan.source.stem)


class _ImportedVersion(NamedTuple):
    model: str
    version: int
    folder: Path | str
    plan: ImportPlan


def _import(
    plan: ImportPlan, options: ImportOptions, formats: Mapping[str, str], repository: Location
) -> _ImportedVersion:
    """Write one version; ``repository``: its destination. Raises ConfigError, ModelError."""
    from hps.cli.model_options import base_version, pairs, watermark
    from hps.cli.progress import ConsoleProgress
    from hps.models.importers import ImportSettings, import_model
    from hps.node.dense_version import check_network_file

    model = _name(plan, options)
    spec = _with_rows(_spec(plan, model, options), formats, options, repository)
    check_network_file(spec, options.dense)
    folder = import_model(
        options.folder,
        model,
        plan,
        ImportSettings(
            options.version,
            options.dense,
            pairs("--metadata", options.metadata, "KEY=VALUE"),
            allow_nan=options.allow_nan,
            replace=options.replace,
            replace_spec=options.replace_spec,
            base=base_version(options.base),
            watermark=watermark(options.watermark),
        ),
        spec=spec,
        progress=ConsoleProgress(),
    )
    return _ImportedVersion(model, int(folder.name), folder, plan)


def _spec(plan: ImportPlan, model: str, options: ImportOptions) -> ModelSpec:
    """The model's description: from --spec, the repository's model.yaml, or the options."""
    from hps.cli.model_options import defaults, dense_spec, features, rename_spec
    from hps.config import load_model_spec
    from hps.models.importers.import_model import describe

    feature_specs, default_vectors = features(options.feature), defaults(options.default)
    if options.spec is not None:
        return rename_spec(load_model_spec(options.spec), model)
    is_described = bool(feature_specs or default_vectors)
    exists = not is_described and (options.folder / model / "model.yaml").is_file()
    network = None
    if options.dense and not exists:
        network = dense_spec(plan, feature_specs, options.dense)
    return describe(options.folder, model, plan, feature_specs, network, default_vectors)


def _with_rows(
    spec: ModelSpec, formats: Mapping[str, str], options: ImportOptions, repository: Location
) -> ModelSpec:
    """The description with the formats of --rows. Raises ModelError if it contradicts a model.yaml."""
    from hps.config import load_model_spec
    from hps.models.importers.import_model import check_rows, with_rows

    existing = options.folder / spec.name / "model.yaml"
    if existing.is_file() and not options.replace_spec:
        remedy = (
            "leave --rows out, take another name (--name), or replace model.yaml (--replace-spec)"
        )
        source = f"{repository}/{spec.name}/model.yaml"
        check_rows(load_model_spec(existing), formats, source, remedy, defaults=True)
    return with_rows(spec, formats, str(options.spec or options.source))


def _check_options(options: ImportOptions) -> None:
    """Check, before anything is read, that the options parse and are consistent."""
    from hps.cli.model_options import base_version, defaults, features, pairs, watermark

    base_version(options.base)
    watermark(options.watermark)
    is_described = bool(features(options.feature) or defaults(options.default))
    pairs("--metadata", options.metadata, "KEY=VALUE")
    if options.spec is not None and is_described:
        raise ConfigError(
            "--spec describes features and defaults; leave --feature and --default out"
        )


def _show(
    imported: _ImportedVersion,
    opened: ModelVersion,
    repeated: Mapping[str, int],
    repository: Location,
) -> None:
    from hps.models.check import repeated_text

    version = f"{imported.model}/{imported.version}"
    for table in imported.plan.tables:
        print_line(f"{version} {table.name}: {plural(table.rows, 'row')} of dim {table.dim}")
        if (errors := row_errors(opened, table.name)) is not None:
            print_line(f"  rows as {errors.rows}: {errors_text(errors)}")
        if repeated[table.name]:
            warn(f"{version} {table.name}: {repeated_text(repeated[table.name])}")
        for part, offset in table.parts:
            print_line(f"  {part}: keys from {offset:,} (its feature has key_offset {offset})")
    print_line(
        f"Written to {imported.folder}. Serve it: hps serve --set models.repository={repository}"
    )


def _plans(options: ImportOptions, tables: Sequence[TableChoice]) -> list[ImportPlan]:
    """One plan, or one per model of a ps.json."""
    from hps.config import load_config
    from hps.models.importers import plan_import
    from hps.models.importers.hugectr import plan_legacy
    from hps.models.importers.sources import detect

    source, name = options.source, options.name
    if not source.exists():
        raise ConfigError(f"there is no file or folder {source}")
    kind = options.format_ or detect(source)
    if kind != "ps.json" and name is None:
        raise ConfigError("give the model a name: --name NAME")
    if kind == "ps.json" and options.model is None and name is None and not tables:
        return [plan_legacy(source, legacy) for legacy in load_config(source).legacy]
    return [plan_import(source, tables, format=options.format_, model=options.model)]


def _imported(
    imported: _ImportedVersion, opened: ModelVersion, repeated: Mapping[str, int]
) -> dict[str, Any]:
    return {
        "model": imported.model,
        "version": imported.version,
        "folder": imported.folder,
        "tables": [
            {
                "name": t.name,
                "rows": t.rows,
                "repeated_keys": repeated[t.name],
                "dim": t.dim,
                "offsets": dict(t.parts),
                "row_errors": row_errors_json(opened, t.name),
            }
            for t in imported.plan.tables
        ],
    }
