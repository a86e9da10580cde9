"""Check which keys of a trace a table's files have."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hps.errors import BadRequest
from hps.lookup.key_sampling import TableSample
from hps.tools.plan.model import PlannedTable

_BLOCK = 1 << 20
# Sampling estimates the number of different keys within a few per cent.
_TOLERANCE = 1.1


def known_keys(planned: PlannedTable, sample: TableSample) -> NDArray[np.bool_] | None:
    """Return a mask ``(n,)`` of the accesses whose key has a row; None: all, as far as is known.

    Reads the table's keys once. Raises BadRequest if no key has a row or, without files, if the trace has
    more different keys than the table has rows."""
    asked, inverse = np.unique(sample.keys, return_inverse=True)
    name = planned.table.name
    if planned.files is None:
        different = len(asked) / sample.rate
        if different > planned.rows * (_TOLERANCE if sample.rate < 1 else 1):
            raise BadRequest(
                f"the trace asks for {different:,.0f} different keys of table {name}, which has "
                f"{planned.rows:,} rows; correct its rows, or take the trace of this model"
            )
        return None
    found = np.zeros(len(asked), bool)
    for start in range(0, planned.files.rows, _BLOCK):
        keys = planned.table.narrow(planned.files.keys(start, start + _BLOCK))
        at = np.minimum(np.searchsorted(asked, keys), len(asked) - 1)
        found[at[asked[at] == keys]] = True
    if not found.any():
        raise BadRequest(
            f"no key of the trace has a row in table {name} of {planned.table.model}: the keys are "
            f"{asked[0]} … {asked[-1]}; is it the trace of another model, or of another feature?"
        )
    return None if found.all() else found[inverse.reshape(-1)]
