"""``hps model publish`` and ``index``: versions for remote repositories."""

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
"""
INDEX_EXAMPLES = """\b
Examples:
  hps model index /srv/www/models      # writes /srv/www/models/index.json
"""


@dataclass(frozen=True, kw_only=True)
class PublishModelOptions(ReportOptions):
    name: str = argument()
    """The model."""
    to: RepositoryLocation = repository_option(..., "--to")
    """The remote repository to publish to, for example s3://bucket/models."""
    repository: Path = option(DEFAULT_REPOSITORY, "--repository", "-r", metavar="DIR")
    """The model repository that has the version."""
    version: int | None = option(None, "--version", "-v", min=1)
    """The version; default: the highest."""
    parallel: int = option(8, min=1, max=128)
    """Files to upload at a time."""
    replace_spec: bool = option(False)
    """Replace a model.yaml there that differs."""


def publish(options: PublishModelOptions) -> None:
    """Upload a version to a remote repository, all or nothing."""
    from hps.models.repository import Repository

    opened = Repository(options.repository).open(options.name, options.version)
    uri = publish_to(
        _remote(options.to), opened, parallel=options.parallel, replace_spec=options.replace_spec
    )
    options.report(
        {"model": opened.name, "version": opened.version, "uri": uri},
        lambda _report: print_line(f"Published {opened.key} to {uri}"),
    )


def publish_to(
    uri: RepositoryUri, version: ModelVersion, *, parallel: int = 8, replace_spec: bool = False
) -> str:
    """Publish a version, with progress; returns its URI. Raises ModelError, ConfigError."""
    from hps.cli.progress import ConsoleProgress
    from hps.models.remote.opening import open_writable_store
    from hps.models.remote.publish import publish_remote

    store = open_writable_store(uri)
    return publish_remote(
        version, store, ConsoleProgress(), parallel=parallel, replace_spec=replace_spec
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
