"""The shape stated in ARCHITECTURE.md and CONTRIBUTING.md, held against the tree."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*ROOT.glob("hps/**/*.py"), *ROOT.glob("services/**/*.py")])

# Third party -> the only places that may import it.
DOORS = {
    "rocksdict": ["hps/tiers/rocksdb/"],
    "onnxruntime": ["hps/dense/onnx.py", "hps/triton/files/"],
    "prometheus_client": ["hps/observability/metrics.py"],
    "yaml": ["hps/config/"],
    "tritonclient": [
        *("hps/client/", "hps/tools/conformance/", "hps/dense/triton/", "hps/triton/", "services/"),
    ],
    "fastapi": ["services/"],
    "starlette": ["services/"],
    "uvicorn": ["services/"],
    "cupy": ["hps/cuda/", "hps/tiers/gpu/cache.py", "hps/tiers/gpu/host_bridge.py"],
    "redis": ["hps/tiers/redis/"],
    "confluent_kafka": ["hps/updates/kafka/"],
    "opentelemetry": ["hps/observability/otel.py", "hps/client/trace.py"],
    "rich": ["hps/cli/", "hps/tools/"],
    "typer": ["hps/cli/", "hps/tools/output.py"],
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_each_third_party_enters_through_its_door(path):
    names = imported(path)
    for party, doors in DOORS.items():
        if party in names:
            assert any(relative(path).startswith(door) for door in doors), (
                f"{relative(path)} imports {party}; its doors are {doors}"
            )


def test_environment_is_read_in_one_place():
    readers = [relative(p) for p in SOURCES if re.search(r"os\.(environ|getenv)", p.read_text())]
    assert [r for r in readers if not r.startswith("hps/config/")] == []


def test_the_library_is_synchronous():
    """But for clients: its own, the others' that it tries, and the one that makes load."""
    asynchronous = [
        relative(p)
        for p in ROOT.glob("hps/**/*.py")
        if not relative(p).startswith(
            ("hps/client/", "hps/tools/conformance/clients.py", "hps/tools/bench/")
        )
        and any(isinstance(n, ast.AsyncFunctionDef) for n in ast.walk(ast.parse(p.read_text())))
    ]
    assert asynchronous == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_files_stay_readable(path):
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md"])
def test_paths_named_in_documents_exist(document):
    text = (ROOT / document).read_text()
    named = re.findall(
        r"`((?:hps|services|tests|docs|benchmarks|examples|deploy|requirements)/[\w./-]*)`", text
    )
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_the_import_direction_told_is_the_one_checked():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    told = " ".join((ROOT / "ARCHITECTURE.md").read_text().split())
    assert " > ".join(layers) in told
