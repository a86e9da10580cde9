"""Known deviations of servers, by the server's name and the check.

Each has a regular expression of the check's text, and the reason why the check still expects otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

Known = Mapping[str, Mapping[str, str]]

# Seen with Triton 2.51.
_UNTYPED = {
    "an error of the type 'text/plain'": "its body is JSON, but its type is not; clients that rely on "
    "the type cannot read it"
}
_AT_FAULT = {
    "500 instead of 400: .*(Unable|failed) to parse": "the client is at fault: 500 makes it retry, and "
    "raises alerts of the server"
}
_NO_NAME = {
    "requested model .* is not available": "an unknown ensemble gets another text than an unknown "
    "model"
}
TRITON: Known = {
    "http: requested outputs": {
        r"outputs \[.*\] for \[": "an ensemble answers in another order; other models, in that of the "
        "request",
        "are JSON, asked for": "it ignores binary_data_output where outputs are named; by the extension's "
        "text binary_data overrides it for one output, and does not disable it",
    },
    "http: load and unload": _UNTYPED,
    "http: unknown names": _UNTYPED | _NO_NAME,
    "http: missing inputs": _AT_FAULT,
    "http: wrong shapes": _AT_FAULT,
    "http: wrong lengths": _UNTYPED | _AT_FAULT,
    "http: invalid json": _AT_FAULT,
    "http: wrong codings": _UNTYPED,
    "http: wrong methods and paths": _UNTYPED,
    "grpc: health service": {
        "an answer instead of NOT_FOUND": "it returns SERVING for any service; grpc.health.v1 "
        "requires NOT_FOUND"
    },
    "grpc: unknown names": _NO_NAME,
    "grpc: wrong tensors": {
        "more raw contents than inputs: an answer": "the surplus belongs to some input: it is dropped "
        "without an error",
    },
}
_OF: Mapping[str, Known] = {"triton": TRITON}


def known_of(server: str) -> Known:
    """The known deviations of a server; ``server``: the name in its metadata."""
    return _OF.get(server.lower(), {})


def reasons(known: Known, check: str, found: Sequence[str]) -> list[str]:
    """For each text of ``found``, the reason if it is known of the server, else ""."""
    patterns = known.get(check, {})
    return [next((why for p, why in patterns.items() if re.search(p, text)), "") for text in found]
