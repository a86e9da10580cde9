"""``hps version``: installed versions, to paste into a bug report."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from hps.cli.command_options import CommandApp
from hps.cli.options import ReportOptions
from hps.tools.output import print_table

app = CommandApp(add_completion=False)

PACKAGES = ("numpy", "rocksdict", "tritonclient", "fastapi", "uvicorn", "pyarrow")
ONNX_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")


@app.command(epilog="Example: hps version --output json")
def version(options: ReportOptions) -> None:
    """Print the versions of hps and of its dependencies, for a bug report."""
    from hps.native import COMPILED

    facts = {
        "hps": installed("hps-server") or "not installed",
        "python": platform.python_version(),
        "system": f"{sys.platform} {platform.machine()}",
        "native core": "compiled" if COMPILED else "NumPy twins",
    }
    facts |= {name: installed(name) or "not installed" for name in (*PACKAGES, *ONNX_RUNTIMES)}
    options.report(facts, lambda facts: print_table(("", "version"), facts.items()))


def installed(package: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
