"""Wheels without code that stand in for those of a registry, so that installations are tested without one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_LATEST = "999"
"""The stand-ins' version; it satisfies every lower bound."""


def write_wheel(
    folder: Path, name: str, version: str, files: Mapping[str, str], metadata: str = ""
) -> None:
    """Write a wheel of ``files``; ``metadata`` are further header lines."""
    stem = re.sub(r"[-_.]+", "_", name)
    info = f"{stem}-{version}.dist-info"
    inside = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{metadata}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    inside[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*inside, f"{info}/RECORD"])
    with ZipFile(folder / f"{stem}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in inside.items():
            wheel.writestr(path, text)


def write_stand_ins(
    folder: Path, metadata: str, versions: Mapping[str, str], files: Mapping[str, Mapping[str, str]]
) -> None:
    """Write a stand-in of the distribution with ``metadata``, and of all that it requires.

    ``versions``: of distributions that are not the latest. ``files``: contents by distribution."""
    headers = Parser().parsestr(metadata)
    required = headers.get_all("Requires-Dist", [])
    lines = "".join(
        f"{header}: {value}\n"
        for header in ("Requires-Dist", "Provides-Extra")
        for value in headers.get_all(header, [])
    )
    write_wheel(folder, headers["Name"], headers["Version"], {}, lines)
    for name in {_distribution(text) for text in required}:
        extras = {extra for text in required for extra in _extras(text, name)}
        provided = "".join(f"Provides-Extra: {extra}\n" for extra in sorted(extras))
        write_wheel(folder, name, versions.get(name, _LATEST), files.get(name, {}), provided)


def _distribution(requirement: str) -> str:
    found = _NAME.match(requirement)
    assert found is not None, requirement
    return found[0]


def _extras(requirement: str, name: str) -> list[str]:
    found = re.match(rf"{re.escape(name)}\s*\[([^]]*)]", requirement)
    return [] if found is None else [extra.strip() for extra in found[1].split(",")]
