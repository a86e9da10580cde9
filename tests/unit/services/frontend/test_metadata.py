"""Model metadata, and requests that are built from it."""

from __future__ import annotations

import numpy as np
import orjson
import pytest

LEFT = {"name": "left", "shape": [1, 2], "datatype": "INT64", "data": [1, 99]}


def test_metadata_of_a_ranking_model(data, call):
    found = call(data, "GET", "/v2/models/ctr").json()
    assert found["versions"] == ["1"]
    assert found["inputs"] == [
        {"name": "user", "datatype": "INT64", "shape": [-1, 1]},
        {"name": "item", "datatype": "INT64", "shape": [-1, 1]},
        {"name": "history", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "dense", "datatype": "FP32", "shape": [-1, 3]},
    ]
    assert found["outputs"] == [
        {"name": "score", "datatype": "FP32", "shape": [-1, 1]},
        {"name": "logit", "datatype": "FP32", "shape": [-1]},
    ]
    reported = found["parameters"]
    assert reported["source_codes"]["rocksdb"] == 4
    assert reported["source_outputs"] == ["user.source", "item.source", "history.source"]
    assert reported["jagged_inputs"] == ["history.offsets", "history.weights"]
    assert reported["context"] == ["user"]


def test_metadata_of_lookups(data, call):
    found = call(data, "GET", "/v2/models/halves.lookup").json()
    assert found["inputs"] == [{"name": "half", "datatype": "INT64", "shape": [-1, -1]}]
    assert found["outputs"] == [{"name": "half", "datatype": "FP16", "shape": [-1, 4]}]
    found = call(data, "GET", "/v2/models/words").json()
    assert [t["name"] for t in found["inputs"]] == ["KEYS", "NUMKEYS"]
    assert found["inputs"][1]["datatype"] == "INT32"
    assert found["outputs"] == [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, -1]}]
    assert found["parameters"]["tables"] == ["left", "right"]


@pytest.mark.parametrize("model", ["ctr", "ctr.lookup", "words", "halves.lookup"])
def test_configuration_and_metadata_agree_on_dimensions(data, model, call):
    """As perf_analyzer reads them: only the metadata's dimensions include the batch."""
    metadata = call(data, "GET", f"/v2/models/{model}").json()
    config = call(data, "GET", f"/v2/models/{model}/config").json()
    assert config["max_batch_size"] > 0
    for reported, configured in (("inputs", "input"), ("outputs", "output")):
        for tensor, entry in zip(metadata[reported], config[configured], strict=True):
            assert tensor["name"] == entry["name"]
            assert tensor["shape"] == [-1, *entry["dims"]]
            assert entry["data_type"] == f"TYPE_{tensor['datatype']}"
    assert {type(p["string_value"]) for p in config["parameters"].values()} == {str}
    optional = {entry["optional"] for entry in config["input"]}
    assert optional == {model.endswith(".lookup")}


@pytest.mark.parametrize("model", ["ctr", "ctr.lookup", "words", "words.lookup", "halves.lookup"])
def test_request_built_from_the_metadata_is_answered(data, model, call):
    """It sends every input and requests every output, as perf_analyzer does."""
    metadata = call(data, "GET", f"/v2/models/{model}").json()
    inputs = []
    for tensor in metadata["inputs"]:
        shape = [1, *(2 if dim == -1 else dim for dim in tensor["shape"][1:])]
        values = [1] * int(np.prod(shape))
        inputs.append({**tensor, "shape": shape, "data": values})
    wanted = [{"name": t["name"], "parameters": {"binary_data": True}} for t in metadata["outputs"]]
    reply = call(
        data,
        "POST",
        f"/v2/models/{model}/infer",
        json={"inputs": inputs, "outputs": wanted, "id": ""},
    )
    assert reply.status_code == 200, reply.text
    head = orjson.loads(reply.content[: int(reply.headers["inference-header-content-length"])])
    assert [o["name"] for o in head["outputs"]] == [o["name"] for o in wanted]
