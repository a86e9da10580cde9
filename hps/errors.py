"""The exception tree. Core errors know nothing of HTTP or gRPC; services/frontend maps them.

HpsError
├── ConfigError             a setting, file or model.yaml is wrong (process exits with code 2)
├── ModelError              a model repository is damaged or does not fit its description
├── NotFound                unknown model, version, table, feature
├── BadRequest              the request is at fault: shape, dtype, missing input
├── Unavailable             cannot answer now: starting, draining, overloaded
├── DeadlineExceeded        the request's time ran out
├── Unsupported             the operation exists in the protocol but not here
├── Unauthenticated         no API key, or one nobody knows
├── Forbidden               the API key's role does not allow this
├── TierError               a tier failed; the chain skips it, counts it and answers degraded
│   ├── TierTimeout
│   └── TierMisfit          what it holds of a table is not of the table's shape or layout
└── DenseModelError         the dense model failed

Messages name the cause and the mend; they are shown to users as they are.
"""

from __future__ import annotations


class HpsError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(HpsError):
    pass


class ModelError(HpsError):
    pass


class NotFound(HpsError):
    pass


class BadRequest(HpsError):
    pass


class Unavailable(HpsError):
    pass


class DeadlineExceeded(HpsError):
    pass


class Unsupported(HpsError):
    pass


class Unauthenticated(HpsError):
    pass


class Forbidden(HpsError):
    pass


class TierError(HpsError):
    """A tier could not do its work. ``tier`` is the tier's name."""

    def __init__(self, tier: str, message: str) -> None:
        super().__init__(f"{tier}: {message}")
        self.tier = tier


class TierTimeout(TierError):
    pass


class TierMisfit(TierError):
    """What the tier holds of a table is of another shape or layout than the table."""


class DenseModelError(HpsError):
    pass
