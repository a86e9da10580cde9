"""The exception tree. The library knows nothing of HTTP or gRPC; services/frontend maps errors to statuses.

HpsError
├── ConfigError, ModelError
│   └── GpuUnavailable (a ConfigError)
├── NotFound, BadRequest, DeadlineExceeded
├── Unsupported
│   └── PackageMissing (an ImportError)
├── Unavailable
├── Unauthenticated, Forbidden
├── TierError
│   └── TierTimeout, TierMisfit
└── DenseModelError

A message names the cause and the remedy; users see it unchanged."""

from __future__ import annotations


class HpsError(Exception):
    """Base class of the errors that this library raises on purpose."""


class ConfigError(HpsError):
    """Invalid setting, settings file or model.yaml; the process exits with code 2."""


class GpuUnavailable(ConfigError):
    """A GPU cannot be used as configured, for example because its memory is full; an optional one is not
    used then."""


class ModelError(HpsError):
    """Damaged model repository, or one that does not match its description."""


class NotFound(HpsError):
    """Unknown model, version, table or feature."""


class BadRequest(HpsError):
    """Invalid request: a wrong shape or type, a missing input."""


class Unavailable(HpsError):
    """No answer now: the server is starting, draining or overloaded. The client may retry."""


class DeadlineExceeded(HpsError):
    """The request's deadline passed."""


class Unsupported(HpsError):
    """Operation of the protocol that this server does not implement."""


class PackageMissing(Unsupported, ImportError):
    """An optional package is not installed, or its version is too old; also an ``ImportError``."""


class Unauthenticated(HpsError):
    """Missing or unknown API key."""


class Forbidden(HpsError):
    """Operation that the API key's role does not allow."""


class TierError(HpsError):
    """Failure of a tier: it is skipped, and the answer is degraded. ``tier`` is its name."""

    def __init__(self, tier: str, message: str) -> None:
        super().__init__(f"{tier}: {message}")
        self.tier = tier


class TierTimeout(TierError):
    """A tier did not answer before its timeout."""


class TierMisfit(TierError):
    """A tier's data of a table has another shape or layout than the table."""


class DenseModelError(HpsError):
    """Failure of the network."""
