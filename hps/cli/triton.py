"""``hps triton``: export models to a Triton model repository."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hps.cli.command_options import CommandApp, argument, option
from hps.cli.model import RepositoryOptions
from hps.config import load_config
from hps.errors import ConfigError
from hps.tools.output import print_line

app = CommandApp(no_args_is_help=True, help="Export models to a Triton model repository.")


class DenseTarget(StrEnum):
    onnxruntime = "onnxruntime"
    python = "python"
    pytorch = "pytorch"
    tensorrt = "tensorrt"
    tensorflow = "tensorflow"


EXAMPLES = """\b
Examples:
  hps triton export ctr --out triton-models                    # the network
  hps triton export ctr --out triton-models --config hps.yaml  # and lookups
  tritonserver --model-repository triton-models
  hps serve --config hps.yaml --set dense.triton.url=localhost:8001

Triton's gRPC port is 8001 as well: give one of the two another.
"""


@app.callback()
def triton() -> None:
    """Export models to a Triton model repository."""


@dataclass(frozen=True, kw_only=True)
class TritonExportOptions:
    model: str = argument()
    """The model; without a network only its lookups, with --config."""
    out: Path = option(metavar="FOLDER")
    """Triton's model repository; created if missing."""
    source: RepositoryOptions
    dense: DenseTarget = option(DenseTarget.onnxruntime)
    """Triton's backend for the network; python if Triton has no onnxruntime. The last three need a
    network in their format, which you must put there."""
    config: Path | None = option(None, "--config", "-c", metavar="FILE")
    """The node's configuration; also exports lookups and the ensemble."""
    config_at: Path | None = option(None, metavar="PATH")
    """Path of the --config file on Triton's machine, if it differs."""
    instances: int = option(1, min=1)
    """Number of lookup instances in Triton, with --config."""
    gpu: list[int] | None = option(None, metavar="DEVICE")
    """Run lookup instances on this GPU; vectors stay in its memory. Repeatable."""


@app.command(epilog=EXAMPLES)
def export(options: TritonExportOptions) -> None:
    """Export a model to a Triton model repository.

    Exports its network; with --config also its lookups, and an ensemble of both."""
    from hps.cli.options import open_repository
    from hps.triton.export import MODEL_FILES, export_dense, export_ensemble, export_lookup

    opened = open_repository(options.source.repository).open(options.model, options.source.version)
    if options.config is None and opened.spec.dense is None:
        raise ConfigError(
            f"'{options.model}' has no network to export; give --config to export its lookups"
        )
    if opened.spec.dense is not None:
        folder = export_dense(opened, options.out, options.dense.value)
        print_line(f"{folder}: the network, in Triton's backend {options.dense.value}")
        network = folder / str(opened.version) / MODEL_FILES[options.dense.value]
        if not network.exists():
            print_line(f"{network}: put the network there")
    if options.config is None:
        return
    if load_config(options.config).settings.server.runtime is None:
        raise ConfigError(
            f"{options.config}: server.runtime is not set: the folder in which the node has its socket "
            "for Triton's instances"
        )
    folder = export_lookup(
        opened,
        options.out,
        options.config_at or options.config,
        options.instances,
        options.gpu or (),
    )
    print_line(f"{folder}: lookups, attached to the node of {options.config}")
    if opened.spec.dense is not None:
        print_line(f"{export_ensemble(opened, options.out)}: both, one after the other")
