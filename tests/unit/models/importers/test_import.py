"""From every format to a served version: HugeCTR, ps.json, Parquet, arrays, and the description."""

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hps.config.model_schema import FeatureSpec
from hps.errors import ConfigError, ModelError
from hps.models.importers import ImportSettings, TableChoice, import_model, plan_import
from hps.models.importers.import_model import describe
from hps.models.repository import Repository

ROWS = np.random.default_rng(0).random((10, 4), np.float32)
KEYS = np.arange(10) * 3 - 7


def contents(root, model, table, version=None):
    opened = Repository(root).open(model, version).tables[table]
    return opened.keys().tolist(), opened.vectors()


def folder_of(path, keys=KEYS, rows=ROWS):
    path.mkdir(parents=True)
    np.asarray(keys, "<i8").tofile(path / "key")
    np.asarray(rows, "<f4").tofile(path / "emb_vector")
    return path


class TestHugeCtr:
    def test_tables_of_a_folder_may_have_different_dims(self, tmp_path):
        folder_of(tmp_path / "src/users")
        folder_of(tmp_path / "src/items", rows=np.ones((10, 16)))
        plan = plan_import(tmp_path / "src")
        assert [(t.name, t.dim, t.rows) for t in plan.tables] == [
            ("items", 16, 10),
            ("users", 4, 10),
        ]
        folder = import_model(tmp_path / "models", "ctr", plan, ImportSettings(metadata={"auc": 1}))
        assert folder == tmp_path / "models/ctr/1"
        keys, vectors = contents(tmp_path / "models", "ctr", "users")
        assert keys == KEYS.tolist()
        assert vectors.tolist() == ROWS.tolist()
        manifest = Repository(tmp_path / "models").open("ctr").manifest
        assert manifest.metadata == {"source": "src", "format": "hugectr", "auc": 1}

    def test_folder_is_imported_under_the_chosen_name(self, tmp_path):
        folder_of(tmp_path / "0_sparse_2000.model")
        (table,) = plan_import(tmp_path / "0_sparse_2000.model").tables
        assert table.name == "0_sparse_2000_model"
        plan = plan_import(tmp_path, [TableChoice("users", ("0_sparse_2000.model",))])
        assert plan.tables[0].name == "users"

    def test_truncated_file_is_rejected_with_its_sizes(self, tmp_path):
        folder = folder_of(tmp_path / "src/users")
        (folder / "emb_vector").write_bytes(bytes(159))
        with pytest.raises(
            ModelError, match=r"key has 80 bytes \(10 keys\), emb_vector 159: no dim fits"
        ):
            plan_import(tmp_path / "src")
        (folder / "emb_vector").unlink()
        with pytest.raises(ModelError, match=r"emb_vector: No such file"):
            plan_import(tmp_path / "src")


