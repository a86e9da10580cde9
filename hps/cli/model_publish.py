"""``hps model publish`` and ``index``: versions with another network, and for remote repositories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hps.cli.command_options import argument, option
from hps.cli.options import DEFAULT_REPOSITORY, ReportOptions, RepositoryLocation, repository_option
from hps.errors import ConfigError
from hps.tools.output import plural, print_line

if TYPE_CHECKING:
    from hps.config.repository_uri import RepositoryUri
    from hps.models.repository import ModelVersion

PUBLISH_EXAMPLES = """\b
Examples:
  hps model publish ctr --to s3://bucket/models          # the highest version
  hps model publish ctr --version 3 -r /srv/models --to gs://bucket/models
  hps model publish ctr --dense new.onnx       # next version, same tables
  hps model publish ctr --with-updates hps.yaml --to s3://bucket/models
"""
INDEX_EXAMPLES = """\b
Examples:
  hps model index /srv/www/models      # writes /srv/www/models/index.json
"""


@dataclass(frozen=True, kw_only=True)
class PublishModelOptions(ReportOptions):
    name: str = argument()
    """The model."""
    to: RepositoryLocation | None = repository_option(None, "--to", metavar="URI")
    """The remote repository to publish to, for example s3://bucket/models."""
    dense: Path | None = option(None, metavar="FILE")
    """Make a version with this network and the tables of the base first."""
    base: str = option("latest", metavar="VERSION")
    """The version that it is made from: a number or latest."""
    with_updates: Path | None = option(None, metavar="CONFIG")
    """Make a version with the updates in the RocksDB of this node's configuration first."""
    repository: Path = option(DEFAULT_REPOSITORY, "--repository", "-r", metavar="DIR")
    """The model repository that has the version."""
    version: int | None = option(None, "--version", "-v", min=1)
    """The version; default: the highest, of one that is made here the next one."""
    metadata: list[str] | None = option(None, metavar="KEY=VALUE")
    """An entry for the manifest of a version made here. Repeatable."""
    parallel: int = option(8, min=1, max=128)
    """Files to upload at a time."""
    replace_spec: bool = option(False)
    """Replace a model.yaml there that differs."""
    no_mapped: bool = option(False)
    """Upload a version without mapped files as it is; by default they are written into it first."""


def publish(options: PublishModelOptions) -> None:
    """Publish a new network for a version's tables, or upload a version.

    Rows keep the formats of model.yaml. To change them, import the version's tables under another
    name, with --spec model.yaml, --dense and --rows (hps model import)."""
    if options.to is None and options.dense is None and options.with_updates is None:
        raise ConfigError(
            "nothing to publish: name a remote repository (--to s3://bucket/models), or a network "
            "(--dense FILE.onnx) or updates (--with-updates hps.yaml) for a new version in the local one"
        )
    if options.dense is not None and options.with_updates is not None:
        raise ConfigError(
            "--dense and --with-updates make two versions; publish one after the other"
        )
    remote = None if options.to is None else _remote(options.to)
    opened = _opened(options)
    uri = str(opened.folder)
    if remote is not None:
        uri = publish_to(
            remote,
            opened,
            parallel=options.parallel,
            replace_spec=options.replace_spec,
            mapped=not options.no_mapped,
        )
    options.report(
        {"model": opened.name, "version": opened.version, "uri": uri},
        lambda _report: print_line(f"Published {opened.key} to {uri}"),
    )


def _opened(options: PublishModelOptions) -> ModelVersion:
    """The version to publish, which is written first with a new network or updates."""
    from hps.models.repository import Repository

    if options.with_updates is not None:
        from hps.cli.model_options import base_version
        from hps.cli.store_compact import compact_model
        from hps.cli.store_open import read_config

        parsed = base_version(options.base)
        base = parsed if isinstance(parsed, int) else None
        configuration = read_config(options.with_updates, None)
        done = compact_model(configuration, options.name, base, options.version)
        return Repository(done["folder"].parent.parent).open(options.name, done["version"])
    version = options.version if options.dense is None else _write_dense(options, options.dense)
    return Repository(options.repository).open(options.name, version)


def _write_dense(options: PublishModelOptions, dense: Path) -> int:
    """Write a version with another network; returns its number. Raises ModelError, ConfigError."""
    from hps.cli.model_options import base_version, pairs
    from hps.models.repository import Repository
    from hps.node.dense_version import write_dense_version

    Repository(options.repository).spec(options.name)  # raises NotFound with the models' names
    folder = write_dense_version(
        options.repository,
        options.name,
        dense,
        base=base_version(options.base),
        version=options.version,
        metadata=pairs("--metadata", options.metadata, "KEY=VALUE"),
    )
    return int(folder.name)


def publish_to(
    uri: RepositoryUri,
    version: ModelVersion,
    *,
    parallel: int = 8,
    replace_spec: bool = False,
    mapped: bool = True,
) -> str:
    """Publish a version, with progress; returns its URI. Raises ModelError, ConfigError.

    For the arguments see `publish_remote`."""
    from hps.cli.progress import ConsoleProgress
    from hps.models.remote.opening import open_writable_store
    from hps.models.remote.publish import publish_remote

    store = open_writable_store(uri)
    return publish_remote(
        version,
        store,
        ConsoleProgress(),
        parallel=parallel,
        replace_spec=replace_spec,
        mapped=mapped,
    )


def _remote(location: RepositoryLocation) -> RepositoryUri:
    if isinstance(location, Path):
        raise ConfigError(
            f"--to {location} is a folder; publish to a URI such as s3://bucket/models, or import into the "
            "folder with `hps model import`"
        )
    return location


@dataclass(frozen=True, kw_only=True)
class IndexOptions(ReportOptions):
    folder: Path = argument()
    """The model repository that a web server serves."""


def index(options: IndexOptions) -> None:
    """Write index.json, which lists a repository on a web server.

    Versions without a manifest.json are left out."""
    from hps.models.manifest import FILE_NAME
    from hps.models.remote.web_store import INDEX_FILE, index_of
    from hps.models.repository import Repository
    from hps.models.staging import write_atomically

    repository = Repository(options.folder)
    models = {
        name: [
            v
            for v in repository.versions(name)
            if (options.folder / name / str(v) / FILE_NAME).is_file()
        ]
        for name in repository.names()
    }
    path = options.folder / INDEX_FILE
    write_atomically(path, index_of(models))
    options.report(
        {"index": path, "models": models},
        lambda _report: print_line(f"Wrote {path}: {plural(len(models), 'model')}"),
    )
