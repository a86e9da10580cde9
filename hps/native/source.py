"""Check that the compiled core was built from the present C++ sources.

The core contains their digest, which CMake gets by running this file. After an update of the checkout an
old core may lack functions that Python calls, or behave differently under the same name.
"""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def digest(folder: Path = FOLDER) -> str:
    """Return the digest of the sources of the core; empty if they are not installed."""
    total = sha256()
    sources = [p for p in folder.rglob("*.?pp") if p.parent.name != "stress"]
    for path in sorted([*sources, *folder.glob("CMakeLists.txt")]):
        name = path.relative_to(folder).as_posix()
        total.update(f"{name} {sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest() if sources else ""


def check(core: Any, folder: Path = FOLDER) -> None:
    """Raise ConfigError unless ``core`` was built from the sources in ``folder``."""
    from hps.errors import ConfigError

    expected = digest(folder)
    if expected and getattr(core, "SOURCES", "") != expected:
        raise ConfigError(
            f"the native core {core.__file__} was built from other sources than those in {folder}: build "
            "it again with `make setup`, or `pip install .`; HPS_NATIVE=off does without it"
        )


if __name__ == "__main__":
    sys.stdout.write(digest())