class TestSeveralFiles:
    @pytest.fixture
    def npz(self, tmp_path):
        np.savez(tmp_path / "users.npz", vectors=ROWS, ids=KEYS, more=ROWS[:, :2])
        return tmp_path / "users.npz"

    @pytest.fixture
    def parquet(self, tmp_path):
        data = {"id": pa.array(KEYS), "vector": pa.array(list(ROWS[:, :3]))}
        pq.write_table(pa.table(data), tmp_path / "items.parquet")
        return tmp_path / "items.parquet"

    def test_npz_and_parquet_make_one_model(self, tmp_path, npz, parquet):
        choices = [TableChoice("items", (str(parquet),)), TableChoice("users", ("vectors",), "ids")]
        plan = plan_import(npz, choices)
        assert [(t.name, t.dim, t.rows) for t in plan.tables] == [
            ("items", 3, 10),
            ("users", 4, 10),
        ]
        import_model(tmp_path / "models", "ctr", plan)
        for table, rows in (("users", ROWS), ("items", ROWS[:, :3])):
            keys, vectors = contents(tmp_path / "models", "ctr", table)
            assert keys == KEYS.tolist()
            assert vectors.tolist() == rows.tolist()
        manifest = Repository(tmp_path / "models").open("ctr").manifest
        assert manifest.metadata == {"source": "users.npz", "format": "npz+parquet"}

    def test_parquet_is_completed_by_arrays_and_a_folder(self, tmp_path, npz, parquet):
        folder_of(tmp_path / "0_sparse.model")
        choices = [
            TableChoice("items", (str(parquet),)),
            TableChoice("users", (f"{npz}:vectors",), "ids"),
            TableChoice("more", (f"{npz}:more",)),
            TableChoice("sparse", (str(tmp_path / "0_sparse.model"),)),
        ]
        plan = plan_import(parquet, choices)
        assert [(t.name, t.dim) for t in plan.tables] == [
            ("items", 3),
            ("users", 4),
            ("more", 2),
            ("sparse", 4),
        ]

    def test_chosen_vectors_of_a_pair_keep_its_keys(self, tmp_path, parquet):
        np.savez(tmp_path / "pairs.npz", **{"users.keys": KEYS, "users.vectors": ROWS})
        choices = [TableChoice("items", (str(parquet),)), TableChoice("u", ("users.vectors",))]
        import_model(tmp_path / "models", "ctr", plan_import(tmp_path / "pairs.npz", choices))
        assert contents(tmp_path / "models", "ctr", "u")[0] == KEYS.tolist()

    def test_keys_may_name_the_file_as_their_vectors_do(self, tmp_path, npz, parquet):
        choices = [TableChoice("users", (f"{npz}:vectors",), f"{npz}:ids")]
        import_model(tmp_path / "models", "ctr", plan_import(parquet, choices))
        assert contents(tmp_path / "models", "ctr", "users")[0] == KEYS.tolist()

    def test_keys_in_another_file_than_the_vectors_are_rejected(self, npz, parquet):
        with pytest.raises(ModelError, match=r"keys of table 'users' .* put both into one file"):
            plan_import(npz, [TableChoice("users", ("vectors",), f"{parquet}:id")])

    def test_stacking_arrays_of_several_files_is_rejected(self, npz, parquet):
        wanted = TableChoice("all", (f"{npz}:vectors", "vectors"))
        with pytest.raises(ModelError, match="stack arrays of one file"):
            plan_import(parquet, [wanted])

    def test_missing_array_of_another_file_names_that_file(self, npz, parquet):
        with pytest.raises(ModelError, match=r"users\.npz: no array 'nope'.*vectors \[10, 4\]"):
            plan_import(parquet, [TableChoice("users", (f"{npz}:nope",))])


class TestPsJson:
    @pytest.fixture
    def ps_json(self, tmp_path):
        models = []
        for m, dims in (("dlrm", (4, 8)), ("din", (2,))):
            folders = [
                folder_of(tmp_path / f"{m}{i}.model", rows=np.full((10, d), i))
                for i, d in enumerate(dims)
            ]
            models.append(
                {
                    "model": m,
                    "sparse_files": [str(f) for f in folders],
                    "embedding_table_names": [f"{m}_t{i}" for i in range(len(dims))],
                    "embedding_vecsize_per_table": list(dims),
                    "maxnum_catfeature_query_per_table_per_sample": [2] * len(dims),
                    "default_value_for_each_table": [0.5] * len(dims),
                    "deployed_device_list": [0],
                    "max_batch_size": 64,
                }
            )
        path = tmp_path / "ps.json"
        path.write_text(json.dumps({"supportlonglong": True, "models": models}))
        return path

    def test_ps_json_model_keeps_its_settings(self, tmp_path, ps_json):
        plan = plan_import(ps_json, model="dlrm")
        import_model(tmp_path / "models", "dlrm", plan)
        opened = Repository(tmp_path / "models").open("dlrm")
        assert {n: t.dim for n, t in opened.tables.items()} == {"dlrm_t0": 4, "dlrm_t1": 8}
        assert opened.embedding_tables()["dlrm_t1"].default.tolist() == [0.5] * 8
        assert opened.spec.max_batch_size == 64
        assert contents(tmp_path / "models", "dlrm", "dlrm_t1")[1][0].tolist() == [1] * 8

    def test_ps_json_model_under_another_name(self, tmp_path, ps_json):
        import_model(tmp_path / "models", "shop", plan_import(ps_json, model="din"))
        assert Repository(tmp_path / "models").open("shop").spec.name == "shop"

    def test_ps_json_with_several_models_requires_a_name(self, ps_json):
        with pytest.raises(ModelError, match=r"describes the models dlrm, din; choose .*--model"):
            plan_import(ps_json)
        with pytest.raises(ModelError, match="no model 'x'; it describes dlrm, din"):
            plan_import(ps_json, model="x")
        with pytest.raises(ModelError, match="leave --table out"):
            plan_import(ps_json, [TableChoice("t", ("x",))])

    def test_invalid_ps_json_is_rejected(self, tmp_path):
        (tmp_path / "ps.json").write_text("{")
        with pytest.raises(ConfigError):
            plan_import(tmp_path / "ps.json")

    def test_wrong_dim_is_rejected(self, tmp_path, ps_json):
        text = ps_json.read_text().replace(
            '"embedding_vecsize_per_table": [4, 8]', '"embedding_vecsize_per_table": [4, 5]'
        )
        ps_json.write_text(text)
        with pytest.raises(ModelError, match=r"would fit dim 8: is dim 5 wrong\?"):
            plan_import(ps_json, model="dlrm")


