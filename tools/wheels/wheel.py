"""Build a wheel for zig's target: python wheel.py ARCHITECTURE BUILD-FOLDER FOLDER.

Fails if the wheel has no compiled core, which a normal build would allow.
"""

from __future__ import annotations

import sys
from pathlib import Path
from zipfile import ZipFile

from scikit_build_core.build import build_wheel

TOOLS = Path(__file__).resolve().parent


def main(architecture: str, build: str, folder: str) -> None:
    define = {
        "CMAKE_CXX_COMPILER": f"{TOOLS}/zig-c++",
        # nanobind expects <cstdio>, which Python's limited API does not include.
        "CMAKE_CXX_FLAGS": "-include cstdio -Wno-macro-redefined",
        "CMAKE_AR": f"{TOOLS}/zig-ar",
        "CMAKE_RANLIB": f"{TOOLS}/zig-ranlib",
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": architecture,
        "CMAKE_PROJECT_hps_native_INCLUDE": f"{TOOLS}/stable_abi.cmake",
    }
    config = {f"cmake.define.{name}": value for name, value in define.items()}
    name = build_wheel(folder, config | {"wheel.py-api": "cp312", "build-dir": build})
    inside = ZipFile(Path(folder) / name).namelist()
    if not any("hps/native/_core" in file and file.endswith(".so") for file in inside):
        sys.exit(f"{name} has no compiled core; the lines above say why")


main(*sys.argv[1:])
