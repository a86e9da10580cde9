"""PyTorch checkpoints: every layout a state_dict can have, and nothing is ever executed."""

import os
import pickle
import zipfile
from collections import OrderedDict

import numpy as np
import pytest

from hps.errors import ModelError
from hps.models.importers.arrays import to_float32
from hps.models.importers.torch import open_torch
from hps.models.importers.torch_pickle import read_pickle


def read(file, name, rows=3):
    array = file.arrays[name]
    blocks = [to_float32(array, b) for b in array.blocks(rows)]
    return np.concatenate(blocks) if blocks else np.empty(array.shape, np.float32)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("byteorder", ["little", "big"])
def test_float_tensors_are_read(tmp_path, save_torch, tensor, dtype, byteorder):
    values = np.random.default_rng(0).random((10, 4)).astype(dtype)
    path = save_torch(tmp_path / "net.pt", {"emb.weight": tensor(values)}, byteorder=byteorder)
    file = open_torch(path)
    assert str(file.arrays["emb.weight"]) == f"emb.weight [10, 4] {dtype}"
    assert read(file, "emb.weight").tolist() == values.astype(np.float32).tolist()


def test_bfloat16_is_widened_exactly(tmp_path, save_torch, tensor):
    values = np.array([[1.0, -2.5], [0.0078125, 3.0e38]], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    path = save_torch(tmp_path / "net.pt", {"w": tensor(bits, "bfloat16")})
    expected = (bits.astype(np.uint32) << 16).view(np.float32)
    assert expected[0].tolist() == [1.0, -2.5]
    assert read(open_torch(path), "w").tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "int8", "uint8", "bool"])
def test_integer_tensors_are_read_unchanged(tmp_path, save_torch, tensor, dtype):
    values = np.array([1, 0, 1], dtype)
    array = open_torch(save_torch(tmp_path / "n.pt", {"ids": tensor(values)})).arrays["ids"]
    assert array.dtype == dtype
    assert np.concatenate(list(array.blocks(2))).tolist() == values.tolist()


def test_views_of_one_storage_are_read(tmp_path, save_torch, fake_torch):
    """Slices, transposes and rows with gaps share the bytes they were cut from."""
    data = np.arange(100, dtype=np.float32)
    shared = fake_torch.Storage(data, "float32")
    views = {
        "slice": fake_torch.Tensor(shared, 20, (5, 4), (4, 1)),
        "transposed": fake_torch.Tensor(shared, 0, (4, 25), (1, 4)),
        "gaps": fake_torch.Tensor(shared, 3, (9, 2), (10, 2)),
    }
    file = open_torch(save_torch(tmp_path / "net.pt", views))
    assert read(file, "slice").tolist() == data[20:40].reshape(5, 4).tolist()
    assert read(file, "transposed").tolist() == data.reshape(25, 4).T.tolist()
    assert read(file, "gaps").tolist() == [[3 + 10 * i, 5 + 10 * i] for i in range(9)]


def test_tensors_of_nested_checkpoints_are_named_by_their_path(tmp_path, save_torch, tensor):
    rows = np.ones((2, 3), np.float32)
    obj = {
        "epoch": 7,
        "name": "run",
        "state_dict": OrderedDict(
            [("emb.weight", tensor(rows)), ("p", tensor(rows, parameter=True))]
        ),
        "optimizer": {"state": [tensor(rows), None, 1.5, (tensor(rows),)], "on": True},
    }
    file = open_torch(save_torch(tmp_path / "net.ckpt", obj))
    assert list(file.arrays) == [
        "state_dict.emb.weight",
        "state_dict.p",
        "optimizer.state.0",
        "optimizer.state.3.0",
    ]
    assert read(file, "state_dict.p").tolist() == rows.tolist()


def test_state_dict_with_metadata_attribute_is_read(tmp_path, save_torch, tensor):
    state = OrderedDict([("emb.weight", tensor(np.ones((2, 3), np.float32)))])
    state._metadata = OrderedDict([("", {"version": 1}), ("emb", {"version": 1})])
    file = open_torch(save_torch(tmp_path / "net.pt", state))
    assert list(file.arrays) == ["emb.weight"]


