"""The Open Inference Protocol with Triton's extensions as a list of checks, for any server that claims it.

The list is in `hps.tools.conformance.checks`. Each check runs on a `CheckedServer` and returns, raises
`Deviation` when the server deviates from the protocol, or `NotOffered` when it does not claim the
extension in question. What is expected is what the protocol's text says; where that is silent, what
Triton's and KServe's clients need.

It stands alone: it knows nothing of how our own server is made.
"""

from hps.tools.conformance.target import (
    CheckedServer,
    ConformanceCheck,
    Deviation,
    NotOffered,
    SampleRequest,
)

__all__ = ["CheckedServer", "ConformanceCheck", "Deviation", "NotOffered", "SampleRequest"]
