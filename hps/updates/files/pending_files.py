"""Age of the files that wait in an update folder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from hps.tiers.positions import Place
from hps.updates.files.directory import is_update_file


class PendingFiles:
    """Implements `hps.updates.arrival_times.PendingUpdates`: a file waits until it is moved away."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._oldest_s: float | None = None

    def poll(self) -> None:
        arrived = []
        with os.scandir(self._folder) as entries:
            for each in entries:
                try:
                    if is_update_file(each):
                        arrived.append(each.stat().st_ctime)  # a rename counts as arrival
                except FileNotFoundError:
                    continue  # it was applied meanwhile
        self._oldest_s = min(arrived, default=None)

    def ages_s(self) -> Mapping[Place, float | None]:
        oldest_s = self._oldest_s
        age_s = 0.0 if oldest_s is None else max(0.0, time.time() - oldest_s)
        return {(str(self._folder), 0): age_s}
