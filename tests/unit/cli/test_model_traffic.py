"""Parsing of the options of `hps model traffic`."""

from __future__ import annotations

from typing import Any

import pytest

from hps.cli.model_traffic import TrafficOptions, traffic
from hps.cli.options import AdminServer, Credentials
from hps.errors import BadRequest


def options(**chosen: Any) -> TrafficOptions:
    return TrafficOptions(name="ctr", admin=AdminServer(credentials=Credentials()), **chosen)


def test_weights_are_percentages() -> None:
    found = options(weight=["canary=10", "4=2.5%"]).changes()
    assert found == {"weights": {"canary": 10.0, "4": 2.5}}


@pytest.mark.parametrize("weight", ["canary=nan", "canary=inf", "canary=x", "10"])
def test_weight_that_is_no_percentage_is_an_error(weight: str) -> None:
    with pytest.raises(BadRequest, match=f"--weight {weight}: expected VERSION=PERCENT"):
        traffic(options(weight=[weight]))


def test_bounds_must_be_finite() -> None:
    assert options(max_psi=0.2).rollback_changes() == {"max_psi": 0.2}
    with pytest.raises(BadRequest, match="--max-p99-ratio nan: expected a finite number"):
        options(max_p99_ratio=float("nan")).rollback_changes()
    with pytest.raises(BadRequest, match="--shadow-rate inf: expected a finite number"):
        options(shadow="4", shadow_rate=float("inf")).shadow_changes()
