"""`hps.torch.replace_embeddings`: a trained model computes the same from a node's tables."""

from __future__ import annotations

import pytest

from hps.errors import BadRequest, NotFound
from tests.support.pytorch import hps_torch, torch


class Trained(torch.nn.Module):
    def __init__(self, rows, **options):
        super().__init__()
        plain, pooled = (torch.from_numpy(rows[name]) for name in ("plain", "pooled"))
        self.emb = torch.nn.ModuleList([torch.nn.Embedding.from_pretrained(plain, padding_idx=0)])
        self.bag = torch.nn.EmbeddingBag.from_pretrained(
            pooled, mode="sum", include_last_offset=True, **options
        )
        self.linear = torch.nn.Linear(12, 1)

    def forward(self, users, tags, offsets):
        return self.linear(torch.cat([self.emb[0](users), self.bag(tags, offsets)], 1))


TABLES = {"emb.0": "plain", "bag": "pooled"}


def test_model_computes_the_same(node, rows):
    model = Trained(rows)
    some = torch.tensor([0, 7]), torch.tensor([3, 1, 4]), torch.tensor([0, 1, 3])
    expected = model(*some)
    hps_torch.replace_embeddings(model, node, "m", TABLES)
    assert isinstance(model.emb[0], hps_torch.Embedding)
    torch.testing.assert_close(model(*some), expected)
    assert [*model.state_dict()] == ["linear.weight", "linear.bias"]


def test_max_norm_is_kept_and_changes_no_row(node, rows):
    plain, pooled = (torch.from_numpy(rows[name].copy()) for name in ("plain", "pooled"))
    model = torch.nn.Module()
    model.emb = torch.nn.Embedding.from_pretrained(plain, max_norm=0.7)
    model.bag = torch.nn.EmbeddingBag.from_pretrained(pooled, mode="sum", max_norm=0.7)
    keys = torch.tensor([[3, 1], [4, 3]])
    with torch.no_grad():
        expected = model.emb(keys), model.bag(keys)
    hps_torch.replace_embeddings(model, node, "m", {"emb": "plain", "bag": "pooled"})
    for found, wanted in zip((model.emb(keys), model.bag(keys)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert model.emb(keys).norm(dim=-1).max() < 0.7001
    stored = node.lookup("m", {"plain": keys.reshape(-1).numpy()}, by_table=True)
    assert (stored.vectors["plain"] == rows["plain"][[3, 1, 4, 3]]).all()


@pytest.mark.parametrize(
    ("tables", "options", "error", "message"),
    [
        ({"emb.1": "plain"}, {}, NotFound, "no submodule 'emb.1'"),
        ({"emb.0": "plane"}, {}, NotFound, "did you mean 'plain'"),
        ({"linear": "plain"}, {}, BadRequest, "'linear' is a Linear"),
        ({"emb.0": "pooled"}, {}, BadRequest, "'emb.0' has dim 8, table 'm/pooled' has 4"),
        ({"bag": "pooled"}, {"max_norm": 1.0, "norm_type": 1.0}, BadRequest, "norm_type 1.0"),
        ({"bag": "pooled"}, {"padding_idx": 3}, BadRequest, "padding_idx"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_replaced_changes_nothing(node, rows, tables, options, error, message):
    model = Trained(rows, **options)
    with pytest.raises(error, match=message):
        hps_torch.replace_embeddings(model, node, "m", {"emb.0": "plain", **tables})
    assert type(model.emb[0]) is torch.nn.Embedding