class TestParquet:
    def write(self, path, columns, **settings):
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table(columns), path, **settings)
        return path

    @pytest.mark.parametrize(
        "vectors",
        [
            pa.array(list(ROWS)),
            pa.array(ROWS.astype(np.float64).tolist()),
            pa.FixedSizeListArray.from_arrays(pa.array(ROWS.reshape(-1)), 4),
            pa.array(list(ROWS), pa.large_list(pa.float32())),
        ],
        ids=["list", "list of double", "fixed size list", "large list"],
    )
    def test_list_column_is_read_as_vectors(self, tmp_path, vectors):
        path = self.write(tmp_path / "items.parquet", {"id": KEYS, "v": vectors}, row_group_size=3)
        (table,) = plan_import(path).tables
        assert (table.name, table.dim, table.rows) == ("items", 4, 10)
        chunks = list(table.chunks())
        assert np.concatenate([k for k, _ in chunks]).tolist() == KEYS.tolist()
        assert np.concatenate([v for _, v in chunks]).tolist() == ROWS.tolist()

    def test_float_columns_are_read_as_vectors(self, tmp_path):
        columns = {"a": ROWS[:, 0], "item_id": KEYS.astype(np.uint64), "b": ROWS[:, 1].astype("f8")}
        (table,) = plan_import(self.write(tmp_path / "t.parquet", columns)).tables
        ((keys, vectors),) = table.chunks()
        assert keys.tolist() == KEYS.astype(np.uint64).view(np.int64).tolist()
        assert vectors.tolist() == ROWS[:, :2].tolist()

    def test_columns_are_chosen_by_name_and_pattern(self, tmp_path):
        columns = {"id": KEYS, "ts": KEYS, "e0": ROWS[:, 0], "e1": ROWS[:, 1], "price": ROWS[:, 2]}
        path = self.write(tmp_path / "t.parquet", columns)
        (table,) = plan_import(path, [TableChoice("t", (), "id", "e*")]).tables
        assert table.dim == 2
        with pytest.raises(ModelError, match=r"--keys TABLE=COLUMN; integer columns: id, ts"):
            plan_import(path)
        with pytest.raises(ModelError, match="no column 'x'; it has id"):
            plan_import(path, [TableChoice("t", (), "x")])
        with pytest.raises(ModelError, match="'price' is float; keys must be integers"):
            plan_import(path, [TableChoice("t", (), "price")])
        with pytest.raises(ModelError, match=r"--vectors TABLE=PATTERN.*it has ts \(int64\), e0"):
            plan_import(path, [TableChoice("t", (), "id", "z*")])

    def test_part_files_are_one_table(self, tmp_path):
        for i in (0, 1):
            part = {"id": KEYS[i * 5 : i * 5 + 5], "v": list(ROWS[i * 5 : i * 5 + 5])}
            self.write(tmp_path / "src/items" / f"part-{i}.parquet", part) if (
                (tmp_path / "src").mkdir(exist_ok=True) or True
            ) else None
        plan = plan_import(tmp_path / "src", [TableChoice("items", ("items",))])
        import_model(tmp_path / "models", "m", plan)
        assert contents(tmp_path / "models", "m", "items")[0] == KEYS.tolist()
        self.write(tmp_path / "src/items/part-2.parquet", {"id": KEYS, "w": list(ROWS)})
        with pytest.raises(ModelError, match=r"part-2.parquet: its columns differ"):
            plan_import(tmp_path / "src", [TableChoice("items", ("items",))])

    def test_each_file_of_a_folder_is_a_table(self, tmp_path):
        for name in ("users", "items"):
            self.write(tmp_path / "src" / f"{name}.parquet", {"id": KEYS, "v": list(ROWS)})
        assert [t.name for t in plan_import(tmp_path / "src").tables] == ["items", "users"]

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            (
                {"id": pa.array([1, None]), "v": [[1.0], [2.0]]},
                "rows 0 to 1: 1 keys in column 'id' are null",
            ),
            ({"id": [1, 2], "v": pa.array([[1.0], None])}, "1 vectors in column 'v' are null"),
            (
                {"id": [1, 2], "v": pa.array([[1.0], [None]], pa.list_(pa.float32()))},
                "1 values in column",
            ),
            (
                {"id": [1, 2], "v": [[1.0, 2.0], [3.0]]},
                "a vector in column 'v' has 1 values, expected 2",
            ),
            ({"id": [1, 2], "v": [[1.0], [float("nan")]]}, r"row 1 \(key 2\) holds NaN"),
            ({"id": [1, 2], "v": [[1.0], [1e300]]}, r"row 1 \(key 2\) holds NaN or a value"),
        ],
    )
    def test_bad_rows_are_rejected_with_their_positions(self, tmp_path, columns, message):
        plan = plan_import(self.write(tmp_path / "t.parquet", columns))
        with pytest.raises(ModelError, match=message):
            import_model(tmp_path / "models", "m", plan)
        assert not (tmp_path / "models/m").exists()

    def test_truncated_parquet_is_rejected(self, tmp_path):
        path = self.write(tmp_path / "t.parquet", {"id": KEYS, "v": list(ROWS)})
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(ModelError, match="is not a readable Parquet file"):
            plan_import(path)


