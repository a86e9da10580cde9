"""A network in Triton's python backend: dense.onnx in ONNX Runtime, one run for the requests of a call.

`hps triton export` writes one without CUDA that runs each request alone. This one runs on the GPU of an
instance of KIND_GPU, and joins requests as Triton's onnxruntime backend does.
"""

from pathlib import Path

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb

CUDA = "CUDAExecutionProvider"


class TritonPythonModel:
    def initialize(self, args):
        network = Path(args["model_repository"], args["model_version"], "dense.onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        providers = ["CPUExecutionProvider"]
        if args["model_instance_kind"] == "GPU":
            onnxruntime.preload_dlls()
            device = {"device_id": args["model_instance_device_id"], "use_tf32": "0"}
            providers = [(CUDA, device), *providers]
        self.session = onnxruntime.InferenceSession(str(network), options, providers=providers)
        if len(providers) > 1 and self.session.get_providers()[0] != CUDA:
            raise pb.TritonModelException("ONNX Runtime does not load CUDA")
        self.inputs = [node.name for node in self.session.get_inputs()]
        self.outputs = [node.name for node in self.session.get_outputs()]

    def execute(self, requests):
        parts = [
            [pb.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs]
            for request in requests
        ]
        joined = parts[0]
        if len(parts) > 1:
            joined = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
        outputs = self.session.run(self.outputs, dict(zip(self.inputs, joined, strict=True)))
        ends = np.cumsum([len(part[0]) for part in parts])[:-1]
        split = zip(*(np.split(output, ends) for output in outputs), strict=True)
        return [self.response(arrays) for arrays in split]

    def response(self, arrays):
        tensors = zip(self.outputs, arrays, strict=True)
        return pb.InferenceResponse([pb.Tensor(name, array) for name, array in tensors])
