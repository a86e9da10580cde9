"""``import hps``: cheap, and it shows what it has."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys

import pytest

import hps

CHEAP = (
    "import sys, hps; dir(hps); print(sorted(set(sys.modules) & {'numpy', 'onnxruntime', 'yaml'}))"
)


def test_public_names_are_listed_without_being_imported() -> None:
    assert dir(hps) == sorted(hps.__all__)
    assert {"open", "Node", "JaggedKeys", "PredictRequest", "HpsError"} <= set(dir(hps))
    done = subprocess.run([sys.executable, "-c", CHEAP], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_public_name_explains_itself() -> None:
    shown = pydoc.plain(pydoc.render_doc(hps))
    for name in hps.__all__:
        value = getattr(hps, name)
        if name != "__version__":
            assert inspect.getdoc(value), name
            assert name in shown
    assert "Open a node from a YAML file" in shown


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'opn'"):
        hps.opn  # noqa: B018
