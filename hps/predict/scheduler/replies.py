"""Encoding of requests and answers that have no columns, between processes of one installation.

Both ends run the same version as the same user, so pickle is safe and takes every array."""

from __future__ import annotations

import pickle
from dataclasses import replace

from hps import errors
from hps.errors import HpsError, TierError
from hps.types import PredictRequest, PredictResult

_Error = tuple[str, str, str]


def encode_request(request: PredictRequest) -> bytes:
    """Encode a request without its context, which stays with the client."""
    return pickle.dumps(replace(request, origin=None, deadline=None, top_k=None), 5)


def decode_request(data: bytes) -> PredictRequest:
    request: PredictRequest = pickle.loads(data)
    return request


def encode_reply(reply: PredictResult | BaseException) -> bytes:
    """Encode a result or the error in its place."""
    if isinstance(reply, PredictResult):
        return pickle.dumps(reply, 5)
    kind = type(reply).__name__ if isinstance(reply, HpsError) else HpsError.__name__
    encoded: _Error = kind, str(reply), getattr(reply, "tier", "")
    return pickle.dumps(encoded, 5)


def decode_reply(data: bytes) -> PredictResult:
    """Return the result, or raise the error that was sent in its place."""
    reply: PredictResult | _Error = pickle.loads(data)
    if isinstance(reply, PredictResult):
        return reply
    kind, message, tier = reply
    error = getattr(errors, kind, HpsError)
    if issubclass(error, TierError):
        raise error(tier, message.removeprefix(f"{tier}: "))
    raise error(message)