def test_tensors_of_untyped_storages_are_read(tmp_path, save_torch, fake_torch):
    data = np.arange(6, dtype=np.float32)
    raw = fake_torch.Storage(data.view(np.uint8), "untyped")
    file = open_torch(
        save_torch(tmp_path / "n.pt", {"w": fake_torch.Tensor(raw, 2, (2, 2), (2, 1), v3=True)})
    )
    assert read(file, "w").tolist() == [[2, 3], [4, 5]]


def test_bare_tensor_is_named_after_its_file(tmp_path, save_torch, tensor):
    file = open_torch(save_torch(tmp_path / "items.pt", tensor(np.ones((2, 2), np.float32))))
    assert list(file.arrays) == ["items"]


def test_empty_tensor_is_read(tmp_path, save_torch, tensor):
    file = open_torch(save_torch(tmp_path / "n.pt", {"w": tensor(np.empty((0, 4), np.float32))}))
    assert read(file, "w").shape == (0, 4)


class TestNothingIsExecuted:
    """Each pickle would leave a file behind if anything of it ran."""

    @pytest.fixture(autouse=True)
    def untouched(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        yield
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize(
        "call",
        [
            (os.system, ("touch ran",)),
            (eval, ("open('ran', 'w')",)),
            (exec, ("open('ran', 'w')",)),
            (open, ("ran", "w")),
            (__import__, ("os",)),
            (getattr, (os, "system")),
            (pickle.loads, (pickle.dumps(1),)),
        ],
        ids=["system", "eval", "exec", "open", "import", "getattr", "loads"],
    )
    def test_calls_are_rejected_by_name(self, tmp_path, save_torch, call):
        class Evil:
            def __reduce__(self):
                return call

        class Quiet:
            """A second value of the same pickle."""

            def __reduce__(self):
                return call

        path = tmp_path / "evil.pt"
        plain = pickle.dumps({"w": Quiet(), "x": Evil()}, 2) if call[0] is not getattr else None
        if plain is None:
            plain = b"\x80\x02cbuiltins\ngetattr\n(cos\nsystem\nU\x04nametR."
        save_torch(path, None, pickled=plain)
        with pytest.raises(
            ModelError,
            match=r"the pickle uses the global name .*nothing is executed; save the state_dict",
        ):
            open_torch(path)

    @pytest.mark.parametrize(
        "pickled",
        [
            b"\x80\x02(S'touch ran'\nios\nsystem\n.",  # INST
            b"\x80\x02(cos\nsystem\nS'touch ran'\no.",  # OBJ
            b"\x80\x02cposix\nsystem\nX\x09\x00\x00\x00touch ran\x85R.",  # REDUCE
            b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x09touch ran\x85R.",  # STACK_GLOBAL
            b"\x80\x02cos\nsystem\nX\x09\x00\x00\x00touch ran\x85\x81.",  # NEWOBJ
            b"\x80\x02ctorch\n__builtins__\n.",
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2.__globals__\n.",
            b"\x80\x04\x8c\x0ctorch._utils\x8c\x1f_rebuild_tensor_v2.__globals__xx\x93.",
            b"\x80\x02\x82\x01.",  # EXT1
        ],
    )
    def test_every_opcode_for_global_names_is_checked(self, tmp_path, save_torch, pickled):
        with pytest.raises(ModelError, match=r"pickle"):
            open_torch(save_torch(tmp_path / "evil.pt", None, pickled=pickled))

    STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"

    @pytest.mark.parametrize(
        "target",
        [
            b"ctorch._utils\n_rebuild_tensor_v2\n",
            b"ccollections\nOrderedDict\n",
            b"ctorch\nFloatStorage\n",
            b"ctorch\nfloat32\n",
            STORAGE,
            b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\x00K\x02\x85K\x01\x85\x89NtR",
        ],
        ids=["function", "OrderedDict", "storage class", "dtype", "storage", "tensor"],
    )
    @pytest.mark.parametrize(
        "state",
        [
            b"}X\x06\x00\x00\x00offsetK\x63s",  # the instance's dictionary
            b"N}X\x06\x00\x00\x00offsetK\x63s\x86",  # its slots
            b"](K\x01K\x02K\x03K\x04K\x05K\x06e",  # what a frozen dataclass takes
        ],
        ids=["dict", "slots", "list"],
    )
    def test_tensors_cannot_be_altered_by_later_operations(self, target, state):
        """BUILD sets attributes of the object on the stack, past the checks of its constructor."""
        read_pickle(b"\x80\x02" + target + b".")
        with pytest.raises(pickle.UnpicklingError):
            read_pickle(b"\x80\x02" + target + state + b"b.")

    @pytest.mark.parametrize(
        "pickled",
        [b"", b"\x80\x02", b"\x80\x02.", b"\x80\x02(((", b"\x80\x02]]]" * 9, b"garbage" * 30],
    )
    def test_damaged_pickles_are_rejected(self, pickled):
        with pytest.raises(pickle.UnpicklingError):
            read_pickle(pickled)

    def test_deep_nesting_is_rejected(self, tmp_path, save_torch):
        pickled = b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."
        with pytest.raises(ModelError, match="nests deeper than 64 dicts and lists"):
            open_torch(save_torch(tmp_path / "n.pt", None, pickled=pickled))


class TestDamage:
    def test_missing_file_is_reported(self, tmp_path):
        with pytest.raises(ModelError, match=r"net.pt is missing"):
            open_torch(tmp_path / "net.pt")

    def test_legacy_format_is_rejected_with_a_remedy(self, tmp_path):
        (tmp_path / "old.pt").write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2))
        with pytest.raises(ModelError, match=r"legacy format .*save it again with torch\.save"):
            open_torch(tmp_path / "old.pt")

    def test_torchscript_archive_is_rejected(self, tmp_path, save_torch, tensor):
        path = save_torch(tmp_path / "s.pt", {"w": tensor(np.ones((1, 1)))})
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("archive/constants.pkl", b"")
        with pytest.raises(ModelError, match="TorchScript archive, which holds code"):
            open_torch(path)

    def test_truncated_archive_is_rejected(self, tmp_path, save_torch, tensor):
        path = save_torch(tmp_path / "n.pt", {"w": tensor(np.ones((100, 100)))})
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ModelError, match=r"no zip directory at its end.*: truncated"):
            open_torch(path)

    def test_other_zip_archive_is_rejected(self, tmp_path):
        with (tmp_path / "n.pt").open("wb") as file:
            np.savez(file, a=np.ones(3))
        with pytest.raises(ModelError, match=r"without a data\.pkl"):
            open_torch(tmp_path / "n.pt")

    def test_missing_and_compressed_bytes_are_rejected(self, tmp_path, save_torch, tensor):
        path = save_torch(tmp_path / "n.pt", {"w": tensor(np.ones((3, 3)))}, compression=8)
        with pytest.raises(ModelError, match="'w' is compressed"):
            open_torch(path)
        with zipfile.ZipFile(path) as full, zipfile.ZipFile(tmp_path / "m.pt", "w") as part:
            part.writestr("archive/data.pkl", full.read("archive/data.pkl"))
        with pytest.raises(ModelError, match=r"the bytes of 'w' \(data/0\) are missing"):
            open_torch(tmp_path / "m.pt")

    @pytest.mark.parametrize(
        ("offset", "size", "stride"),
        [
            (0, (4, 4), (4, 1)),
            (9, (1, 2), (2, 1)),
            (0, (2, 2), (9, 1)),
            (10**15, (1, 1), (1, 1)),
            (0, (2**61, 2), (0, 1)),
            (-1, (1, 1), (1, 1)),
            (0, (-1, 2), (2, 1)),
            (0, (1, 2), (2,)),
            (0, (1.5, 2), (2, 1)),
        ],
    )
    def test_views_beyond_their_storage_are_rejected(
        self, tmp_path, save_torch, fake_torch, offset, size, stride
    ):
        storage = fake_torch.Storage(np.zeros(10, np.float32), "float32")
        path = save_torch(
            tmp_path / "n.pt", {"w": fake_torch.Tensor(storage, offset, size, stride)}
        )
        with pytest.raises(ModelError):
            open_torch(path)
