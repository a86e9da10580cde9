"""What an instance of Triton's python backend refuses at the start."""

from __future__ import annotations

import pytest

from hps.errors import ConfigError
from services.triton.backend import Backend


@pytest.mark.parametrize(
    ("kind", "parameters", "error"),
    [
        ("CPU", {}, "m.lookup has no parameter config"),
        ("GPU", {"config": "c"}, r"m.lookup is an instance on a GPU.*kind: KIND_CPU"),
        ("CPU", {"config": "c", "refresh_interval": "10"}, "refresh_interval of m.lookup: updates"),
        ("CPU", {"config": "c", "freeze_sparse": "true"}, "freeze_sparse of m.lookup: whether"),
        ("CPU", {"config": "/none", "freeze_sparse": "False", "refresh_delay": "0"}, "/none"),
    ],
)
def test_parameters_that_cannot_act(kind, parameters, error):
    with pytest.raises(ConfigError, match=error):
        Backend("m.lookup", kind, parameters)


def test_a_configuration_without_a_socket(tmp_path):
    path = tmp_path / "hps.yaml"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"server.runtime is not set"):
        Backend("m.lookup", "CPU", {"config": str(path)})
