"""What Python has of `hps/v1/*.proto` is what `make proto` makes of them."""

import subprocess
import sys
from pathlib import Path

import grpc_tools
import pytest

ROOT = Path(__file__).resolve().parents[3]
PROTOS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("hps/v1/*.proto"))


@pytest.mark.parametrize("proto", PROTOS)
def test_generated_code_is_that_of_the_proto(proto, tmp_path):
    known = Path(grpc_tools.__file__).parent / "_proto"  # Google's own
    folders = [f"-I{ROOT}", f"-I{known}", f"--python_out={tmp_path}"]
    # In its own process: with TensorFlow's protobuf in this one, the compiler's code crashes.
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *folders, proto], check=True)
    generated = proto.replace(".proto", "_pb2.py")
    assert (tmp_path / generated).read_text() == (ROOT / generated).read_text(), "run `make proto`"
