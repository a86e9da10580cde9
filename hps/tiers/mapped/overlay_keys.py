"""Keys of an overlay's entries, as `hps.tiers.mapped.overlay_rows.OverlayRows.hide` passes them on."""

from __future__ import annotations

import numpy as np

from hps.types import KeyArray


class CollectedKeys:
    """The keys of an overlay's entries, in blocks."""

    def __init__(self) -> None:
        self.keys: list[KeyArray] = []

    def override(self, keys: KeyArray) -> None:
        self.keys.append(keys)


class OverlaidKeys:
    """Which of ``keys (n,)``, ascending, an overlay has: ``mask (n,)``."""

    def __init__(self, keys: KeyArray) -> None:
        self._keys = keys
        self.mask = np.zeros(len(keys), bool)

    def override(self, keys: KeyArray) -> None:
        if len(self._keys):
            at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            self.mask[at[self._keys[at] == keys]] = True
