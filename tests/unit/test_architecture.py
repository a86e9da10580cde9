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
    "onnxruntime": ["hps/dense/", "hps/triton/files/"],
    "prometheus_client": ["hps/observability/metrics.py"],
    "yaml": ["hps/config/"],
    "tritonclient": [
        *("hps/client/", "hps/tools/conformance/", "hps/dense/triton/", "hps/triton/", "services/"),
    ],
    "fastapi": ["services/"],
    "starlette": ["services/"],
    "uvicorn": ["services/"],
    "hpack": ["services/frontend/grpc/http2/"],
    "cupy": ["hps/cuda/", "hps/tiers/gpu/cache.py", "hps/tiers/gpu/host_bridge.py"],
    "redis": ["hps/tiers/redis/"],
    "confluent_kafka": ["hps/updates/kafka/"],
    "opentelemetry": ["hps/observability/otel.py", "hps/client/trace.py"],
    "rich": ["hps/cli/", "hps/tools/"],
    "typer": ["hps/cli/"],
    "torch": ["hps/torch/pytorch.py"],
    "keras": ["hps/keras/keras3.py"],
    "tensorflow": ["hps/keras/tensorflow_backend.py"],
    "matplotlib": ["hps/tools/plan/chart.py"],
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
    assert [r for r in readers if r != "hps/environment.py"] == []


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


def test_functions_stay_readable():
    long = [
        f"{relative(path)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno >= 70
    ]
    assert long == []


DOCUMENTS = [
    *("ARCHITECTURE.md", "CONTRIBUTING.md", "README.md", "docs/glossary.md", "docs/testing.md"),
    *(relative(page) for page in sorted((ROOT / "docs/decisions").glob("*.md"))),
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_named_in_documents_exist(document):
    text = (ROOT / document).read_text()
    named = re.findall(
        r"`((?:hps|services|tests|docs|benchmarks|examples|deploy|requirements)/[\w./-]*)`", text
    )
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_decision_index_lists_every_page():
    folder = ROOT / "docs/decisions"
    listed = re.findall(r"\((\d{4}-[\w-]+\.md)\)", (folder / "README.md").read_text())
    assert sorted(listed) == sorted(page.name for page in folder.glob("[0-9]*.md"))


def test_architecture_page_has_at_most_12_kib():
    assert len((ROOT / "ARCHITECTURE.md").read_bytes()) <= 12 << 10


def test_the_import_direction_told_is_the_one_checked():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    told = " ".join((ROOT / "ARCHITECTURE.md").read_text().split())
    assert " > ".join(layers) in told


def imports_of_modules() -> dict[str, set[str]]:
    """The product's modules, and which of them each imports."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SOURCES
    }
    found = {}
    for name, path in paths.items():
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        froms = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
        named = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        for node in froms:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            named |= {each if each in paths else str(node.module) for each in full}
        found[name] = (named & paths.keys()) - {name, "hps"}  # the root imports lazily
    return found


def test_modules_import_one_another_in_no_circle():
    imports = imports_of_modules()
    while leaves := [name for name, others in imports.items() if not others & imports.keys()]:
        for name in leaves:
            del imports[name]
    # What is left are circles, and modules that import them.
    while unused := imports.keys() - set().union(*imports.values(), ()):
        for name in unused:
            del imports[name]
    assert [*imports] == []
