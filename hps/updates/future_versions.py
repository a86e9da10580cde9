"""Future versions: rows of a producer with a wrong clock must not block their keys."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from hps.types import make_version
from hps.updates.source import TableUpdate


def drop_future_versions(
    update: TableUpdate, ahead_s: float
) -> tuple[TableUpdate | None, list[int]]:
    """Drop messages that hold a version more than ``ahead_s`` ahead of this machine's clock.

    Returns the rest, None when nothing is left, and the numbers of the dropped messages."""
    changes, messages = update.changes, update.messages
    latest = make_version(int((time.time() + ahead_s) * 1000))
    rows, gone = changes.versions > latest, changes.deleted_versions > latest
    if not rows.any() and not gone.any():
        return update, []
    each = np.arange(len(messages))
    of_row, of_gone = np.repeat(each, messages["upserts"]), np.repeat(each, messages["deletes"])
    ahead = np.zeros(len(messages), bool)
    ahead[of_row[rows]] = True
    ahead[of_gone[gone]] = True
    numbers = update.numbers[ahead].tolist()
    if ahead.all():
        return None, numbers
    kept = changes.select(~ahead[of_row], ~ahead[of_gone])
    numbers_kept = update.numbers[~ahead]
    rest = replace(update, changes=kept, messages=messages[~ahead], numbers=numbers_kept)
    return rest, numbers
