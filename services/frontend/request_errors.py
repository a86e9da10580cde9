"""Errors of inference requests, for all protocols. Texts that users search for follow Triton's wording."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hps.errors import BadRequest
from hps.suggestions import hint_for
from services.frontend.datatypes import INTEGERS, InputRule
from services.frontend.errors import RequestTooLarge, short_value

# Limit on the dimensions of a shape: computing their product costs the square of the number of digits.
MOST_DIMENSIONS = 32


def unknown_input(name: str, model: str, rules: Mapping[str, InputRule]) -> BadRequest:
    return BadRequest(
        f"unexpected inference input {short_value(name)} for model '{model}'{hint_for(name, rules)}"
    )


def twice(name: str) -> BadRequest:
    return BadRequest(f"input '{name}' stands twice in the request")


def wrong_type(name: str, datatype: Any, model: str, rule: InputRule) -> BadRequest:
    expected = "' or '".join(rule.dtypes)
    if rule.dtypes is INTEGERS:
        expected = "INT64' (or another integer type, which is widened)"
    else:
        expected += "'"
    return BadRequest(
        f"inference input '{name}' data-type is {short_value(datatype)}, but model '{model}' expects "
        f"'{expected}"
    )


def wrong_shape(name: str, shape: Any, model: str) -> BadRequest:
    return BadRequest(
        f"input '{name}' of model '{model}' needs a 'shape' of non-negative integers, at most "
        f"{MOST_DIMENSIONS}, got {short_value(shape)}"
    )


def too_many_keys(keys: int, max_keys: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"the request has {keys} keys, at most {max_keys} are accepted; send smaller batches or raise "
        "server.max_keys"
    )


def shared_memory(name: str) -> BadRequest:
    return BadRequest(
        f"'{name}': shared memory is not offered; send the data itself, or set server.shared_memory on a "
        "server whose clients run on its machine"
    )


def output_twice(name: str) -> BadRequest:
    return BadRequest(f"output '{name}' is requested twice")


def classification(name: str) -> BadRequest:
    return BadRequest(f"output '{name}': the classification extension is not offered")


def checked_timeout(value: Any) -> int:
    """Check the request parameter ``timeout``: whole microseconds. Raises ``BadRequest``."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise BadRequest(
            f"parameter 'timeout' must be whole microseconds, got {short_value(value)}"
        )
    return value


def checked_top_k(value: Any) -> int:
    """Check the request parameter ``top_k``: a positive integer. Raises ``BadRequest``."""
    if type(value) is not int or value < 1:
        raise BadRequest(f"parameter 'top_k' must be a positive integer, got {short_value(value)}")
    return value
