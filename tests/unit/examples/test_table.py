"""The example of the table library: it learns, in tables that are too small for all keys."""

from examples.table.factorize import main


def test_the_error_falls(capsys):
    errors = main(capacity=1 << 12, batches=100)
    assert len(errors) == 2
    assert errors[1] < 0.9 * errors[0]
    shown = capsys.readouterr().out
    assert "epoch 1: error" in shown
    assert "items saved and loaded" in shown