class TestDescription:
    @pytest.fixture
    def npz(self, tmp_path):
        np.savez(
            tmp_path / "t.npz",
            **{"e.0.weight": ROWS, "e.1.weight": ROWS[:3], "big": np.ones((4, 9))},
        )
        return tmp_path / "t.npz"

    def test_stacked_parts_get_a_feature_each(self, tmp_path, npz):
        plan = plan_import(npz, [TableChoice("all", ("e.*",)), TableChoice("big", ("big",))])
        spec = describe(tmp_path / "models", "m", plan)
        assert [(f.name, f.table, f.key_offset) for f in spec.features] == [
            ("e_0", "all", 0),
            ("e_1", "all", 10),
            ("big", "big", 0),
        ]

    def test_explicit_features_replace_the_default_ones(self, tmp_path, npz):
        plan = plan_import(npz, [TableChoice("all", ("e.*",))])
        given = [
            FeatureSpec(name="user", table="all"),
            FeatureSpec(name="ad", table="all", key_offset=10),
        ]
        import_model(tmp_path / "models", "m", plan, spec=describe(tmp_path, "m", plan, given))
        assert Repository(tmp_path / "models").open("m").spec.features == given

    def test_second_version_keeps_the_description_and_must_match_it(self, tmp_path, npz):
        plan = plan_import(npz, [TableChoice("big", ("big",))])
        import_model(tmp_path / "models", "m", plan)
        path = tmp_path / "models/m/model.yaml"
        path.write_text(path.read_text() + "max_batch_size: 7\n")
        assert import_model(tmp_path / "models", "m", plan).name == "2"
        assert Repository(tmp_path / "models").open("m").spec.max_batch_size == 7
        other = plan_import(npz, [TableChoice("big", ("e.0.weight",))])
        with pytest.raises(ModelError, match=r"'big' has dim 4 in .*t.npz, 9 in model.yaml"):
            import_model(tmp_path / "models", "m", other)
        more = plan_import(npz, [TableChoice("big", ("big",)), TableChoice("e", ("e.0.weight",))])
        with pytest.raises(
            ModelError, match=r"table 'e' is not described in model\.yaml, which has big"
        ):
            import_model(tmp_path / "models", "m", more)
        missing = plan_import(npz, [TableChoice("e", ("e.0.weight",))])
        with pytest.raises(
            ModelError, match=r"describes table 'big', but .* gives e; name it with --table"
        ):
            import_model(tmp_path / "models", "m", missing)

    def test_allow_nan_imports_nan(self, tmp_path):
        np.savez(tmp_path / "t.npz", w=np.array([[1, np.inf], [np.nan, 2]], np.float32))
        plan = plan_import(tmp_path / "t.npz")
        with pytest.raises(ModelError, match=r"row 0 \(key 0\).*--allow-nan"):
            import_model(tmp_path / "models", "m", plan)
        import_model(tmp_path / "models", "m", plan, ImportSettings(allow_nan=True))
        assert np.isnan(contents(tmp_path / "models", "m", "w")[1][1, 0])

    def test_progress_counts_every_row(self, tmp_path, npz):
        class Counting:
            def __init__(self):
                self.done = {}

            def task(self, title, total, unit="rows"):
                from contextlib import nullcontext

                self.done[title] = [0, total]
                return nullcontext(
                    lambda n: self.done[title].__setitem__(0, self.done[title][0] + n)
                )

        seen = Counting()
        plan = plan_import(npz, [TableChoice("all", ("e.*",)), TableChoice("big", ("big",))])
        import_model(tmp_path / "models", "m", plan, progress=seen)
        assert seen.done == {"importing all": [13, 13], "importing big": [4, 4]}


