"""Known deviations of servers, by the server's name and the check.

Each has a regular expression of the check's text, and the reason why the check still expects otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

Known = Mapping[str, Mapping[str, str]]

# Seen with Triton 2.51.
_UNTYPED = {
    "an error of the type 'text/plain'": "its body is JSON, which only its type denies; clients that go by "
    "the type cannot read it"
}
_AT_FAULT = {
    "500 instead of 400: .*(Unable|failed) to parse": "the client is at fault: 500 makes it ask again, and "
    "wakes who watches the server"
}
_NO_NAME = {
    "requested model .* is not available": "an unknown ensemble gets another text than an unknown "
    "model that is"
}
TRITON: Known = {
    "http: outputs asked for": {
        r"outputs \[.*\] for \[": "an ensemble answers in another order; models that are none, in the "
        "request's",
        "are JSON, asked for": "it forgets binary_data_output where outputs are named; the extension's text "
        "says that binary_data goes before it for one output, not that it ends it",
    },
    "http: load and unload": _UNTYPED,
    "http: unknown names": _UNTYPED | _NO_NAME,
    "http: missing inputs": _AT_FAULT,
    "http: wrong shapes": _AT_FAULT,
    "http: lengths that lie": _UNTYPED | _AT_FAULT,
    "http: no json": _AT_FAULT,
    "http: wrong codings": _UNTYPED,
    "http: wrong verbs and paths": _UNTYPED,
    "grpc: health service": {
        "an answer instead of NOT_FOUND": "it says SERVING of any service; grpc.health.v1 says NOT_FOUND"
    },
    "grpc: unknown names": _NO_NAME,
    "grpc: wrong tensors": {
        "more raw contents than inputs: an answer": "what is left over belongs to some input: it is lost in "
        "silence",
    },
}
_OF: Mapping[str, Known] = {"triton": TRITON}


def known_of(server: str) -> Known:
    """``server``: the name in its metadata."""
    return _OF.get(server.lower(), {})


def reasons(known: Known, check: str, found: Sequence[str]) -> list[str]:
    """For each text of ``found``, the reason if it is known of the server, else ""."""
    patterns = known.get(check, {})
    return [next((why for p, why in patterns.items() if re.search(p, text)), "") for text in found]
