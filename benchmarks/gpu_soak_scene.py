"""A model and updates whose rows prove themselves, for `benchmarks.gpu_soak`.

A row's first value is its round ``v`` (1 to 4,000), the others are ``key * c + v * d``, with factors that
differ by table and position. All are whole numbers below 2^24, so float32 holds them exactly. A row of
another key or table, and one of two rounds, is noticed: the model ``soak`` gets each key a second time as
a number, and its network computes in ``wrong`` the sum of the differences of a sample's rows from what
they must be, and in ``rounds`` each row's round.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu_serving import NAMES
from benchmarks.native_load import Template
from benchmarks.request_templates import PatchedTensor, make_template
from hps.config.model_schema import DenseSpec, FeatureSpec, ModelSpec, TableSpec, TensorSpec
from hps.models.version_writer import write_version

DIM, ROWS, ROUNDS = 32, 30_000, 4_000
SENT_KEYS = [f"k{i}" for i in range(len(NAMES))]


def key_factors(table: int, dim: int = DIM) -> NDArray[np.float32]:
    factors = 1 + (7 * np.arange(dim) + 11 * table) % 61
    factors[0] = 0
    return factors.astype(np.float32)


def round_factors(dim: int = DIM) -> NDArray[np.float32]:
    return (1 + (13 * np.arange(dim)) % 61).astype(np.float32)


def round_of(number: int) -> int:
    """The round of write ``number``, from 0 on."""
    return number % ROUNDS + 1


def marked_rows(keys: Any, rounds: Any, factors: tuple[Any, Any]) -> Any:
    """(n, dim) float32 rows of ``keys (n,)`` below 2^17 in ``rounds``, (n,) or a number; NumPy or CuPy."""
    by_key, by_round = factors
    numbers = keys.astype(np.float32)
    return numbers[:, None] * by_key + (numbers * 0 + rounds)[:, None] * by_round


def write_soak_model(folder: Path, rows: int = ROWS) -> None:
    """Model ``soak``: 26 tables with the rows of round 1."""
    spec = ModelSpec(
        name="soak",
        tables=[TableSpec(name=name, dim=DIM) for name in NAMES],
        features=[FeatureSpec(name=name, table=name, hotness=1) for name in NAMES],
        dense=DenseSpec(
            inputs=[TensorSpec(name=name, shape=[-1, 1]) for name in SENT_KEYS],
            outputs=[
                TensorSpec(name="wrong", shape=[-1, 1]),
                TensorSpec(name="rounds", shape=[-1, len(NAMES)]),
            ],
        ),
    )
    keys = np.arange(rows)
    tables = {
        name: (keys, marked_rows(keys, 1, (key_factors(i), round_factors())))
        for i, name in enumerate(NAMES)
    }
    write_version(folder / "models", spec, 1, tables, dense=checking_network())


def checking_network() -> bytes:
    """The network of model ``soak``."""
    from onnx import TensorProto, helper, numpy_helper

    def tensor(name: str, width: int) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])

    count = len(NAMES)
    constants = {
        "by_key": np.stack([key_factors(i) for i in range(count)]),
        "by_round": round_factors(),
        "rows_shape": np.array([-1, count, DIM]),
        "keys_shape": np.array([-1, count, 1]),
        "rounds_shape": np.array([-1, count]),
        "one": np.array([-1, 1]),
        "first": np.array([0]),
        "row_axes": np.array([1, 2]),
    }
    node = helper.make_node
    nodes = [
        node("Concat", list(NAMES), ["joined_rows"], axis=1),
        node("Reshape", ["joined_rows", "rows_shape"], ["rows"]),
        node("Concat", SENT_KEYS, ["joined_keys"], axis=1),
        node("Reshape", ["joined_keys", "keys_shape"], ["keys"]),
        node("Gather", ["rows", "first"], ["round"], axis=2),
        node("Mul", ["keys", "by_key"], ["key_part"]),
        node("Mul", ["round", "by_round"], ["round_part"]),
        node("Add", ["key_part", "round_part"], ["expected"]),
        node("Sub", ["rows", "expected"], ["difference"]),
        node("Abs", ["difference"], ["distance"]),
        node("ReduceSum", ["distance", "row_axes"], ["total"], keepdims=0),  # NaN stays NaN
        node("Reshape", ["total", "one"], ["wrong"]),
        node("Reshape", ["round", "rounds_shape"], ["rounds"]),
    ]
    inputs = [tensor(n, DIM) for n in NAMES] + [tensor(n, 1) for n in SENT_KEYS]
    outputs = [tensor("wrong", 1), tensor("rounds", count)]
    held = [numpy_helper.from_array(values, name) for name, values in constants.items()]
    graph = helper.make_graph(nodes, "soak", inputs, outputs, held)
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    return bytes(model.SerializeToString())


def soak_template(protocol: str, batch: int, rows: int = ROWS) -> Template:
    """``batch`` samples of 26 keys, whose answer is ``batch`` zeros."""
    tensors = [PatchedTensor(name, (batch, 1), limit=rows) for name in NAMES]
    tensors += [PatchedTensor(name, (batch, 1), source=i) for i, name in enumerate(SENT_KEYS)]
    made = make_template(protocol, "soak", tensors, ["wrong"])
    return Template(made.protocol, made.message, made.patches, made.method, zeros=4 * batch)


@dataclass
class FileWriter:
    """Writes update files of a hundredth of a table's rows, one after the other, until ``stop`` is set."""

    folder: Path
    rows: int = ROWS
    pause_s: float = 0.02
    spoil: bool = False
    files: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    last: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def run(self) -> None:
        self.last = {name: np.ones(self.rows, np.float32) for name in NAMES}
        rng, factors = np.random.default_rng(0), round_factors()
        while not self.stop.wait(self.pause_s):
            if len(list(self.folder.glob("*.npz"))) > 20:  # the node is behind
                continue
            self.files += 1
            at, number = self.files % len(NAMES), round_of(self.files)
            keys = rng.choice(self.rows, max(1, self.rows // 100), replace=False)
            rows = marked_rows(keys, number, (key_factors(at), factors))
            rows[0, -1] += self.spoil
            hidden = self.folder / f".{self.files}.npz"
            np.savez(hidden, key=keys, vector=rows)
            self.last[NAMES[at]][keys] = number
            hidden.rename(self.folder / f"soak.{NAMES[at]}.{self.files:09}.npz")
