"""The example's parts on a small made-up file, the traps of the real one included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from examples.ctr import train as command
from examples.ctr.data import FEATURES, INPUTS, Samples, parse_key, read_csv, split
from examples.ctr.export import (
    defaults,
    made_up_samples,
    network,
    publish,
    specification,
    tables,
    write_requests,
)
from examples.ctr.training import DEFAULTS, Trained, auc, train
from hps.cli.demo_data import load_demo
from hps.dense.onnx import OnnxModel
from hps.models.repository import Repository

COLUMNS = [*FEATURES.values(), *INPUTS, "click"]


def write_csv(path: Path, rows: int = 400) -> Path:
    """Skewed keys; ads 0 … 4 are clicked, the others are not."""
    rng = np.random.default_rng(5)
    lines = [",".join(f'"{column}"' for column in COLUMNS)]
    for _ in range(rows):
        keys = (rng.pareto(1.0, len(FEATURES)) * 3).astype(int).tolist()
        click = int(keys[list(FEATURES).index("ad")] < 5)
        keys[list(FEATURES).index("url")] += 2**63
        depth = int(rng.integers(1, 4))
        numbers = [depth, int(rng.integers(1, depth + 1)), int(rng.geometric(0.5))]
        lines.append(",".join(map(str, [*keys, *numbers, click])))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> Samples:
    return read_csv(write_csv(tmp_path_factory.mktemp("data") / "ads.csv"))


@pytest.fixture(scope="module")
def trained(samples) -> Trained:
    return train(
        samples, split(len(samples)), replace(DEFAULTS, epochs=2, batch=64, hidden=8, dim=4)
    )


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("0", 0),
        ("10710025208886284288", 10710025208886284288),
        ("18446744073709551615", 2**64 - 1),
        ("1.5234713295054e+19", 15234713295054000000),
        ("6.487413914859e+18", 6487413914859000000),
    ],
)
def test_keys_are_read_exactly(text, key):
    assert parse_key(text) == key


@pytest.mark.parametrize(
    "text", ["", "x", "1.5", "-1", "18446744073709551616", "nan", "1e400", "inf"]
)
def test_invalid_keys_are_rejected(text):
    with pytest.raises(ValueError, match="is no "):
        parse_key(text)


def test_csv_keeps_every_bit_of_unsigned_keys(tmp_path):
    path = tmp_path / "ads.csv"
    hashes = ["18446744073709551615", "9223372036854775808", "1.2e+19", "7"]
    cells = [[hashes[i] if f == "url" else str(i) for f in FEATURES] for i in range(4)]
    lines = [",".join(COLUMNS), *(",".join([*row, "3", "2", "5", "1"]) for row in cells)]
    path.write_text("\n".join(lines))
    found = read_csv(path)
    assert found.keys["url"].view(np.uint64).tolist() == [2**64 - 1, 2**63, 12 * 10**18, 7]
    assert found.keys["user"].tolist() == [0, 1, 2, 3]
    assert {name: values[0].tolist() for name, values in found.inputs.items()} == {
        "depth": [3.0],
        "position": [2.0],
        "impression": [5.0],
    }


@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [("url_hash", "-5", "column url_hash: '-5'"), ("depth", "deep", "column depth: ")],
)
def test_invalid_cell_is_named(tmp_path, column, cell, message):
    row = [cell if name == column else "1" for name in COLUMNS]
    path = tmp_path / "ads.csv"
    path.write_text("\n".join([",".join(COLUMNS), ",".join(row)]))
    with pytest.raises(ValueError, match=message):
        read_csv(path)


def test_split_is_deterministic_and_complete():
    parts, again = split(1000), split(1000)
    assert [len(p) for p in (parts.train, parts.valid, parts.test)] == [700, 100, 200]
    everything = np.concatenate([parts.train, parts.valid, parts.test])
    assert np.array_equal(np.sort(everything), np.arange(1000))
    assert np.array_equal(parts.test, again.test)


def test_auc_counts_ties_half():
    clicked = np.array([1.0, 0.0, 1.0, 0.0])
    assert auc(clicked, np.array([0.9, 0.1, 0.8, 0.2])) == 1.0
    assert auc(clicked, np.zeros(4)) == 0.5
    assert auc(clicked, np.array([0.5, 0.5, 0.8, 0.2])) == 0.875


def test_training_learns_and_repeats(samples, trained):
    parts = split(len(samples))
    test = samples.take(parts.test)
    assert auc(test.clicked, trained.score(test)["logit"]) > 0.6
    again = train(samples, parts, trained.options)
    assert again.rows.tobytes() == trained.rows.tobytes()


def test_rare_keys_share_the_learned_default_row(samples, trained):
    learn = samples.take(split(len(samples)).train)
    for name, (keys, rows) in tables(trained).items():
        found, times = np.unique(learn.keys[name], return_counts=True)
        assert sorted(keys.tolist()) == found[times >= 2].tolist()
        counts = dict(zip(found.tolist(), times.tolist(), strict=True))
        assert [counts[k] for k in keys.tolist()] == sorted(counts[k] for k in keys.tolist())[::-1]
        assert np.any(defaults(trained)[name])
        assert rows.shape == (len(keys), 4)
    strange = samples.take(np.arange(3))
    for keys in strange.keys.values():
        keys[:] = [-1, -2, -3]
    places = trained.vocabulary.places(strange)
    assert np.array_equal(places, np.tile(trained.vocabulary.first, (3, 1)))


def test_onnx_graph_computes_the_trainers_scores(samples, trained, tmp_path):
    model = network(trained)
    assert {t.type.tensor_type.elem_type for t in model.graph.input} == {TensorProto.FLOAT}
    (tmp_path / "dense.onnx").write_bytes(model.SerializeToString())
    places = trained.vocabulary.places(samples)
    inputs = {name: trained.rows[places[:, i]] for i, name in enumerate(FEATURES)}
    found = OnnxModel(tmp_path / "dense.onnx", "cpu").predict(inputs | samples.inputs)
    for name, scores in trained.score(samples).items():
        np.testing.assert_allclose(found[name][:, 0], scores, rtol=0, atol=1e-6)


def test_model_yaml_has_default_rows_bit_for_bit(trained, tmp_path):
    publish(trained, tmp_path)
    spec = Repository(tmp_path).open("ctr").spec
    assert spec == specification(trained)
    for table in spec.tables:
        wanted = defaults(trained)[table.name]
        assert np.array(table.default, np.float32).tobytes() == wanted.tobytes()


def test_requests_use_keys_of_the_tables_and_no_sample(samples, trained, tmp_path):
    made_up = made_up_samples(trained, 300)
    for name, (keys, _) in tables(trained).items():
        assert set(made_up.keys[name].tolist()) <= set(keys.tolist())
    assert np.all(made_up.inputs["position"] <= made_up.inputs["depth"])
    seen = set(zip(*(keys.tolist() for keys in samples.keys.values()), strict=True))
    assert not seen & set(zip(*(keys.tolist() for keys in made_up.keys.values()), strict=True))
    write_requests(trained, tmp_path, 300)
    demo = load_demo(tmp_path)
    assert {name: keys[:, 0].tolist() for name, keys in demo.keys.items()} == {
        name: keys.tolist() for name, keys in made_up.keys.items()
    }
    scores = trained.score(made_up)
    assert all(demo.scores[name].tobytes() == scores[name].tobytes() for name in scores)


def test_command_publishes_and_prints_the_auc(tmp_path, capsys):
    data = write_csv(tmp_path / "ads.csv", 800)
    words = ["--data", str(data), "--out", str(tmp_path / "models"), "--epochs", "1"]
    assert command.main(words) == 0
    assert "test AUC 0." in capsys.readouterr().out
    manifest = Repository(tmp_path / "models").open("ctr").manifest
    assert manifest is not None
    assert manifest.metadata["seed"] == 1
    assert command.main(words) == 1
    assert "exists" in capsys.readouterr().err
    assert command.main(["--data", str(tmp_path / "none.csv")]) == 2
    assert "none.csv" in capsys.readouterr().err
