"""Rows of one table by row number, in Triton's python backend. ``BENCH_FOLDER`` has the table."""

import os

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        self.table = np.load(f"{os.environ['BENCH_FOLDER']}/{args['model_name']}.npy")

    def execute(self, requests):
        answers = []
        for request in requests:
            keys = pb.get_input_tensor_by_name(request, "KEYS").as_numpy()
            answers.append(pb.InferenceResponse([pb.Tensor("VECTORS", self.table[keys])]))
        return answers
