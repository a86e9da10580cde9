"""``hps triton``: model repositories for a Triton server."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hps.cli.model import RepositoryOption, VersionOption
from hps.cli.model_import import DEFAULT_REPOSITORY
from hps.cli.output import say

app = typer.Typer(no_args_is_help=True, help="Make model repositories for a Triton server.")


class Dense(StrEnum):
    onnxruntime = "onnxruntime"
    python = "python"


EXAMPLES = """\b
Examples:
  hps triton export ctr --out triton-models
  tritonserver --model-repository triton-models
  hps serve --config hps.yaml --set dense.triton.url=localhost:8001

Triton's gRPC port is 8001 as well: give one of the two another.
"""


@app.callback()
def triton() -> None:
    """Make model repositories for a Triton server."""


@app.command(epilog=EXAMPLES)
def export(
    model: Annotated[str, typer.Argument(help="A model with a dense part.")],
    out: Annotated[
        Path,
        typer.Option("--out", metavar="FOLDER", help="Triton's model repository; made if need be."),
    ],
    repository: RepositoryOption = DEFAULT_REPOSITORY,
    version: VersionOption = None,
    dense: Annotated[
        Dense,
        typer.Option(help="Triton's backend; python where its onnxruntime is missing."),
    ] = Dense.onnxruntime,
) -> None:
    """Write a model's network as a model of a Triton repository."""
    from hps.models.repository import Repository
    from hps.triton.export import export_dense

    opened = Repository(repository).open(model, version)
    folder = export_dense(opened, out, dense.value)
    say(f"{folder}: {opened.name}/{opened.version}, run by Triton's backend {dense.value}")
