"""From a PyTorch ranking model to files that ``hps model import`` takes.

    python examples/pytorch/export.py OUT

Needs torch >= 2.9, onnx and onnxscript; nothing of hps. What matters is the cut: the embedding tables
stay out of the exported network, which takes their (pooled) vectors as inputs. The tables travel as
the ``state_dict``; hps reads it without PyTorch and without executing its pickle.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

USERS, ITEMS, DIM, NUMBERS = 1_000, 5_000, 16, 4


class Dense(nn.Module):
    """Everything behind the tables."""

    def __init__(self) -> None:
        super().__init__()
        width = 3 * DIM + NUMBERS
        self.layers = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(
        self, user: Tensor, item: Tensor, history: Tensor, numbers: Tensor
    ) -> tuple[Tensor, Tensor]:
        logit = self.layers(torch.cat([user, item, history, numbers], dim=1))
        return torch.sigmoid(logit), logit


class Ranker(nn.Module):
    """``item`` and ``history`` (the mean of the last items) share one table."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, DIM)
        self.items = nn.EmbeddingBag(ITEMS, DIM, mode="mean")
        self.dense = Dense()

    def forward(
        self, user: Tensor, item: Tensor, history: Tensor, starts: Tensor, numbers: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``user`` and ``item`` (n,), ``history`` with the ``starts (n,)`` of each sample's items."""
        vectors = self.users(user), self.items(item[:, None]), self.items(history, starts)
        click, logit = self.dense(*vectors, numbers)
        return click, logit


def export(model: Ranker, out: Path) -> None:
    model.eval()
    torch.save(model.state_dict(), out / "ranker.pt")
    # Two samples: with one, the exporter would take the batch for a constant.
    example = {name: torch.zeros(2, DIM) for name in ("user", "item", "history")}
    example["numbers"] = torch.zeros(2, NUMBERS)
    torch.onnx.export(
        model.dense,
        kwargs=example,
        f=out / "dense.onnx",
        input_names=list(example),
        output_names=["click", "logit"],
        dynamic_shapes={name: {0: "batch"} for name in example},
        dynamo=True,
        external_data=False,  # one file: hps takes no weights beside it
    )


def requests(model: Ranker) -> dict[str, object]:
    """A few samples and the model's own scores, to compare what hps answers."""
    user, item = torch.tensor([3, 999, 0]), torch.tensor([4_999, 7, 7])
    history, numbers = [[1, 2, 3], [4_000], [5, 5]], torch.rand(3, NUMBERS)
    flat = torch.tensor([key for keys in history for key in keys])
    with torch.no_grad():
        click, logit = model(user, item, flat, torch.tensor([0, 3, 4]), numbers)
    request = {"user": user, "item": item, "numbers": numbers}
    return {
        "request": {name: value.tolist() for name, value in request.items()} | {"history": history},
        "scores": {"click": click[:, 0].tolist(), "logit": logit[:, 0].tolist()},
    }


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    model = Ranker()  # yours comes from training
    export(model, out)
    (out / "requests.json").write_text(json.dumps(requests(model)))


if __name__ == "__main__":
    main()
