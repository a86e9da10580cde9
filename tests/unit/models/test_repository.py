"""Repository as readers see it: versions, overrides, and precise errors for damage."""

import json
import os

import numpy as np
import pytest

from hps.config.model_schema import MissPolicySpec, ModelSpec
from hps.config.schema import ModelOverride, TableOverride
from hps.errors import ConfigError, ModelError, NotFound
from hps.models.manifest import Manifest, checksum_file, read_manifest
from hps.models.repository import Repository, open_legacy


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path / "models")


def test_opens_the_highest_version(repository, make_version):
    for version in (1, 9, 10):
        make_version(version)
    assert repository.names() == ["ctr"]
    assert repository.versions("ctr") == [1, 9, 10]
    assert repository.open("ctr").version == 10
    assert repository.open("ctr", 9).version == 9
    assert repository.open("ctr", override=ModelOverride(version=1)).version == 1


def test_opens_the_highest_version_with_a_manifest_if_any_has_one(repository, make_version):
    folders = [make_version(version=version) for version in (1, 2, 3)]
    (folders[2] / "manifest.json").unlink()
    assert (repository.open("ctr").version, repository.complete("ctr")) == (2, [1, 2])
    assert repository.open("ctr", 3).version == 3
    repository.require_complete("ctr", 2)
    repository.require_complete("ctr", 3, exempt={3})
    for stated in ({"version": 3}, {"override": ModelOverride(version=3)}):
        with pytest.raises(ModelError, match=r"version 3 of model 'ctr' has no manifest\.json"):
            repository.require_complete("ctr", **stated)
    for folder in folders[:2]:
        (folder / "manifest.json").unlink()
    repository.require_complete("ctr", 3)
    assert (repository.open("ctr").version, repository.complete("ctr")) == (3, [1, 2, 3])


def test_folders_with_other_names_are_ignored(repository, make_version):
    folder = make_version().parent
    for name in ("01", "0", "latest", ".import-2-abcd", "2.tmp"):
        (folder / name).mkdir()
    assert repository.versions("ctr") == [1]


def test_tables_carry_the_overridden_settings(repository, make_version):
    make_version()
    override = ModelOverride(
        tables={
            "users": TableOverride(
                default=0.5,
                tombstone_ttl_s=7,
                ttl_s=60,
                miss_policy=MissPolicySpec(kind="default_then_promote", min_hit_rate=0.25),
            )
        }
    )
    tables = repository.open("ctr", override=override).embedding_tables()
    users = tables["users"]
    assert (users.id, users.dim, users.dtype) == ("ctr/1/users", 4, np.float32)
    assert users.default.tolist() == [0.5] * 4
    assert (users.tombstone_ttl_s, users.miss.kind, users.miss.min_hit_rate) == (
        7,
        "default_then_promote",
        0.25,
    )
    assert users.ttl_s == 60
    assert tables["items"].default.tolist() == [0] * 8
    assert tables["items"].ttl_s is None
    assert repository.open("ctr").embedding_tables()["users"] is not users


def test_32_bit_keys_and_half_precision_come_from_the_description(repository, make_version):
    spec = ModelSpec.model_validate(
        {
            "name": "ctr",
            "tables": [{"name": "t", "dim": 2, "dtype": "float16", "key_dtype": "uint32"}],
        }
    )
    make_version(spec=spec)
    table = repository.open("ctr").embedding_tables()["t"]
    assert (table.dtype, table.key_bits) == (np.float16, 32)


def test_override_of_an_unknown_table_is_rejected(repository, make_version):
    make_version()
    with pytest.raises(ConfigError, match="user"):
        repository.open("ctr", override=ModelOverride(tables={"user": TableOverride(default=1)}))


