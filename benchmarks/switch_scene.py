"""Models, requests and servers of `benchmarks.switch`: versions of a model whose rows carry their version.

The first number of each row is its version. The network returns its version, and the lowest and highest
number that it found in the rows of a sample, beside a score of two layers; a lookup returns rows. So every
answer shows whether all of it came from one version."""

from __future__ import annotations

import json
import shutil
import sysconfig
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.load import http_request
from benchmarks.native_load import Patch, Template
from benchmarks.open_load import Kind
from benchmarks.peers.hps_server import start_hps
from benchmarks.peers.process import Server
from benchmarks.peers.triton import start_triton
from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version

TABLES, FEATURES, DIM, HIDDEN = 4, 26, 32, 256
BATCH = 16
NAMES = [f"f{i}" for i in range(FEATURES)]
MODEL, OTHER = "m", "other"
TRITON_MODEL = Path(__file__).parent / "switch_triton/model.py"
_CHUNK = 1 << 18


def rows_of(gigabytes: float) -> int:
    """Rows per table of a version with so many 10^9 bytes of vectors."""
    return int(gigabytes * 1e9 / (TABLES * DIM * 4))


def spec(name: str) -> ModelSpec:
    """The model: 26 features over four tables, and a network."""
    return ModelSpec.model_validate(
        {
            "name": name,
            "tables": [{"name": f"t{i}", "dim": DIM} for i in range(TABLES)],
            "features": [
                {"name": feature, "table": f"t{i % TABLES}", "hotness": 1}
                for i, feature in enumerate(NAMES)
            ],
            "dense": {
                "inputs": [],
                "outputs": [
                    {"name": "score", "shape": [-1, 1]},
                    {"name": "versions", "shape": [-1, 3]},
                ],
            },
        }
    )


def write_versions(root: Path, name: str, rows: int, numbers: Sequence[int]) -> None:
    """Publish versions of ``rows`` per table."""
    for number in numbers:
        tables = {f"t{i}": _chunks(rows, number) for i in range(TABLES)}
        write_version(root, spec(name), number, tables, dense=network(number), mapped=True)


