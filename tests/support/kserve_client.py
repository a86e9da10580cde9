"""Sends requests with KServe's client, in a separate environment: its gRPC messages and Triton's can't be in
one process. Reads a request from standard input, writes the answers to standard output."""

import asyncio
import json
import sys

import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput


async def infer(client, address, request, binary):
    inputs = []
    for name, (datatype, shape, values) in request["inputs"].items():
        tensor = InferInput(name, shape, datatype)
        kind = {"INT64": np.int64, "FP32": np.float32}[datatype]
        array = np.array(values, kind).reshape(shape)
        tensor.set_data_from_numpy(array, binary_data=binary)
        inputs.append(tensor)
    wanted = [
        RequestedOutput(name, parameters={"binary_data": binary}) for name in request["outputs"]
    ]
    made = InferRequest(request["model"], inputs, request_id="r-7", request_outputs=wanted)
    answer = await client.infer(f"http://{address}", made, model_name=request["model"])
    assert answer.id == "r-7"
    return {output.name: output.as_numpy().tolist() for output in answer.outputs}


async def healthy(client, url, model):
    try:
        live, ready = await client.is_server_live(url), await client.is_server_ready(url)
    except json.JSONDecodeError:
        return None
    return live and ready and await client.is_model_ready(url, model)


async def main():
    given = json.load(sys.stdin)
    client = InferenceRESTClient(RESTConfig(protocol="v2", timeout=30))
    answers = {}
    for server, address in given["servers"].items():
        answers[server] = {
            "health": await healthy(client, f"http://{address}", given["request"]["model"]),
            "outputs": [
                await infer(client, address, given["request"], binary) for binary in (False, True)
            ],
        }
    await client.close()
    json.dump(answers, sys.stdout)


asyncio.run(main())
