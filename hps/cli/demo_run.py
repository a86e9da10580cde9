"""The demo's requests to its server, and the checks of the answers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from hps.cli.demo_data import DemoData
from hps.client import Admin, Client
from hps.types import Source

TOLERANCE = 1e-5
BATCH = 64
ROUNDS = 2
TIMED_REQUESTS = 200
SETTLE_S = 2.0
CANDIDATES, TOP_K = 20, 3


@dataclass(slots=True)
class DemoResults:
    """Results of the demo.

    ``rounds[i]``: keys by the tier that had the row, in the i-th pass over the requests.
    ``difference``: the largest one to the trainer's scores. ``checks``: outcomes by name."""

    scores: dict[str, NDArray[Any]] = field(default_factory=dict)
    sources: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    rounds: list[dict[str, int]] = field(default_factory=list)
    difference: float = 0.0
    milliseconds: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    checks: dict[str, bool] = field(default_factory=dict)
    best: list[tuple[int, float]] = field(default_factory=list)
    """The ranking: candidates and their scores, best first."""
    sample: dict[str, Any] = field(default_factory=dict)
    """The JSON body of one request, to try by hand."""

    @property
    def ok(self) -> bool:
        return all(self.checks.values())


def ask(data: DemoData, http: str, admin: str) -> DemoResults:
    """Send every request twice, in batches, then one by one for the time; compare all scores."""
    found = DemoResults()
    with Client(http) as client, Admin(admin) as operator:
        for _ in range(ROUNDS):
            scores, sources = _round(client, data)
            found.rounds.append(_by_tier(sources))
            found.difference = max(found.difference, _difference(scores, data))
            if not found.scores:
                found.scores, found.sources = scores, sources
            _settle(operator)
        found.milliseconds = _time(client, data)
        found.sample = json_request(data.tensors(slice(0, 1)))
        reply = operator.ask(f"/v2/models/{data.model}/infer", found.sample)
        as_json = {out["name"]: np.array(out["data"], np.float32) for out in reply["outputs"]}
        known = found.rounds[0].get("default", 0)
        ranked = _rank(client, data, found)
        found.checks = {
            f"all {data.samples} scores equal the trainer's to {TOLERANCE:g}": (
                found.difference <= TOLERANCE
            ),
            "every key was found in a table": known == 0,
            "JSON gives the same score as the binary form": all(
                np.allclose(as_json[name], found.scores[name][:1], rtol=0, atol=1e-6)
                for name in data.scores
            ),
            "an unknown key gets the default and is counted": _unknown_is_counted(client, data),
            f"the best {TOP_K} of {CANDIDATES} candidates are the highest scores": ranked,
        }
    return found


def _round(
    client: Client, data: DemoData
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[np.uint8]]]:
    wanted = [*data.scores, *(f"{name}.source" for name in data.keys)]
    parts = [client.infer(data.model, t, outputs=wanted).outputs for _, t in data.batches(BATCH)]
    whole = {name: np.concatenate([part[name].reshape(-1) for part in parts]) for name in wanted}
    scores = {name: whole[name] for name in data.scores}
    return scores, {name: whole[f"{name}.source"] for name in data.keys}


def _by_tier(sources: dict[str, NDArray[np.uint8]]) -> dict[str, int]:
    codes = np.bincount(np.concatenate(list(sources.values())), minlength=len(Source))
    return {s.name.lower(): int(codes[s]) for s in Source if codes[s]}


def _difference(scores: dict[str, NDArray[Any]], data: DemoData) -> float:
    return max(float(np.abs(scores[name] - want).max()) for name, want in data.scores.items())


def _settle(operator: Admin) -> None:
    """Wait until the rows just read have been promoted into the cache."""
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end and operator.status().get("promotions_waiting_keys"):
        time.sleep(0.01)


def _time(client: Client, data: DemoData) -> NDArray[np.float64]:
    took = []
    for i in range(TIMED_REQUESTS):
        tensors = data.tensors(slice(i % data.samples, i % data.samples + 1))
        start = time.perf_counter()
        client.infer(data.model, tensors)
        took.append(1000 * (time.perf_counter() - start))
    return np.array(took)


def _rank(client: Client, data: DemoData, found: DemoResults) -> bool:
    """Send context features once and the others ``CANDIDATES`` times; check the ranking of ``top_k``."""
    context = client.metadata(data.model).get("parameters", {}).get("context", [])
    tensors = data.tensors(slice(0, CANDIDATES))
    tensors |= {name: array[:1] for name, array in tensors.items() if name in context}
    every = client.infer(data.model, tensors).outputs
    best = client.infer(data.model, tensors, parameters={"top_k": TOP_K}).outputs
    output = next(iter(data.scores))
    positions, scores = best["top_k_index"].reshape(-1), best[output].reshape(-1)
    found.best = [(int(p), float(s)) for p, s in zip(positions, scores, strict=True)]
    highest = np.sort(every[output].reshape(-1))[::-1][:TOP_K]
    of_these = every[output].reshape(-1)[positions]
    return bool(
        np.allclose(scores, highest, rtol=0, atol=1e-6) and np.array_equal(scores, of_these)
    )


def _unknown_is_counted(client: Client, data: DemoData) -> bool:
    """Check that an unknown key, the smallest int64, gets the default and is counted."""
    tensors = dict(data.tensors(slice(0, 1)))
    name = next(iter(data.keys))
    tensors[name] = np.full_like(tensors[name], -(2**63))
    return client.infer(data.model, tensors).defaulted == tensors[name].size


def json_request(tensors: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Build a JSON request of the Open Inference Protocol."""
    inputs = []
    for name, array in tensors.items():
        datatype = "INT64" if array.dtype == np.int64 else "FP32"
        # orjson writes a float32 with the fewest digits that identify it.
        text = orjson.dumps(np.ascontiguousarray(array), option=orjson.OPT_SERIALIZE_NUMPY)
        shape, data = list(array.shape), orjson.loads(text)
        inputs.append({"name": name, "shape": shape, "datatype": datatype, "data": data})
    return {"inputs": inputs}