def read_mapped(root: Path, name: str) -> None:
    """Bring the mapped files of a model's versions into the operating system's cache."""
    block = bytearray(1 << 24)
    for path in sorted((root / name).rglob("mapped")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def _chunks(rows: int, version: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Rows by their number: the version, then numbers that depend on the row."""
    vectors = np.empty((_CHUNK, DIM), np.float32)
    for start in range(0, rows, _CHUNK):
        keys = np.arange(start, min(start + _CHUNK, rows))
        part = vectors[: len(keys)]
        part[:] = ((keys % 1021) / 1021).astype(np.float32)[:, None]
        part[:, 0] = version
        yield keys, part


def network(version: int) -> bytes:
    """Two layers for the score, and ``versions``: lowest and highest of the rows', the network's."""
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(7)
    weights = [
        random.standard_normal(shape, np.float32) / np.sqrt(shape[0], dtype=np.float32)
        for shape in ((FEATURES * DIM, HIDDEN), (HIDDEN, 1))
    ]
    held = [numpy_helper.from_array(array, f"w{i}") for i, array in enumerate(weights)]
    firsts = np.arange(FEATURES) * DIM
    held += [
        numpy_helper.from_array(firsts, "firsts"),
        numpy_helper.from_array(np.array([version], np.float32), "version"),
        numpy_helper.from_array(np.zeros(1, np.float32), "zero"),
    ]
    node = helper.make_node
    nodes = [
        node("Concat", NAMES, ["x"], axis=1),
        node("MatMul", ["x", "w0"], ["y"]),
        node("Relu", ["y"], ["z"]),
        node("MatMul", ["z", "w1"], ["logit"]),
        node("Sigmoid", ["logit"], ["score"]),
        node("Gather", ["x", "firsts"], ["found"], axis=1),
        node("ReduceMin", ["found"], ["lowest"], axes=[1], keepdims=1),
        node("ReduceMax", ["found"], ["highest"], axes=[1], keepdims=1),
        node("Mul", ["lowest", "zero"], ["nothing"]),
        node("Add", ["nothing", "version"], ["own"]),
        node("Concat", ["lowest", "highest", "own"], ["versions"], axis=1),
    ]

    def tensor(name: str, width: int) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])

    outputs = [tensor("score", 1), tensor("versions", 3)]
    graph = helper.make_graph(nodes, "m", [tensor(name, DIM) for name in NAMES], outputs, held)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(made.SerializeToString())


def kinds(rows: int, *, ours: bool) -> list[Kind]:
    """Three lookups of 26 keys for each prediction of 16 samples."""
    lookup = _request(f"{MODEL}.lookup", 1, rows) if ours else _request(MODEL, 1, rows, "vectors")
    predict = _request(MODEL, BATCH, rows, "score", "versions")
    return [
        Kind(lookup, share=0.75, count=FEATURES * DIM, stride=DIM),
        Kind(predict, share=0.25, count=BATCH * 3),
    ]


def _request(model: str, batch: int, rows: int, *outputs: str) -> Template:
    """A REST request with binary tensors. Triton wants to be asked for them output by output."""
    size = batch * 8
    inputs = [
        {
            "name": name,
            "shape": [batch, 1],
            "datatype": "INT64",
            "parameters": {"binary_data_size": size},
        }
        for name in NAMES
    ]
    header: dict[str, Any] = {"inputs": inputs}
    if outputs:
        header["outputs"] = [{"name": o, "parameters": {"binary_data": True}} for o in outputs]
    else:
        header["parameters"] = {"binary_data_output": True}
    head = json.dumps(header).encode()
    body = head + bytes(size * len(NAMES))
    message = http_request(
        f"/v2/models/{model}/infer", body, {"Inference-Header-Content-Length": str(len(head))}
    )
    first = len(message) - size * len(NAMES)
    patches = [Patch(first + i * size, batch, rows, skew=1) for i in range(len(NAMES))]
    return Template("http", message, patches)


@dataclass(frozen=True)
class Side:
    """A running server; ``address`` for requests, ``control`` for `load`.

    Its clients reopen a connection that was idle for ``idle_s``."""

    name: str
    server: Server
    address: str
    control: str
    idle_s: float

    def load(self, version: int, model: str = MODEL) -> None:
        """Serve ``version`` in place of the current one; returns when it is served. Raises OSError."""
        chosen: dict[str, Any] = {"version": version}
        if self.name == "Triton":
            chosen = {"config": json.dumps(triton_config(version))}
        self.post(f"/v2/repository/models/{model}/load", chosen)

    def post(self, path: str, parameters: Mapping[str, Any]) -> None:
        """Send a request to the repository's API. Raises OSError."""
        body = json.dumps({"parameters": parameters}).encode()
        request = urllib.request.Request(f"http://{self.control}{path}", body, method="POST")
        request.add_header("Content-Type", "application/json")
        try:
            urllib.request.urlopen(request, timeout=300).read()
        except urllib.error.HTTPError as error:
            log = self.server.log.read_text(errors="replace")[-4000:]
            raise OSError(f"{path}: {error.code} {error.read()[:500]!r}\n{log}") from error

    def resources(self) -> dict[str, float]:
        """Anonymous and shared memory (MB), descriptors, threads and major page faults of the server's
        processes."""
        family = [self.server.process, *self.server.process.children(recursive=True)]
        return {
            "anonymous MB": sum(_anonymous_kb(each.pid) for each in family) / 1024,
            "descriptors": float(sum(_descriptors(each.pid) for each in family)),
            "threads": float(sum(each.num_threads() for each in family)),
            "major faults": float(sum(_major_faults(each.pid) for each in family)),
        }


def _descriptors(pid: int) -> int:
    """Open descriptors without sockets, of which each connection of a client has one."""
    found = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found += not str(each.readlink()).startswith("socket:")
    return found


def _major_faults(pid: int) -> int:
    """Page faults for which a page was read: of mapped files that left the page cache, say."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[9])


def _anonymous_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(status.split(f"{name}:")[1].split()[0]) for name in ("RssAnon", "RssShmem"))


@contextmanager
def hps_side(folder: Path, *, gpu: bool, workers: int) -> Iterator[Side]:
    """``hps serve`` with version 1; a replaced version is freed at once, so that each load is a whole one.

    A GPU has room for half of the rows of each version."""
    tiers = {"gpu": {"use": "required", "share": 0.5} if gpu else {"use": "off"}}
    models = {"rollback_s": 0, "serve": {MODEL: {"version": 1}}}
    with start_hps(
        folder,
        tiers=tiers,
        models=models,
        dense={"provider": "cuda" if gpu else "cpu"},
        limits={"workers": workers, "request_timeout_ms": 10_000.0},
        timeout_s=300.0,
    ) as server:
        yield Side("hps", server, server.address, server.admin, 60.0)


def triton_config(version: int) -> dict[str, Any]:
    """Configuration of Triton's model, which serves one version."""
    return {
        "name": MODEL,
        "backend": "python",
        "max_batch_size": 1024,
        "version_policy": {"specific": {"versions": [version]}},
        "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        "dynamic_batching": {},
        "input": [{"name": name, "data_type": "TYPE_INT64", "dims": [1]} for name in NAMES],
        "output": [
            {"name": "vectors", "data_type": "TYPE_FP32", "dims": [FEATURES * DIM]},
            {"name": "score", "data_type": "TYPE_FP32", "dims": [1]},
            {"name": "versions", "data_type": "TYPE_FP32", "dims": [3]},
        ],
    }


@contextmanager
def triton_side(folder: Path) -> Iterator[Side]:
    """Triton with version 1: one python model that has rows in memory and runs the network."""
    repository = folder / "triton"
    for number in (1, 2):
        (repository / MODEL / str(number)).mkdir(parents=True)
        shutil.copy(TRITON_MODEL, repository / MODEL / str(number))
    # Protocol buffers' text form accepts JSON's values, but not its keys in quotes.
    config = json.dumps(triton_config(1))
    for name in ("name", "backend", "max_batch_size", "version_policy", "specific", "versions"):
        config = config.replace(f'"{name}":', f"{name}:")
    for name in ("instance_group", "kind", "count", "dynamic_batching", "input", "output"):
        config = config.replace(f'"{name}":', f"{name}:")
    for name in ("data_type", "dims"):
        config = config.replace(f'"{name}":', f"{name}:")
    for word in ("KIND_CPU", "TYPE_INT64", "TYPE_FP32"):
        config = config.replace(f'"{word}"', word)
    (repository / MODEL / "config.pbtxt").write_text(config[1:-1])
    env = {
        "BENCH_FOLDER": str(folder / "models" / MODEL),
        "BENCH_PACKAGES": sysconfig.get_path("purelib"),
    }
    arguments = ("--model-control-mode=explicit", f"--load-model={MODEL}")
    with start_triton(repository, env=env, arguments=arguments, timeout_s=300.0) as server:
        yield Side("Triton", server, server.address, server.address, 1.5)
