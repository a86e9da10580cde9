"""The exception tree. Core errors know nothing of HTTP or gRPC; services/frontend maps them.

HpsError
├── ConfigError, ModelError
├── NotFound, BadRequest, DeadlineExceeded, Unsupported
├── Unavailable
├── Unauthenticated, Forbidden
├── TierError
│   └── TierTimeout, TierMisfit
└── DenseModelError

Messages name the cause and the mend; they are shown to users as they are.
"""

from __future__ import annotations


class HpsError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(HpsError):
    """A setting, a file of settings or model.yaml is wrong; a process ends with exit code 2."""


class ModelError(HpsError):
    """A model repository is damaged or does not fit its description."""


class NotFound(HpsError):
    """No such model, version, table or feature."""


class BadRequest(HpsError):
    """The request is at fault: a shape, a type, an input that is missing."""


class Unavailable(HpsError):
    """No answer now: starting, draining or overloaded. Ask again."""


class DeadlineExceeded(HpsError):
    """The request's time ran out."""


class Unsupported(HpsError):
    """The operation exists in the protocol but not here."""


class Unauthenticated(HpsError):
    """No API key, or one nobody knows."""


class Forbidden(HpsError):
    """The API key's role does not allow this."""


class TierError(HpsError):
    """A tier could not do its work: it is skipped, and the answer is degraded. ``tier`` is its name."""

    def __init__(self, tier: str, message: str) -> None:
        super().__init__(f"{tier}: {message}")
        self.tier = tier


class TierTimeout(TierError):
    """A tier did not answer in time."""


class TierMisfit(TierError):
    """What the tier holds of a table is of another shape or layout than the table."""


class DenseModelError(HpsError):
    """The network failed."""
