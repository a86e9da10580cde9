"""Checks of the Open Inference Protocol with Triton's extensions, for any server that claims it.

The list is in `hps.tools.conformance.checks`. Each check runs on a `CheckedServer` and returns, raises
`Deviation` if the server deviates from the protocol, or `NotOffered` if it does not claim the extension.
Checks expect what the protocol's text states; where it states nothing, what Triton's and KServe's clients
need.

The package imports nothing of the hps server."""

from hps.tools.conformance.target import (
    CheckedServer,
    ConformanceCheck,
    Deviation,
    NotOffered,
    SampleRequest,
)

__all__ = ["CheckedServer", "ConformanceCheck", "Deviation", "NotOffered", "SampleRequest"]
