"""schemathesis walks the OpenAPI documents of both ports: no 5xx, no hang, one shape of error."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

BOUNDED = settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


@pytest.mark.parametrize("port", ["address", "admin"])
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_every_operation_matches_its_document(small_server, judge, port, mode):
    """``mode``: requests that fit the document, or ones that break it in some place."""
    base = f"http://{getattr(small_server, port)}"
    document = schemathesis.openapi.from_url(f"{base}/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) > 10
    for operation in operations:

        @BOUNDED
        @given(case=operation.as_strategy(mode))
        def ask_and_judge(case):
            answer = case.call(base_url=base, timeout=60)
            headers = {name.lower(): value[0] for name, value in answer.headers.items()}
            judge(Answer(answer.status_code, headers, answer.content))

        # An operation without parameters has nothing that could be wrong.
        with contextlib.suppress(Unsatisfiable):
            ask_and_judge()
