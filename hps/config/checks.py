"""Findings of rules that span several settings, and what several of these rules share.

The rules are the `StrictModel.violations` of the schema's classes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

_HOST = re.compile(r"[^\s:/\[\],;]+|\[[0-9a-fA-F:.]+\]")

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class ConfigFinding:
    """A violated rule: ``path`` below the checked object, ``message`` for users.

    ``also``: the other paths involved."""

    path: Path
    message: str
    also: tuple[Path, ...] = ()


def finding(path: str, message: str, *also: str) -> ConfigFinding:
    """A finding; ``path`` and ``also`` are dotted, as in ``server.workers``."""
    return ConfigFinding(_path(path), message, tuple(map(_path, also)))


def _path(dotted: str) -> Path:
    return tuple(dotted.split("."))


def duplicates(names: Sequence[str], where: str, what: str) -> Iterator[ConfigFinding]:
    """One finding per repeated name; it names both positions."""
    first: dict[str, int] = {}
    for i, name in enumerate(names):
        if name in first:
            message = f"two {what} are called {name!r} ({where}[{first[name]}] and {where}[{i}])"
            yield ConfigFinding((where, i, "name"), message, ((where, first[name], "name"),))
        else:
            first[name] = i


def incomplete_pair(settings: object, one: str, other: str) -> Iterator[ConfigFinding]:
    """Two settings that must be set together."""
    for present, missing in ((one, other), (other, one)):
        if getattr(settings, present) is not None and getattr(settings, missing) is None:
            yield finding(missing, f"must be set together with {present}", present)


def both_set(settings: object, one: str, other: str) -> Iterator[ConfigFinding]:
    """Two settings that exclude each other."""
    if getattr(settings, one) is not None and getattr(settings, other) is not None:
        yield finding(other, f"is set together with {one}; remove one of them", one)


def is_address(text: str) -> bool:
    """True for ``host:port``."""
    host, _, port = text.rpartition(":")
    return bool(_HOST.fullmatch(host)) and port.isdecimal() and 0 < int(port) < 65_536


def is_loopback(host: str) -> bool:
    """True if only this machine can reach ``host``; an unknown name counts as reachable."""
    if host.lower() == "localhost":
        return True
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
