"""Dead letters kept in memory."""

from __future__ import annotations

from collections.abc import Sequence

from hps.updates.source import DeadLetter


class Letters:
    """Implements `hps.updates.ingestor.DeadLetters`."""

    def __init__(self) -> None:
        self.kept: list[DeadLetter] = []

    def keep(self, letters: Sequence[DeadLetter]) -> Sequence[DeadLetter]:
        self.kept += letters
        return letters

    def report(self) -> None:
        pass
