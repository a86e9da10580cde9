"""docs/model-repository.md: its commands run, its fields and messages are the code's."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import helper
from safetensors.numpy import save_file
from typer.testing import CliRunner

from hps.cli.main import app
from hps.cli.model_import import IMPORT_EXAMPLES
from hps.models.manifest import Manifest
from tests.support.onnx_networks import network

ROOT = Path(__file__).parents[4]
GUIDE = (ROOT / "docs/model-repository.md").read_text()
ROWS = np.random.default_rng(0).random((6, 4), np.float32)


def section(title: str) -> str:
    return GUIDE.split(f"## {title}\n")[1].split("\n## ")[0]


def commands() -> list[str]:
    in_guide = re.findall(r"`(hps model import \S[^`]*)`", section("Import"))
    joined = re.sub(r"\\\n\s*", "", IMPORT_EXAMPLES)
    in_help = [
        line.strip() for line in re.findall(r"^  (hps model .*?)(?: {3,}.*)?$", joined, re.M)
    ]
    return sorted({*in_guide, *in_help})


@pytest.fixture
def sources(tmp_path, monkeypatch, save_torch, tensor):
    """The files that the examples name."""
    monkeypatch.chdir(tmp_path)
    names = ("user_emb.weight", "item_emb.weight", "emb.0.weight", "emb.1.weight")
    save_torch(tmp_path / "net.pt", {name: tensor(ROWS) for name in names})
    save_file(
        {"items.weight": ROWS, "item_ids": np.arange(6), "fused.weight": ROWS},
        tmp_path / "e.safetensors",
    )
    (tmp_path / "emb.safetensors").write_bytes((tmp_path / "e.safetensors").read_bytes())
    np.savez(tmp_path / "t.npz", **{"t.keys": np.arange(6), "t.vectors": ROWS})
    np.savez(tmp_path / "tables.npz", ids=np.arange(6), vectors=ROWS)
    pq.write_table(pa.table({"item_id": np.arange(6), "v": list(ROWS)}), tmp_path / "items.parquet")
    for folder in ("model_dir/users", "0_sparse_2000.model"):
        (tmp_path / folder).mkdir(parents=True)
        np.arange(6, dtype="<i8").tofile(tmp_path / folder / "key")
        ROWS.tofile(tmp_path / folder / "emb_vector")
    model = {
        "model": "wdl",
        "sparse_files": ["0_sparse_2000.model"],
        "embedding_table_names": ["t"],
        "embedding_vecsize_per_table": [4],
        "maxnum_catfeature_query_per_table_per_sample": [1],
        "default_value_for_each_table": [0.0],
        "deployed_device_list": [0],
    }
    (tmp_path / "ps.json").write_text(json.dumps({"models": [model]}))
    write_network(tmp_path / "ctr.onnx")
    return tmp_path


def write_network(path: Path) -> None:
    nodes = [helper.make_node("Add", ["users", "items"], ["score"])]
    path.write_bytes(network(nodes, {"users": 4, "items": 4}, {"score": 4}))


def test_guide_has_commands():
    assert len(commands()) >= 10


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_guide_run(sources, command):
    words = shlex.split(command, comments=True)
    assert words[:3] == ["hps", "model", "import"]
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0, result.stderr
    assert CliRunner().invoke(app, ["model", "verify"]).exit_code == 0


def test_guide_lists_the_manifest_fields():
    named = re.findall(r"^\| (`[^|]*) \|", section("manifest.json"), re.M)
    fields = {name.split(".")[0] for cell in named for name in re.findall(r"`([\w.<>]+)`", cell)}
    assert fields == set(Manifest.model_fields)


def test_guide_quotes_the_messages():
    """Every quoted part of a message in the guide occurs in the code."""
    code = " ".join(
        path.read_text()
        for folder in ("hps/models", "hps/tiers")
        for path in (ROOT / folder).rglob("*.py")
    )
    plain = re.sub(r"\{[^}]*\}|\d+", "#", re.sub(r'"\s*f?"', "", code))
    for message in re.findall(r"^\| `([^`]*)`", section("Errors"), re.M):
        for part in re.split(r"…|'x'|\d+|\(…\)", message):
            words = part.strip(" :,()")
            if len(words) > 8:
                assert words in plain, f"{message!r}: no such message"