class TestMissing:
    def test_missing_repository_is_rejected_with_a_remedy(self, repository):
        with pytest.raises(ModelError, match=r"models is not a folder; .*hps model import"):
            repository.names()

    @pytest.mark.parametrize("name", ["shop", "../ctr", "", "ctr/1"])
    def test_unknown_model_is_not_found(self, repository, make_version, name):
        make_version()
        with pytest.raises(NotFound, match=r"\(models: ctr\)"):
            repository.open(name)

    def test_unknown_version_is_not_found(self, repository, make_version):
        make_version(2)
        with pytest.raises(NotFound, match=r"no version 3 in .*; there is 2"):
            repository.open("ctr", 3)

    def test_model_without_versions_is_rejected(self, repository, make_version):
        folder = make_version()
        folder.rename(folder.with_name("later"))
        with pytest.raises(ModelError, match=r"no version folder \(1, 2, \.\.\.\)"):
            repository.open("ctr")


class TestDamage:
    def test_truncated_file_is_rejected(self, repository, make_version):
        folder = make_version()
        path = folder / "tables/users/emb_vector"
        os.truncate(path, path.stat().st_size - 16)
        with pytest.raises(ModelError, match=r"emb_vector: 1584 bytes; 100 keys of dim 4"):
            repository.open("ctr")

    def test_files_shorter_than_in_the_manifest_are_rejected(self, repository, make_version):
        folder = make_version()
        os.truncate(folder / "tables/users/key", 8 * 99)
        os.truncate(folder / "tables/users/emb_vector", 16 * 99)
        with pytest.raises(ModelError, match=r"manifest says 800 bytes \(100 rows\), found 792"):
            repository.open("ctr")

    def test_dim_that_differs_from_the_manifest_is_rejected(self, repository, make_version):
        folder = make_version()
        path = folder.parent / "model.yaml"
        path.write_text(path.read_text().replace("dim: 4", "dim: 5"))
        with pytest.raises(
            ModelError, match=r"manifest says dim 4 for table 'users', model.yaml.* 5"
        ):
            repository.open("ctr")

    def test_missing_table_is_rejected(self, repository, make_version):
        folder = make_version()
        (folder / "tables/items").rename(folder / "moved")
        with pytest.raises(ModelError, match=r"table 'items': .*tables/items is missing"):
            repository.open("ctr")

    def test_extra_folder_is_a_warning(self, repository, make_version):
        folder = make_version()
        (folder / "tables/old").mkdir()
        (warning,) = repository.open("ctr").warnings
        assert "tables/old: not a table of model.yaml, ignored" in warning

    def test_missing_manifest_is_a_warning(self, repository, make_version):
        folder = make_version()
        before = repository.open("ctr").digest
        (folder / "manifest.json").unlink()
        opened = repository.open("ctr")
        assert "no manifest.json" in opened.warnings[0]
        assert opened.manifest is None
        assert opened.digest != before

    def test_network_of_another_size_is_rejected_and_a_missing_one_accepted(
        self, repository, make_version
    ):
        described = ModelSpec.model_validate(
            {
                "name": "ctr",
                "tables": [{"name": "users", "dim": 4}],
                "dense": {"outputs": [{"name": "score", "shape": [-1, 1]}]},
            }
        )
        folder = make_version(spec=described, dense=b"network")
        assert repository.open("ctr").dense == folder / "dense.onnx"
        (folder / "dense.onnx").write_bytes(b"networks")
        with pytest.raises(ModelError, match=r"dense.onnx: the manifest says 7 bytes, found 8"):
            repository.open("ctr")
        (folder / "dense.onnx").unlink()
        assert repository.open("ctr").dense is None  # Triton may run it

    def test_model_folder_of_another_name_is_rejected(self, repository, make_version):
        folder = make_version().parent
        folder.rename(folder.with_name("shop"))
        with pytest.raises(ModelError, match="name is 'ctr', but the folder is 'shop'"):
            repository.open("shop")

    def test_copied_version_is_rejected(self, repository, make_version):
        folder = make_version(1)
        folder.rename(folder.with_name("5"))
        with pytest.raises(ModelError, match=r"version 1, but lies in 'ctr' version 5"):
            repository.open("ctr")


