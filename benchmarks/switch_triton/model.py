"""The model of `benchmarks.switch` in Triton's python backend: rows in memory, network in ONNX Runtime.

``BENCH_FOLDER`` has the versions' folders, whose keys are row numbers; ``BENCH_PACKAGES`` ONNX Runtime."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        sys.path.append(os.environ["BENCH_PACKAGES"])
        import onnxruntime

        folder = Path(os.environ["BENCH_FOLDER"], args["model_version"])
        config = json.loads(args["model_config"])
        self.names = [each["name"] for each in config["input"]]
        tables = sorted((folder / "tables").iterdir())
        width = config["output"][0]["dims"][0] // len(self.names)
        self.tables = [
            np.fromfile(each / "emb_vector", np.float32).reshape(-1, width) for each in tables
        ]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        network = next(folder.rglob("*.onnx"))
        self.network = onnxruntime.InferenceSession(
            str(network), options, providers=["CPUExecutionProvider"]
        )

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        rows = {}
        for i, name in enumerate(self.names):
            keys = pb.get_input_tensor_by_name(request, name).as_numpy()
            rows[name] = self.tables[i % len(self.tables)][keys[:, 0]]
        if "vectors" in request.requested_output_names():
            return pb.InferenceResponse([pb.Tensor("vectors", np.concatenate([*rows.values()], 1))])
        outputs = self.network.run(["score", "versions"], rows)
        found = zip(("score", "versions"), outputs, strict=True)
        return pb.InferenceResponse([pb.Tensor(name, output) for name, output in found])
