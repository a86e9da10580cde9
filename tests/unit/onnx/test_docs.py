"""docs/onnx.md: its examples run, and it names every public member."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hps.onnx
from hps.native import COMPILED
from tests.support.page_examples import run_examples

PAGE = Path(__file__).parents[3] / "docs" / "onnx.md"


@pytest.mark.skipif(not COMPILED, reason="the operators are in the compiled core")
def test_examples_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_examples(PAGE, 3, __name__="page")


def test_the_page_names_every_member():
    assert {*hps.onnx.__all__} <= set(re.findall(r"\w+", PAGE.read_text()))
