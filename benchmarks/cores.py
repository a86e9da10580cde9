"""CPU time of threads and processes, as the kernel counts it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import psutil


class CoreTimes:
    """CPU seconds until now of this process' threads and of its child processes, by name.

    ``processes``: name -> PID of children that are not to be listed under their program's name."""

    def __init__(self, processes: Mapping[str, int]) -> None:
        self._used: dict[str, float] = {}
        me = psutil.Process()
        python = {each.native_id: each.name for each in threading.enumerate()}
        for task in _tasks(me.pid):
            self._add(f"node: {python.get(int(task.name)) or _name(task)}", task)
        named = {number: name for name, number in processes.items()}
        for child in me.children():
            for task in _tasks(child.pid):
                self._add(named.get(child.pid, child.name()), task)

    def _add(self, name: str, task: Path) -> None:
        self._used[name] = self._used.get(name, 0.0) + _seconds(task)

    def shares(self, before: CoreTimes, seconds: float) -> dict[str, float]:
        """Cores used since ``before``, ``seconds`` ago."""
        return {k: (v - before._used.get(k, 0.0)) / seconds for k, v in self._used.items()}


def _tasks(process: int) -> list[Path]:
    return list(Path(f"/proc/{process}/task").iterdir())


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:
        return "ended"


def _seconds(task: Path) -> float:
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return 0.0
