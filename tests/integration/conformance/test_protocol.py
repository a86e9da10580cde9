"""The protocol's checks, run on our server and on a real Triton with our backend."""

from __future__ import annotations

import re

import pytest

from hps.conformance import Deviation, NotOffered
from hps.conformance.checks import CHECKS

# Where Triton 2.51 does something else than the checks ask for: by check, what it does, and why we do not do
# the same.
UNTYPED = {
    "an error of the type 'text/plain'": "its body is JSON, which only its type denies; clients that go by "
    "the type could not read it"
}
AT_FAULT = {
    "500 instead of 400: .*(Unable|failed) to parse": "the client is at fault: 500 makes it ask again, and "
    "wakes who watches the server"
}
NO_NAME = {
    "requested model .* is not available": "an ensemble that is unknown is told of otherwise "
    "than another model that is; we have one answer for both"
}
TRITON_DIFFERS = {
    "http: outputs asked for": {
        r"outputs \['logit', 'score'\] for": "an ensemble answers in an order of its own; ours is the "
        "request's, as Triton's is for models that are no ensemble",
        "are JSON, asked for": "it forgets binary_data_output where outputs are named; the extension's text "
        "says that binary_data goes before it for one output, not that it ends it",
    },
    "http: load and unload": UNTYPED,
    "http: unknown names": UNTYPED | NO_NAME,
    "http: missing inputs": AT_FAULT,
    "http: wrong shapes": AT_FAULT,
    "http: lengths that lie": UNTYPED | AT_FAULT,
    "http: no json": AT_FAULT,
    "http: wrong codings": UNTYPED,
    "http: wrong verbs and paths": UNTYPED,
    "grpc: health service": {
        "an answer instead of NOT_FOUND": "it says SERVING of any service; grpc.health.v1 says NOT_FOUND"
    },
    "grpc: health watch": {
        "UNIMPLEMENTED": "its health.proto has no Watch, which balancers ask for"
    },
    "grpc: reflection": {"UNIMPLEMENTED": "it has none; grpcurl needs it"},
    "grpc: unknown names": NO_NAME,
    "grpc: wrong tensors": {
        "more raw contents than inputs: an answer": "what is left over belongs to some input: it would be "
        "lost in silence",
    },
}
# What a server does not offer, and why.
TRITON_LACKS = {"http: raw bodies": "a lookup has HPS's KEYS and NUMKEYS beside its features there"}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_ours(target_of, check):
    judge(target_of("ours"), check, {}, {})


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_triton(target_of, check):
    judge(target_of("triton"), check, TRITON_DIFFERS.get(check.name, {}), TRITON_LACKS)


def judge(target, check, differs, lacks):
    """Every deviation is one that is known, and every known one is still there."""
    try:
        check.run(target)
    except Deviation as deviation:
        found = deviation.found
    except NotOffered:
        assert check.name in lacks
        return
    else:
        found = ()
    assert check.name not in lacks
    unknown = [text for text in found if not any(re.search(known, text) for known in differs)]
    assert not unknown
    gone = [known for known in differs if not any(re.search(known, text) for text in found)]
    assert not gone


def test_tables_name_checks():
    names = {check.name for check in CHECKS}
    assert len(names) == len(CHECKS)
    assert names >= TRITON_DIFFERS.keys() | TRITON_LACKS.keys()
