"""NVRTC through ctypes: compiles CUDA C++ on a machine without a GPU and without CuPy."""

import ctypes
import importlib.util
import os
from pathlib import Path

import pytest


def nvrtc_library() -> Path | None:
    """Return the path of NVRTC in the `nvidia-cuda-nvrtc` wheels; None without them."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in spec.submodule_search_locations or []] if spec else []
    libraries = [p for folder in folders for p in folder.glob("*/lib/libnvrtc.so.*")]
    return libraries[0] if libraries else None


class Nvrtc:
    """NVRTC's C interface, as far as compiling needs it."""

    def __init__(self, path: Path) -> None:
        self._nvrtc = ctypes.CDLL(str(path))
        self._nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile(self, file: Path, options: list[str], expressions: list[str]) -> bytes:
        """Return the machine code of the kernels ``expressions`` in ``file``.

        Raises RuntimeError with NVRTC's log."""
        call, program = self._nvrtc, ctypes.c_void_p()
        source, name = file.read_bytes(), file.name.encode()
        self._check(call.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None))
        for expression in expressions:
            self._check(call.nvrtcAddNameExpression(program, expression.encode()))
        flags = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        failed = call.nvrtcCompileProgram(program, len(options), flags)
        size = ctypes.c_size_t()
        if failed:
            self._check(call.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            self._check(call.nvrtcGetProgramLog(program, log))
            raise RuntimeError(log.value.decode())
        self._check(call.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        self._check(call.nvrtcGetCUBIN(program, code))
        self._check(call.nvrtcDestroyProgram(ctypes.byref(program)))
        return code.raw

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(self._nvrtc.nvrtcGetErrorString(status).decode())


@pytest.fixture(scope="session")
def nvrtc() -> Nvrtc:
    path = nvrtc_library()
    if path is None:
        message = "NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return Nvrtc(path)