@pytest.mark.parametrize("name", ["t.txt", "t", "t.onnx"])
def test_unknown_suffix_requires_a_format(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(ModelError, match=r"--format, one of ps.json, hugectr, parquet, npz"):
        plan_import(tmp_path / name)


def test_explicit_format_is_used_and_unknown_sources_are_rejected(tmp_path):
    np.savez(tmp_path / "t.npz", w=ROWS)
    (tmp_path / "t.npz").rename(tmp_path / "weights")
    assert plan_import(tmp_path / "weights", format="npz").tables[0].rows == 10
    with pytest.raises(ModelError, match="no format 'nzp'; expected one of"):
        plan_import(tmp_path / "weights", format="nzp")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"neither HugeCTR tables .* nor Parquet files"):
        plan_import(tmp_path / "empty")
    with pytest.raises(ModelError, match="gone is missing"):
        plan_import(tmp_path / "gone")


MEASURE = """
import resource, sys
from pathlib import Path
from hps.models.importers import TableChoice, import_model, plan_import
def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) >> 10
class Watch:
    peak = 0
    def task(self, *_):
        from contextlib import nullcontext
        return nullcontext(self.step)
    def step(self, _rows):
        Watch.peak = max(Watch.peak, anonymous())
before = anonymous()
plan = plan_import(Path(sys.argv[1]), [TableChoice.parse(t) for t in sys.argv[3:]])
import_model(Path(sys.argv[2]), "m", plan, progress=Watch())
print(Watch.peak - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["npz", "npz_compressed", "parquet", "safetensors", "torch"])
def test_memory_does_not_grow_with_the_table(tmp_path, save_torch, tensor, kind):
    """A table of 256 MB takes less than half of that."""
    rows = np.repeat(np.arange(1 << 19, dtype=np.float32)[:, None], 128, axis=1)
    chosen = []
    if kind == "parquet":
        path = tmp_path / "w.parquet"
        flat = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), 128)
        pq.write_table(
            pa.table({"id": np.arange(len(rows)), "v": flat}), path, row_group_size=1 << 16
        )
    elif kind == "safetensors":
        from safetensors.numpy import save_file

        path = tmp_path / "w.safetensors"
        save_file({"w": rows}, path)
    elif kind == "torch":
        path = save_torch(tmp_path / "w.pt", {"w": tensor(rows)})
    else:
        path = tmp_path / "w.npz"
        (np.savez_compressed if kind == "npz_compressed" else np.savez)(path, w=rows)
    del rows
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, path, tmp_path / "models", *chosen],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert int(done.stdout) < 128
    (name,) = Repository(tmp_path / "models").open("m").tables
    keys, vectors = contents(tmp_path / "models", "m", name)
    assert len(keys) == 1 << 19
    assert vectors[-1].tolist() == [float((1 << 19) - 1)] * 128
