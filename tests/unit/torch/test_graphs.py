"""Layers under ``torch.compile`` and in programs of ``torch.export``: one graph, the same values."""

from __future__ import annotations

import pytest

from hps.errors import NotFound
from tests.support.pytorch import hps_torch, torch


class Ranker(torch.nn.Module):
    def __init__(self, node):
        super().__init__()
        self.users = hps_torch.Embedding(node, "m", "plain")
        self.tags = hps_torch.EmbeddingBag(node, "m", "pooled", "sum")
        self.linear = torch.nn.Linear(12, 1)

    def forward(self, users, tags, weights):
        pooled = self.tags(tags, per_sample_weights=weights)
        return self.linear(torch.cat([self.users(users), pooled], 1).relu())


def inputs(batch):
    return torch.randint(0, 120, (batch,)), torch.randint(0, 120, (batch, 3)), torch.rand(batch, 3)


@pytest.fixture
def ranker(node):
    return Ranker(node).eval()


@pytest.fixture(autouse=True)
def _compiler(monkeypatch, tmp_path):
    """No compiled code of one test in another."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore")  # PyTorch's own
def test_compiled_in_one_graph(ranker, backend):
    compiled = torch.compile(ranker, fullgraph=True, backend=backend)
    with torch.no_grad():
        for batch in (
            (4,) if backend == "inductor" else (4, 4, 7)
        ):  # 7: compiled again, for any size
            some = inputs(batch)
            torch.testing.assert_close(compiled(*some), ranker(*some))


@pytest.mark.filterwarnings("ignore")
def test_exported_program_runs_after_loading(ranker, tmp_path):
    batch = torch.export.Dim("batch", min=2, max=1024)
    shapes = ({0: batch}, {0: batch}, {0: batch})
    with torch.no_grad():
        program = torch.export.export(ranker, inputs(4), dynamic_shapes=shapes)
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert [name for name in called if name.startswith("hps.")] == [
        "hps.embedding_bag.default",
        "hps.embedding.default",
    ]
    torch.export.save(program, tmp_path / "ranker.pt2")
    loaded = torch.export.load(tmp_path / "ranker.pt2").module()
    with torch.no_grad():
        for size in (2, 9):
            some = inputs(size)
            torch.testing.assert_close(loaded(*some), ranker(*some))


@pytest.mark.filterwarnings("ignore")
def test_exported_program_names_its_node(node, tmp_path):
    hps_torch.register_node("served", node)
    layer = hps_torch.Embedding("served", "m", "plain")
    program = torch.export.export(layer, (torch.arange(3),))
    hps_torch.unregister_node("served")
    with pytest.raises(NotFound, match="no node is registered as 'served'"):
        program.module()(torch.arange(3))


@pytest.mark.parametrize("table", ["plain", "pooled", "half"])
@pytest.mark.filterwarnings("ignore")
def test_operators_keep_the_rules_of_custom_operators(node, table):
    names = hps_torch.Embedding(node, "m", table)._table
    keys = torch.arange(6).reshape(2, 3)
    torch.library.opcheck(torch.ops.hps.embedding.default, (keys, 0.5, *names))
    bag = torch.ops.hps.embedding_bag.default
    torch.library.opcheck(bag, (keys, None, torch.rand(2, 3), False, "sum", None, *names))
    torch.library.opcheck(
        bag, (keys.reshape(-1), torch.tensor([0, 4]), None, False, "sqrtn", 0.5, *names)
    )
