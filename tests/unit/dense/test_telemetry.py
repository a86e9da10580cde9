"""ONNX Runtime with its telemetry disabled writes no file to the home folder."""

import os
import subprocess
import sys
from pathlib import Path

import hps.cli

NETWORK = Path(hps.cli.__file__).parent / "demo_model/ctr/1/dense.onnx"
CODE = """
import sys
from pathlib import Path
from hps.dense.onnx import OnnxModel
OnnxModel(Path(sys.argv[1]))
"""


def test_onnxruntime_writes_no_file_to_the_home_folder(tmp_path):
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("ORT_", "XDG_"))}
    environment["HOME"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", CODE, str(NETWORK)], env=environment, check=True)
    assert [path.name for path in tmp_path.rglob("*")] == []
