"""docs/keras.md: its examples run, and it names every public member."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.keras3 import hps_keras
from tests.support.page_examples import run_examples

PAGE = Path(__file__).parents[3] / "docs" / "keras.md"


@pytest.mark.filterwarnings("ignore")  # Keras's and TensorFlow's own
def test_examples_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_examples(PAGE, 5, __name__="page")


def test_the_page_names_every_member():
    assert {*hps_keras.__all__} <= set(re.findall(r"\w+", PAGE.read_text()))
