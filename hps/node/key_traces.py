"""Key traces of a served model, recorded while it serves (``POST /v1/traces``)."""

from __future__ import annotations

from hps.errors import BadRequest, NotFound, Unsupported
from hps.lookup.engine import LookupEngine
from hps.lookup.key_recorder import MOST_SECONDS, KeyRecorder
from hps.lookup.key_sampling import MAX_KEYS
from hps.node.served_versions import ServedModel

FEWEST_KEYS = 1024


def record_keys(served: ServedModel, seconds: float, max_keys: int = MAX_KEYS) -> None:
    """Record the keys of the model's lookups for ``seconds``, in place of an earlier recording.

    Lookups that are answered on a GPU are not recorded. Raises BadRequest, Unsupported."""
    if not 0 < seconds <= MOST_SECONDS:
        raise BadRequest(f"'seconds' must be above 0 and at most {MOST_SECONDS:g}")
    if not FEWEST_KEYS <= max_keys <= MAX_KEYS:
        raise BadRequest(f"'keys' must be from {FEWEST_KEYS:,} to {MAX_KEYS:,}")
    engine = _engine(served)
    if engine.recorder is not None:
        engine.recorder.stop()
    engine.recorder = KeyRecorder(engine.features, engine.tables, seconds, max_keys)


def recorded_keys(served: ServedModel) -> bytes:
    """Return what is recorded so far of this version of the model, as an ``.npz`` for `hps plan`.

    Raises NotFound if `record_keys` was not called."""
    recorder = _engine(served).recorder
    if recorder is None:
        raise NotFound(
            f"no keys of model '{served.name}' version {served.version} were recorded; start a recording by "
            f"POST /v1/traces/{served.name}"
        )
    return recorder.packed()


def end_recording(served: ServedModel) -> None:
    """Stop the recording, if there is one, and free its memory."""
    engine = _engine(served)
    if engine.recorder is not None:
        engine.recorder.stop()
        engine.recorder = None


def _engine(served: ServedModel) -> LookupEngine:
    if not isinstance(served.engine, LookupEngine):
        raise Unsupported("this process sends its lookups to lookup nodes; record their keys there")
    return served.engine
