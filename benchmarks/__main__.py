"""``python -m benchmarks [NAME…]`` (``make bench``): run every benchmark and write one table of bars."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import make_table

HERE = Path(__file__).parent
# Halves, which `frontend` and `stores` run.
PARTS = {"frontend_servers", "frontend_triton", "stores_redis", "stores_rocksdb"}
# Found by their text: some import packages that exist only where they can run.
SCRIPTS = {path.stem for path in HERE.glob("*.py") if "\nBENCHMARK = " in path.read_text()}
NAMES = sorted(SCRIPTS - PARTS)


def main() -> int:
    """Run each script in a separate process; exit status 1 when one fails, or misses a bar under
    ``--check``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="shorter runs, under a minute each")
    parser.add_argument("--check", action="store_true", help="exit status 1 when a bar is not met")
    parser.add_argument(
        "--json", type=Path, metavar="FOLDER", help="keep every script's figures there"
    )
    options = parser.parse_args()
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"unknown benchmarks {sorted(unknown)}; known: {', '.join(NAMES)}")
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.names or NAMES:
            file = (options.json or Path(temporary)) / f"{name}.json"
            bars = run(name, file, quick=options.quick)
            failed |= not bars or (options.check and any(b["verdict"] != "met" for b in bars))
            rows += [row(name, bar) for bar in bars] or [row(name, None)]
    Console().print(make_table("All benchmarks", rows))
    return int(failed)


def run(name: str, file: Path, *, quick: bool) -> list[dict[str, Any]]:
    """Run one script and return its bars; empty when it failed, which it has reported."""
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(file)]
    done = subprocess.run([*command, "--quick"] if quick else command)
    if done.returncode or not file.exists():
        return []
    bars: list[dict[str, Any]] = json.loads(file.read_text())["bars"]
    return bars


def row(name: str, bar: dict[str, Any] | None) -> dict[str, str]:
    if bar is None:
        return {"benchmark": name, "": "", "value": "–", "bar": "", "verdict": "BROKEN"}
    value = "–" if bar["value"] is None else f"{bar['value']:.2f}"
    return {
        "benchmark": name,
        "": bar["text"],
        "value": value,
        "bar": bar["limit"],
        "verdict": bar["verdict"],
    }


if __name__ == "__main__":
    sys.exit(main())
