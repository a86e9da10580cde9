"""The cases of HPS's plug-in for PyTorch: one table, and eight whose lookups are forked."""

from __future__ import annotations

import pytest

from tests.support.hps_models import PYTORCH_MODELS, opened
from tests.support.pytorch import hps_torch, torch

BATCH, HOTNESS, ROUNDS = 256, 10, 10
ONE, EIGHT = PYTORCH_MODELS


@pytest.fixture(scope="module")
def ps_json_node(tmp_path_factory):
    with opened(PYTORCH_MODELS, tmp_path_factory.mktemp("hps"), supportlonglong=True) as node:
        hps_torch.register_node("hps-cases", node)
        yield node
        hps_torch.unregister_node("hps-cases")


@pytest.fixture(scope="module")
def vectors():
    return {table.name: torch.from_numpy(table.vectors) for table in EIGHT.tables}


def test_one_table(ps_json_node, vectors):
    layer = hps_torch.Embedding(ps_json_node, ONE.name, "table0")
    for _ in range(ROUNDS):
        keys = torch.randint(0, 10_000, (BATCH, HOTNESS))
        assert torch.equal(layer(keys), vectors["table0"][keys])


def test_unknown_keys_get_the_default_of_the_ps_json(ps_json_node):
    layer = hps_torch.Embedding(ps_json_node, ONE.name, "table0")
    assert not layer(torch.tensor([10_000, -1])).any()


class Forked(torch.nn.Module):
    """Starts the lookups of all tables before it waits for the first."""

    def __init__(self, node):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            hps_torch.Embedding(node, EIGHT.name, table.name) for table in EIGHT.tables
        )

    def forward(self, keys):
        futures = [torch.jit.fork(layer, keys[i]) for i, layer in enumerate(self.layers)]
        return torch.cat([torch.jit.wait(future) for future in futures])


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "TorchScript"])
@pytest.mark.filterwarnings("ignore")  # PyTorch's own: TorchScript is deprecated
def test_eight_tables(ps_json_node, vectors, traced, tmp_path):
    model = Forked("hps-cases")
    starts = torch.arange(8, dtype=torch.int32)[:, None, None] * 10_000
    keys = [
        torch.randint(0, 10_000, (8, BATCH, HOTNESS), dtype=torch.int32) + starts
        for _ in range(ROUNDS)
    ]
    if traced:
        torch.jit.save(torch.jit.trace(model, keys[0]), str(tmp_path / "model.pt"))
        model = torch.jit.load(str(tmp_path / "model.pt"))
    for each in keys:
        numbers = (each - starts).long()
        expected = torch.cat([vectors[f"table{i}"][numbers[i]] for i in range(8)])
        assert torch.equal(model(each), expected)


@pytest.mark.filterwarnings("ignore")
def test_scripted_operator(ps_json_node, vectors):
    @torch.jit.script
    def look_up(keys: torch.Tensor) -> torch.Tensor:
        return torch.ops.hps.embedding(
            keys, None, "hps-cases", "1_table", "table0", "", 128, "float32"
        )

    keys = torch.randint(0, 10_000, (BATCH, HOTNESS))
    assert torch.equal(look_up(keys), vectors["table0"][keys])
