"""The protocol's repository extension, for all protocols: list, load, label, switch and unload versions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hps.config.traffic_settings import parse_rule
from hps.errors import BadRequest, Unavailable, Unsupported
from hps.node.node import ModelController, Node
from services.frontend.errors import short_value
from services.frontend.state import FrontendState, ServedEndpoint

_DIGITS = re.compile("[0-9]{1,19}")


def index(state: FrontendState, *, only_ready: bool = False) -> list[dict[str, Any]]:
    """All served versions of all names, then versions of the repository that are not served, each with its
    state; served ones with ``labels`` and whether they are ``current``."""
    ready = state.ready
    if only_ready and not ready:
        return []
    served = "READY" if ready else "UNAVAILABLE"
    found = [_served_entry(state, entry, served) for entry in state.all_entries]
    control = _control_of(state)
    if control is None or only_ready:
        return found
    known = {(entry.served.name, entry.served.version) for entry in state.all_entries}
    for of in control.loading.items():
        known.add(of)
        found.append(_index_entry(of[0], str(of[1]), "LOADING"))
    for name, versions in control.available().items():
        found += [
            _index_entry(
                name, str(version), "UNAVAILABLE", control.problem(name, version) or "unloaded"
            )
            for version in versions
            if (name, version) not in known
        ]
    return found


def load(
    state: FrontendState,
    name: str,
    version: Any = None,
    *,
    labels: Any = (),
    beside: Any = False,
) -> tuple[int, str]:
    """Serve a model, by one of its names, or another version of it.

    ``labels``: those that it gets, a list or a text with commas; ``beside``: it does not replace the current
    version. Returns the loaded version, and a note for the client or "". May take long; call it on a
    thread."""
    control, model, wanted = _control(state), _model_of(name), version_number(version)
    if not isinstance(beside, bool):
        raise BadRequest("parameter 'beside' must be true or false")
    options: dict[str, Any] = {"labels": _labels(labels)} if labels else {}
    if beside:
        options["switch"] = False
    with _change(state, is_load=True):
        return control.load(model, wanted, **options), control.warnings.get(model, "")


def unload(state: FrontendState, name: str, version: Any = None) -> None:
    """Stop serving a model, or one version of it, by its number or a label."""
    control = _control(state)
    with _change(state):
        if version in (None, ""):
            control.unload(_model_of(name))
        else:
            control.unload(_model_of(name), _reference(version))


def label(state: FrontendState, name: str, label: Any, version: Any) -> None:
    """Give a served version a label; an empty ``version`` removes it."""
    control = _control(state)
    if not isinstance(label, str):
        raise BadRequest("parameter 'label' must be a text")
    with _change(state):
        control.label(_model_of(name), label, _reference(version) or None)


def switch(state: FrontendState, name: str, version: Any) -> int:
    """Make a served version the current one, by its number or a label; returns its number."""
    control, wanted = _control(state), _reference(version)
    if not wanted:
        raise BadRequest("parameter 'version' is missing; give a served version's number or label")
    with _change(state):
        return control.switch(_model_of(name), wanted)


def rollback(state: FrontendState, name: str) -> int:
    """Make the previous version the current one again; returns its number."""
    control, model = _control(state), _model_of(name)
    with _change(state, is_load=control.rollback_loads(model)):
        return control.rollback(model)


@contextmanager
def _change(state: FrontendState, *, is_load: bool = False) -> Iterator[None]:
    """Run a change of the models; afterwards serve those of the node, even if it failed.

    Each change occupies a thread that also answers health requests, so only a few may wait."""
    limit = state.model_loads if is_load else state.model_changes
    if not limit.acquire(blocking=False):
        raise Unavailable(
            "a load is running and another is queued; retry when it has ended"
            if is_load
            else "other changes of the served versions wait; retry when they have ended"
        )
    try:
        yield
    finally:
        limit.release()
        state.refresh_models()


def set_traffic(state: FrontendState, name: str, rule: Any) -> dict[str, Any]:
    """Set the traffic rule of a model, None or empty: none; returns `traffic`."""
    control = _control(state)
    parsed = parse_rule(rule)
    with _change(state):
        control.traffic.set_rule(_model_of(name), parsed)
    return traffic(state, name)


def traffic(state: FrontendState, name: str) -> dict[str, Any]:
    """The traffic rule of a model, and its versions with their shares of the requests without a version."""
    entry = state.entry(_model_of(name))
    names = state.names[entry.served.name]
    weights = names.weights()
    return {
        "name": entry.name,
        "rule": {} if names.traffic is None else names.traffic.as_json(),
        "versions": [
            {
                "version": each.version,
                "weight": weights.get(each.served.version, 0.0),
                "reason": names.rolled_back.get(each.served.version, ""),
            }
            for each in state.versions(entry.name)
        ],
    }


def _served_entry(state: FrontendState, entry: ServedEndpoint, ready: str) -> dict[str, Any]:
    names = state.names.get(entry.served.name)
    reason = "" if names is None else names.rolled_back.get(entry.served.version, "")
    weight = 0.0 if names is None else names.weights().get(entry.served.version, 0.0)
    return _index_entry(entry.name, entry.version, ready, reason) | {
        "labels": state.labels(entry),
        "current": state.entries.get(entry.name) is entry,
        "weight": weight,
    }


def _index_entry(name: str, version: str, state: str, reason: str = "") -> dict[str, Any]:
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


def _labels(labels: Any) -> list[str]:
    """The parameter ``labels``: a list of texts, or a text with commas."""
    found = labels.split(",") if isinstance(labels, str) else labels
    if not (isinstance(found, Sequence) and all(isinstance(each, str) for each in found)):
        raise BadRequest("parameter 'labels' must be a list of texts, or a text with commas")
    return [each.strip() for each in found]


def _reference(version: Any) -> str:
    """The parameter ``version``: a number or a label; empty for None."""
    if version is None:
        return ""
    if type(version) is int or isinstance(version, str):
        return str(version)
    raise BadRequest(f"parameter 'version' must be a number or a label, got {short_value(version)}")


def version_number(version: Any) -> int | None:
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
