"""Sources that change during their import are rejected: no crash, no torn version."""

import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from hps.errors import ModelError
from hps.models.importers import TableChoice, import_model, plan_import

KINDS = [
    "hugectr",
    "npz",
    "npz_fortran",
    "npz_compressed",
    "parquet",
    "safetensors",
    "torch",
    "torch_t",
]
ROWS, DIM = 1 << 15, 128  # 16 MB: several blocks

SHORTEN = """
import os, sys
from pathlib import Path
from hps.errors import ModelError
from hps.models.importers import plan_import
source, file = map(Path, sys.argv[1:])
(table,) = plan_import(source).tables
chunks = table.chunks()
next(chunks)
os.truncate(file, file.stat().st_size // 3)
try:
    print(sum(len(keys) for keys, _ in chunks), "more rows")
except ModelError as error:
    print("refused:", error)
"""


@pytest.fixture
def source(tmp_path, save_torch, tensor):
    """Writes a source of ``kind``; returns it and the file that holds its vectors."""
    # Not to be compressed: the file is to be as long as its rows.
    rows = np.random.default_rng(0).random((ROWS, DIM), np.float32)

    def write(kind):
        path = tmp_path / {"torch": "w.pt", "torch_t": "w.pt"}.get(kind, f"w.{kind.split('_')[0]}")
        match kind:
            case "hugectr":
                path.mkdir()
                np.arange(ROWS).tofile(path / "key")
                rows.tofile(path / "emb_vector")
                return path, path / "emb_vector"
            case "npz":
                np.savez(path, w=rows)
            case "npz_fortran":
                np.savez(path, w=np.asfortranarray(rows))
            case "npz_compressed":
                np.savez_compressed(path, w=rows)
            case "parquet":
                flat = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), DIM)
                pq.write_table(pa.table({"id": np.arange(ROWS), "v": flat}), path)
            case "safetensors":
                save_file({"w": rows}, path)
            case "torch":
                save_torch(path, {"w": tensor(rows)})
            case "torch_t":
                seen = replace(tensor(rows.T), size=rows.shape, stride=(1, ROWS))
                save_torch(path, {"w": seen})
        return path, path

    return write


@pytest.mark.parametrize("kind", KINDS)
def test_shortened_file_is_an_error(source, kind):
    """Imported in a separate process, which a shortened mapped file would end."""
    path, file = source(kind)
    done = subprocess.run(
        [sys.executable, "-c", SHORTEN, path, file],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.startswith("refused:"), done.stdout
    assert file.name in done.stdout


@pytest.mark.parametrize("kind", ["hugectr", "npz", "parquet", "safetensors", "torch"])
def test_file_changed_during_import_is_an_error(tmp_path, source, kind):
    path, file = source(kind)

    class Writes:
        """Appends to the file at the first step, as a process that replaces it would."""

        def task(self, *_words):
            return nullcontext(self.step)

        def step(self, _rows):
            with file.open("ab") as out:
                out.write(b"more")

    plan = plan_import(path, [TableChoice("w", ("w",))] if kind == "npz" else [])
    with pytest.raises(ModelError, match=rf"{file.name} was changed while it was read \(\d+ bytes"):
        import_model(tmp_path / "models", "m", plan, progress=Writes())
    assert not (tmp_path / "models" / "m" / "1").exists()
