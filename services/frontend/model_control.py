"""The protocol's repository extension, for all protocols: list, load and unload models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hps.errors import BadRequest, Unavailable, Unsupported
from hps.node.node import ModelController, Node
from services.frontend.errors import short_value
from services.frontend.state import FrontendState

_DIGITS = re.compile("[0-9]{1,19}")


def index(state: FrontendState, *, only_ready: bool = False) -> list[dict[str, str]]:
    """All served names, then models of the repository that are not served, each with its state."""
    ready = state.ready
    if only_ready and not ready:
        return []
    served = "READY" if ready else "UNAVAILABLE"
    found = [_index_entry(entry.name, entry.version, served) for entry in state.entries.values()]
    control = _control_of(state)
    if control is None or only_ready:
        return found
    names = {entry.served.name for entry in state.entries.values()}
    for name, version in control.loading.items():
        found.append(_index_entry(name, str(version), "LOADING"))
    for name, versions in control.available().items():
        if name not in names and name not in control.loading and versions:
            found.append(_index_entry(name, str(versions[-1]), "UNAVAILABLE", "unloaded"))
    return found


def load(state: FrontendState, name: str, version: Any = None) -> tuple[int, str]:
    """Serve a model, by one of its names, or another version of it.

    Returns the served version, and a note for the client or "". May take long; call it on a thread."""
    control, model, wanted = _control(state), _model_of(name), _number(version)
    with _change(state):
        return control.load(model, wanted), control.warnings.get(model, "")


def unload(state: FrontendState, name: str) -> None:
    """Stop serving a model."""
    control = _control(state)
    with _change(state):
        control.unload(_model_of(name))


@contextmanager
def _change(state: FrontendState) -> Iterator[None]:
    """Run a change of the models; afterwards serve those of the node, even if it failed.

    Each change occupies a thread that also answers health requests, so only a few may wait."""
    if not state.model_changes.acquire(blocking=False):
        raise Unavailable("a load is running and another is queued; retry when it has ended")
    try:
        yield
    finally:
        state.model_changes.release()
        state.refresh_models()


def _index_entry(name: str, version: str, state: str, reason: str = "") -> dict[str, str]:
    return {"name": name, "version": version, "state": state, "reason": reason}


def _model_of(name: str) -> str:
    """The model that a served name belongs to: names of models have no dot."""
    return name.removesuffix(".lookup")


def _control(state: FrontendState) -> ModelController:
    state.require_node()
    control = _control_of(state)
    if control is None:
        raise Unsupported("this process gets its models from a node; use that node's admin port")
    return control


def _control_of(state: FrontendState) -> ModelController | None:
    return state.node.control if isinstance(state.node, Node) else None


def _number(version: Any) -> int | None:
    """The parameter ``version``: a whole number, or one as text, or None."""
    if version is None or version == "":
        return None
    if isinstance(version, str) and _DIGITS.fullmatch(version):
        version = int(version)
    if type(version) is not int or not 0 < version < 2**63:
        raise BadRequest(
            f"parameter 'version' must be a whole number from 1, got {short_value(version)}"
        )
    return version
