"""The protocol's checks, run on our server and on a real Triton with our backend."""

from __future__ import annotations

import re

import pytest

from hps.tools.conformance import Deviation, NotOffered
from hps.tools.conformance.checks import CHECKS
from hps.tools.conformance.known_deviations import TRITON

# Features that a server does not offer, and why.
TRITON_LACKS = {
    "http: raw bodies": "a lookup has HPS's KEYS and NUMKEYS beside its features there",
    "grpc: health watch": "its health.proto has no Watch, which balancers ask for",
    "grpc: reflection": "it has none; grpcurl needs it",
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_hps_conforms(target_of, check):
    judge(target_of("ours"), check, {}, {})


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_triton_has_only_known_deviations(target_of, check):
    judge(target_of("triton"), check, TRITON.get(check.name, {}), TRITON_LACKS)


def judge(target, check, differs, lacks):
    """Check that the deviations are exactly the known ones."""
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


def test_known_deviations_name_existing_checks():
    names = {check.name for check in CHECKS}
    assert len(names) == len(CHECKS)
    assert names >= TRITON.keys() | TRITON_LACKS.keys()
