import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import common
from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.measure import Spread, alternate, ratio, zipf_keys

LOW = Bar("low", "cheap enough", at_most=2.0)
HIGH = Bar("high", "fast enough", at_least=1.0)


def benchmark(tmp_path, monkeypatch, values, **changes):
    """A benchmark in a temporary repository, whose measured source is ``code.py``."""
    monkeypatch.setattr(common, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir(exist_ok=True)
    for name in ("toy", "common", "measure", "load"):
        (tmp_path / f"benchmarks/{name}.py").write_text(name)
    (tmp_path / "code.py").write_text("1")

    def run(options: Options) -> Report:
        return Report(values=dict(values), tables={"t": [{"a": 1, "b": 2.0}]})

    toy = Benchmark("toy", "Toy", run, (LOW, HIGH), ("code.py",))
    return replace(toy, **changes)


def verdicts(path):
    return {bar["name"]: bar["verdict"] for bar in json.loads(path.read_text())["bars"]}


@pytest.mark.parametrize(
    ("bar", "value", "verdict"),
    [
        (LOW, 2.0, "met"),
        (LOW, 2.01, "MISSED"),
        (LOW, float("nan"), "MISSED"),
        (LOW, None, "unmeasured"),
        (HIGH, 1.0, "met"),
        (HIGH, 0.99, "MISSED"),
        (HIGH, float("nan"), "MISSED"),
    ],
)
def test_verdict_compares_the_value_with_the_limit(bar, value, verdict):
    assert bar.verdict(value) == verdict


@pytest.mark.parametrize("limits", [{}, {"at_most": 1.0, "at_least": 1.0}])
def test_bar_rejects_no_limit_and_two_limits(limits):
    with pytest.raises(ValueError, match="either at_most or at_least"):
        Bar("x", "x", **limits)


def test_check_passes_only_when_every_bar_is_met(tmp_path, monkeypatch, capsys):
    met = benchmark(tmp_path, monkeypatch, {"low": 1.5, "high": 3.0})
    assert main(met, ["--check"]) == 0
    missed = benchmark(tmp_path, monkeypatch, {"low": 2.5, "high": 3.0})
    assert main(missed, []) == 0
    assert main(missed, ["--check"]) == 1
    assert "not met: low" in capsys.readouterr().err
    unmeasured = benchmark(tmp_path, monkeypatch, {"low": 1.5})
    assert main(unmeasured, ["--check"]) == 1
    assert "not met: high" in capsys.readouterr().err


def test_run_fails_for_a_value_without_a_bar(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="lwo"):
        main(benchmark(tmp_path, monkeypatch, {"lwo": 1.0}), [])


def test_recording_is_stale_after_a_source_changed(tmp_path, monkeypatch):
    toy = benchmark(tmp_path, monkeypatch, {"low": 1.5, "high": 3.0})
    record = tmp_path / "out/toy.json"
    assert main(toy, ["--json", str(record)]) == 0
    stored = json.loads(record.read_text())
    assert stored["digest"] == toy.digest()
    assert stored["machine"]["cores"] >= 1
    assert main(toy, ["--results", str(record), "--check"]) == 0
    (tmp_path / "code.py").write_text("2")
    again = tmp_path / "again.json"
    assert main(toy, ["--results", str(record), "--check", "--json", str(again)]) == 1
    assert verdicts(again) == {"low": "MISSED", "high": "MISSED"}


def test_recording_is_judged_by_the_present_bars(tmp_path, monkeypatch):
    toy = benchmark(tmp_path, monkeypatch, {"low": 1.5, "high": 3.0})
    record = tmp_path / "toy.json"
    main(toy, ["--json", str(record)])
    strict = replace(toy, bars=(replace(LOW, at_most=1.0), HIGH))
    assert main(strict, ["--results", str(record), "--check"]) == 1


@pytest.mark.parametrize("text", [None, "", "{}", '{"bars": 3}'])
def test_unreadable_recording_leaves_every_bar_unmeasured(tmp_path, monkeypatch, text):
    toy = benchmark(tmp_path, monkeypatch, {})
    record, out = tmp_path / "toy.json", tmp_path / "out.json"
    if text is not None:
        record.write_text(text)
    assert main(toy, ["--results", str(record), "--check", "--json", str(out)]) == 1
    assert verdicts(out) == {"low": "unmeasured", "high": "unmeasured"}


def test_check_fails_when_a_source_changes_during_the_run(tmp_path, monkeypatch):
    def run(options: Options) -> Report:
        (tmp_path / "code.py").write_text("changed")
        return Report(values={"low": 1.0, "high": 2.0})

    toy = benchmark(tmp_path, monkeypatch, {}, run=run)
    assert main(toy, ["--check"]) == 1


def test_recording_is_judged_when_a_requirement_is_missing(tmp_path, monkeypatch, capsys):
    toy = benchmark(tmp_path, monkeypatch, {"low": 1.5, "high": 3.0})
    main(toy, ["--json", str(toy.recording)])
    assert main(replace(toy, missing_requirement=lambda: "needs a GPU"), ["--check"]) == 0
    assert "needs a GPU" in capsys.readouterr().err


def test_alternate_rotates_the_order_of_the_sides():
    order: list[str] = []
    results = alternate({name: lambda name=name: order.append(name) or name for name in "abc"}, 3)
    assert order == list("abcbcacab")
    assert results == {"a": ["a"] * 3, "b": ["b"] * 3, "c": ["c"] * 3}


def test_ratio_is_taken_round_by_round():
    # The second round was disturbed for both sides, which the ratio cancels out.
    assert ratio([10.0, 40.0, 12.0], [5.0, 20.0, 6.0]) == Spread(2.0, 2.0, 2.0)
    assert f"{Spread.of([1.0, 5.0, 3.0]):.0f}" == "3 (1…5)"


def test_zipf_keys_have_the_expected_frequencies():
    keys = zipf_keys(np.random.default_rng(3), 1000, (200, 1000))
    assert keys.min() >= 0
    assert keys.max() < 1000
    share = np.sort(np.bincount(keys.reshape(-1), minlength=1000))[::-1] / keys.size
    wanted = np.arange(1, 1001) ** -0.85
    wanted /= wanted.sum()
    np.testing.assert_allclose(share[:10], wanted[:10], rtol=0.1)
    np.testing.assert_allclose(share[:100].sum(), wanted[:100].sum(), rtol=0.02)
