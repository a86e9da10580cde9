"""The list of all checks."""

from __future__ import annotations

from hps.tools.conformance import clients, grpc_checks, grpc_memory, http_checks, http_faults
from hps.tools.conformance.target import ConformanceCheck

CHECKS: tuple[ConformanceCheck, ...] = (
    *http_checks.SUITE.checks,
    *http_faults.SUITE.checks,
    *clients.HTTP.checks,
    *grpc_checks.SUITE.checks,
    *grpc_memory.SUITE.checks,
    *clients.GRPC.checks,
)
