"""A network for Triton's python backend: dense.onnx, run by ONNX Runtime.

For Tritons without the onnxruntime backend, which is faster. Triton's Python needs the package onnxruntime.
"""

from pathlib import Path

import onnxruntime
import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"], args["model_version"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            str(folder / "dense.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self.inputs = [node.name for node in self.session.get_inputs()]

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        try:
            names = list(request.requested_output_names())
            inputs = {
                name: pb.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs
            }
            outputs = self.session.run(names, inputs)
            tensors = [pb.Tensor(n, array) for n, array in zip(names, outputs, strict=True)]
            return pb.InferenceResponse(tensors)
        except Exception as error:
            return pb.InferenceResponse([], pb.TritonError(str(error)))
