"""Networks for a model's tables: the check of a network's file, and versions with another network."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hps.config import Settings
from hps.config.model_schema import ModelSpec
from hps.dense.onnx import OnnxModel
from hps.errors import ModelError
from hps.models.derived_version import derive_dense_version
from hps.models.manifest import DENSE_FILE
from hps.models.repository import ModelVersion
from hps.models.table_sharing import Base
from hps.node.model_opening import open_model


# The documented Python API: callers name the few arguments that they need.
def write_dense_version(
    root: Path | str,
    name: str,
    dense: Path | bytes,
    *,
    base: Base = "latest",
    version: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a version that has the network ``dense`` and shares all tables with ``base``; returns its folder.

    See `derive_dense_version`. Raises ModelError too, and writes nothing, if the network cannot be run or
    does not fit the model's description."""
    with TemporaryDirectory() as folder:

        def check(spec: ModelSpec) -> None:
            path = Path(folder) / DENSE_FILE
            if isinstance(dense, bytes):
                path.write_bytes(dense)
            check_network_file(spec, path if isinstance(dense, bytes) else dense)

        return derive_dense_version(
            root, name, dense, base=base, version=version, metadata=metadata, check=check
        )


def check_network_file(spec: ModelSpec, dense: Path | None) -> None:
    """Check that the network fits the description, before anything is written. Raises ModelError."""
    if spec.dense is not None and dense is None:
        raise ModelError(
            f"model '{spec.name}' has a dense part; give its network with --dense FILE.onnx"
        )
    if dense is not None:
        _check_alone(dense)
    version = ModelVersion(spec.name, 1, spec, Path(), {}, dense, None, "")
    with ExitStack() as resources:
        open_model(version, Settings(), resources)


def _check_alone(dense: Path) -> None:
    """Check that the network is a single file: exporters may put the weights into another one.

    A version holds one file. Raises ModelError."""
    with TemporaryDirectory() as folder:
        try:
            copy = Path(shutil.copy(dense, folder))
        except OSError as error:
            raise ModelError(f"dense part {dense}: {error.strerror}") from None
        try:
            OnnxModel(copy, "cpu").close()
        except ModelError as error:
            if "external data" not in str(error).lower():
                raise ModelError(str(error).replace(str(copy), str(dense))) from None
            raise ModelError(
                f"{dense} keeps its weights in another file, but a version holds one: export with "
                "torch.onnx.export(..., external_data=False), or rewrite it with "
                "onnx.save_model(onnx.load(path), path)"
            ) from None