class TestManifest:
    def test_written_manifest_is_read_back(self, make_version):
        folder = make_version(
            3, metadata={"auc": 0.75, "framework": "jax"}, watermark={"items": {"0": 17}}
        )
        manifest = read_manifest(folder / "manifest.json")
        assert (manifest.model, manifest.version, manifest.format) == ("ctr", 3, 1)
        assert manifest.metadata == {"auc": 0.75, "framework": "jax"}
        assert manifest.watermark == {"items": {"0": 17}}
        users = manifest.tables["users"]
        assert (users.rows, users.dim, users.dtype) == (100, 4, "float32")
        assert users.key.checksum == checksum_file(folder / "tables/users/key")
        text = json.loads((folder / "manifest.json").read_text())
        assert text["created"].endswith("Z")
        assert set(text) == set(Manifest.model_fields)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda m: m.update(format=2), "manifest format 2 is newer than the 1"),
            (lambda m: m.update(format=0), "format: Input should be 1, found '0'"),
            (lambda m: m.update(extra=1), "extra: Extra inputs are not permitted"),
            (lambda m: m.pop("tables"), "tables: Field required"),
            (lambda m: m["tables"]["users"].update(rows=-1), r"tables.users.rows: .*'-1'"),
            (
                lambda m: m["tables"]["users"].update(rows=99),
                "the manifest says 99 rows, found 100",
            ),
            (lambda m: m["tables"].pop("users"), "'users' of model.yaml is not in the manifest"),
            (
                lambda m: m["tables"]["users"]["key"].update(checksum="md5:1"),
                "tables.users.key.checksum",
            ),
            (
                lambda m: m.update(created="2026-01-01T00:00:00"),
                "created: expected a time with its",
            ),
            (lambda m: m.update(created="yesterday"), "created: "),
        ],
    )
    def test_damaged_manifest_is_rejected_with_the_cause(
        self, repository, make_version, change, message
    ):
        path = make_version() / "manifest.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))
        with pytest.raises(ModelError, match=message):
            repository.open("ctr")

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00"])
    def test_manifest_without_a_json_object_is_rejected(self, repository, make_version, text):
        path = make_version() / "manifest.json"
        path.write_text(text)
        with pytest.raises(ModelError, match=r"manifest\.json: "):
            repository.open("ctr")


class TestDigest:
    def test_digest_depends_on_contents_only(self, repository, make_version, make_rows):
        tables = {"users": make_rows(10, 4), "items": make_rows(10, 8)}
        make_version(1, tables=tables)
        make_version(2, tables=tables)
        make_version(3, tables=tables | {"items": make_rows(10, 8, seed=5)})
        one, two, three = (repository.open("ctr", v) for v in (1, 2, 3))
        assert one.digest == two.digest != three.digest
        assert one.tables["users"].digest == three.tables["users"].digest
        assert one.tables["items"].digest != three.tables["items"].digest

    def test_digest_of_legacy_folders_depends_on_size_and_time(self, tmp_path, make_spec):
        legacy = Legacy(make_spec("old", t=2), {"t": (tmp_path / "t",)})
        (tmp_path / "t").mkdir()
        np.arange(3, dtype="<i8").tofile(tmp_path / "t/key")
        np.ones((3, 2), "<f4").tofile(tmp_path / "t/emb_vector")
        version = open_legacy(legacy)
        assert (version.name, version.version, version.tables["t"].rows) == ("old", 1, 3)
        assert open_legacy(legacy).digest == version.digest
        os.utime(tmp_path / "t/key", (1, 1))
        assert open_legacy(legacy).digest != version.digest

    def test_legacy_version_requires_a_folder_for_each_table(self, make_spec):
        with pytest.raises(ModelError, match="no directory for table 't'"):
            open_legacy(Legacy(make_spec("old", t=2), {}))


class Legacy:
    version = 1

    def __init__(self, spec, directories):
        self.spec = spec
        self.directories = directories
