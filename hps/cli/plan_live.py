"""Record a key trace of a running node, and read such recordings."""

from __future__ import annotations

import time
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from hps.errors import BadRequest
from hps.lookup.key_sampling import unpack_samples
from hps.tools.plan.model import PlannedModel
from hps.tools.plan.trace import Trace, checked

if TYPE_CHECKING:
    from hps.client import Admin
    from hps.types import Progress

_STEP_S = 0.25


def record(admin: Admin, model: str, seconds: float, keys: int, progress: Progress) -> bytes:
    """Record the keys of the model's lookups for ``seconds``; return the file, an ``.npz``."""
    admin.record_keys(model, seconds, keys)
    end = time.monotonic() + seconds
    with progress.task(f"recording {model}", round(seconds / _STEP_S), "steps") as step:
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _STEP_S))
            step(1)
    packed = admin.recorded_keys(model)
    admin.end_recording(model)
    return packed


def trace_of_recording(packed: bytes, model: PlannedModel) -> Trace:
    """Read a recording. Raises BadRequest if it is short, or of another model."""
    with np.load(BytesIO(packed)) as arrays:
        return read_recording(arrays, model, "the recording")


def read_recording(arrays: Any, model: PlannedModel, where: str) -> Trace:
    """Read the opened archive of a recording; ``where`` names it in errors."""
    try:
        samples, requests, batch = unpack_samples(arrays)
    except (KeyError, ValueError) as error:
        raise BadRequest(f"{where}: not a recording of hps plan: {error}") from None
    if unknown := [name for name in samples if name not in model.tables]:
        raise BadRequest(
            f"{where}: model {model.name} has no table {unknown[0]!r}; it has {', '.join(model.tables)}"
        )
    return checked(Trace(samples, requests, batch))
