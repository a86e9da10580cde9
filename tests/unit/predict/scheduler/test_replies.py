"""Requests and answers between processes that have no columns."""

import numpy as np
import pytest

from hps import errors
from hps.errors import BadRequest, DeadlineExceeded, HpsError, TierError, Unavailable
from hps.predict.scheduler.replies import (
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from hps.types import JaggedKeys, PredictRequest, PredictResult


def test_request_keeps_its_keys_and_leaves_its_context_behind():
    keys = JaggedKeys(np.arange(4), 2, offsets=np.array([0, 1, 4]))
    request = PredictRequest(
        {"f": keys}, {"d": np.ones((2, 1), np.float32)}, 5, 12.0, True, ("score",), object()
    )
    decoded = decode_request(encode_request(request))
    assert decoded.features["f"].keys.tolist() == [0, 1, 2, 3]
    assert decoded.features["f"].offsets.tolist() == [0, 1, 4]
    assert decoded.dense["d"].tolist() == [[1], [1]]
    assert (decoded.want_source, decoded.outputs) == (True, ("score",))
    assert (decoded.origin, decoded.deadline, decoded.top_k) == (None, None, None)
    assert request.top_k == 5


def test_result_is_decoded_with_all_its_reports():
    result = PredictResult({"score": np.ones(2)}, {"f": np.zeros(2, np.uint8)}, 3, ("redis",), 1.5)
    decoded = decode_reply(encode_reply(result))
    assert decoded.outputs["score"].tolist() == [1, 1]
    assert decoded.sources["f"].tolist() == [0, 0]
    assert (decoded.defaulted, decoded.degraded, decoded.stale_s) == (3, ("redis",), 1.5)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("wrong"), BadRequest),
        (Unavailable("busy"), Unavailable),
        (DeadlineExceeded("late"), DeadlineExceeded),
        (TierError("redis", "refused"), TierError),
        (KeyError("x"), HpsError),
    ],
)
def test_error_is_raised_as_the_kind_that_it_was(error, kind):
    with pytest.raises(kind) as raised:
        decode_reply(encode_reply(error))
    assert type(raised.value) is kind
    assert str(raised.value) == str(error)
    if isinstance(error, TierError):
        assert raised.value.tier == "redis"


def test_unknown_kind_of_error_is_a_general_one(monkeypatch):
    encoded = encode_reply(BadRequest("wrong"))
    monkeypatch.delattr(errors, "BadRequest")
    with pytest.raises(HpsError, match="wrong"):
        decode_reply(encoded)
