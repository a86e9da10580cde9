"""Embedding lookup in Triton's python backend. Triton's Python needs the package hps-server[cpu]."""

import json

import triton_python_backend_utils as pb

from hps.errors import HpsError
from services.triton.backend import BackendRequest, LookupBackend, triton_error_code
from services.triton.tensors import TensorPlacement


class TritonPythonModel:
    def initialize(self, args):
        # Answers have parameters in newer Tritons.
        self.has_parameters = "parameters" in (pb.InferenceResponse.__init__.__doc__ or "")
        config = json.loads(args["model_config"])
        device = args["model_instance_device_id"]
        self.place = TensorPlacement(pb.Tensor, args["model_instance_kind"], device)
        parameters = {k: v["string_value"] for k, v in config.get("parameters", {}).items()}
        self.inputs = [tensor["name"] for tensor in config["input"]]
        wide = {t["name"] for t in config["output"] if t["data_type"] == "TYPE_FP32"}
        version = int(args["model_version"])
        self.backend = LookupBackend(args["model_name"], parameters, version, int(device), wide)

    def execute(self, requests):
        asked = [self.asked(request) for request in requests]
        return [self.answered(answer) for answer in self.backend.answer(asked)]

    def finalize(self):
        self.backend.close()

    def asked(self, request):
        inputs = {}
        for name in self.inputs:
            tensor = pb.get_input_tensor_by_name(request, name)
            if tensor is not None:
                inputs[name] = self.place.array(tensor)
        return BackendRequest(inputs, tuple(request.requested_output_names()), request.timeout())

    def answered(self, answer):
        if isinstance(answer, HpsError):
            status = getattr(pb.TritonError, triton_error_code(answer))
            return pb.InferenceResponse([], pb.TritonError(str(answer), status))
        tensors = self.place.tensors(answer.outputs)
        if not self.has_parameters:
            return pb.InferenceResponse(tensors)
        return pb.InferenceResponse(tensors, parameters=json.dumps(answer.parameters))
