"""``helm test``: health, a prediction, a lookup, an update, as a client of the release sees them.

``verify.py URL [ADMIN]``: the service's HTTP port; a lookup node's admin port, for the update. The key and
the certificates are those of the command line, ``HPS_API_KEY`` and ``HPS_TLS``. Ends with 1 and one line at
the first thing that is wrong.
"""

from __future__ import annotations

import os
import secrets
import sys
from typing import Any

import numpy as np

from hps.client import Admin, Client, Tls
from hps.errors import HpsError

DTYPES = {
    "BOOL": np.bool_, "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
    "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
}  # fmt: skip


def main(http: str, admin: str | None) -> None:
    key = os.environ.get("HPS_API_KEY")
    files = dict(part.split("=", 1) for part in os.environ.get("HPS_TLS", "").split(",") if part)
    tls = Tls(files.get("ca"), files.get("certificate"), files.get("key")) if files else None
    with Client(http, api_key=key, tls=tls) as client, Admin(http, api_key=key, tls=tls) as asking:
        require(client.ready(), f"{http} is not ready")
        models = [
            each["name"]
            for each in asking.ask("/v2/repository/index", {"ready": True})
            if each["state"] == "READY"
        ]
        require(bool(models), f"{http} serves no model")
        print(f"health: ready, {len(models)} models")
        for model in models:
            predict(client, model)
    if admin is not None:
        with Admin(admin, api_key=key, tls=tls) as node:
            update(node)
    print("hps is well")


def predict(client: Client, model: str) -> None:
    """One request of zeros, by the model's own description."""
    described = client.metadata(model)
    inputs = {tensor["name"]: zeros(tensor) for tensor in described["inputs"]}
    outputs = client.infer(model, inputs).outputs
    for name, values in outputs.items():
        if values.dtype.kind == "f":
            require(bool(np.isfinite(values).all()), f"{model}: {name} is not finite")
    what = "a lookup" if model.endswith(".lookup") else "a prediction"
    print(f"{model}: {what}, {', '.join(sorted(outputs))}")


def zeros(tensor: dict[str, Any]) -> np.ndarray[Any, Any]:
    """A tensor of one sample that fits the description; NUMKEYS counts the one key of the first table."""
    shape = [max(1, size) for size in tensor["shape"]]
    made = np.zeros(shape, DTYPES[tensor["datatype"]])
    if tensor["name"] == "NUMKEYS":
        made.flat[0] = 1
    return made


def update(node: Admin) -> None:
    """A row is written under a key that the table does not have, found, and deleted."""
    tables = node.ask("/v1/tables")["tables"]
    require(bool(tables), f"{node.url} has no table")
    table = tables[0]
    rows = f"/v1/tables/{table['model']}/{table['name']}/rows"
    key = secrets.randbits(62) | 1 << 62
    require(not stored(node, rows, key), f"{rows}: key {key} is there already; try again")
    vector = [0.5] * int(table["dim"])
    node.ask(rows, {"keys": [key], "vectors": [vector]})
    found = stored(node, rows, key)
    node.ask(rows, {"deleted": [key]})
    require(found == vector, f"{rows}: key {key} was written and reads {found}")
    require(not stored(node, rows, key), f"{rows}: key {key} was deleted and is still there")
    print(f"{table['model']}/{table['name']}: an update, written, read and deleted")


def stored(node: Admin, rows: str, key: int) -> list[float] | None:
    """The row's vector; None where no tier has one."""
    (row,) = node.ask(f"{rows}?keys={key}")["rows"]
    return list(row["vector"]) if row["found"] else None


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SystemExit(otherwise)


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
    except HpsError as error:
        sys.exit(str(error))
