"""The only reader of environment variables."""

from __future__ import annotations

import os
from typing import Literal, cast

from hps.errors import ConfigError


def native_mode() -> Literal["auto", "on", "off"]:
    """``HPS_NATIVE``: whether the compiled core must be (``on``) or must not be (``off``) used."""
    value = os.environ.get("HPS_NATIVE", "auto")
    if value in ("auto", "on", "off"):
        return cast(Literal["auto", "on", "off"], value)
    raise ConfigError(f"HPS_NATIVE is {value!r}; it must be auto, on or off")
