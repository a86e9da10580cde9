"""Hot keys of a running server: the default keys of load tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from hps.errors import ConfigError, HpsError, NotFound
from hps.tools.signature import ModelSignature
from hps.types import KeyArray, Source

if TYPE_CHECKING:
    from hps.client import Admin, Client

MOST = 10_000
"""Keys of each table; the admin port gives no more."""
_SAMPLE = 64
HotKeys = Callable[[str], Sequence[Mapping[str, Any]]]
"""The hot keys of a model's tables, as ``Admin.hot_keys`` has them. Raises HpsError."""


@dataclass(frozen=True, slots=True)
class HotKeyPools:
    """Keys of each feature, hottest first; ``why``: the reason if there are none."""

    keys: Mapping[str, KeyArray] = field(default_factory=dict)
    why: str = ""


def hot_pools(model: str, hot_keys: HotKeys) -> HotKeyPools:
    """Hot keys of ``model`` by feature: the table's keys without the feature's offset."""
    try:
        tables = hot_keys(model.removesuffix(".lookup"))
    except NotFound:
        return HotKeyPools(why="the server has no hot keys, as a front end")
    except HpsError as error:
        return HotKeyPools(why=str(error))
    pools: dict[str, KeyArray] = {}
    for table in tables:
        keys = np.array([key & (2**64 - 1) for key in table["keys"]], np.uint64)
        for feature, offset in table.get("features", {}).items():
            if len(keys):
                pools.setdefault(feature, (keys - np.uint64(offset % 2**64)).view(np.int64))
    return HotKeyPools(pools, "" if pools else "its caches hold none yet")


def require_same(admin: Admin, url: str) -> None:
    """Check that the guessed admin port belongs to the server at ``url``. Raises ConfigError."""
    urls = admin.status().get("server", {}).get("urls", {})
    if urlsplit(url).port not in {int(each.rpartition(":")[2]) for each in urls.values()}:
        raise ConfigError(f"{admin.url} is another server's admin port")


def guessed_admin(url: str) -> str:
    """The admin address of a server with default ports."""
    at = urlsplit(url)
    host = f"[{at.hostname}]" if ":" in (at.hostname or "") else at.hostname
    secured = at.scheme in ("https", "grpcs")
    return f"http{'s' if secured else ''}://{host}:8002"


def sources_of(
    client: Client, model: str, requests: Sequence[Mapping[str, Any]]
) -> dict[str, float] | None:
    """Share of keys that each tier answers, from a sample of ``requests``; ``default``: keys without a row.

    None if the server does not report sources."""
    try:
        described = client.metadata(model)
        if any(tensor["name"] == "NUMKEYS" for tensor in described["inputs"]):
            described = client.metadata(f"{model}.lookup")
        # gRPC has no place for parameters of a model.
        outputs = described.get("parameters", {}).get("source_outputs")
        wanted = outputs or [
            f"{name}.source" for name in ModelSignature.of_metadata(described).features
        ]
        answers = [client.infer(model, dict(each), outputs=wanted) for each in requests[:_SAMPLE]]
    except HpsError:
        return None
    codes = [answer.outputs[name].reshape(-1) for answer in answers for name in wanted]
    return shares(np.bincount(np.concatenate(codes)))


def shares(counts: NDArray[np.integer[Any]]) -> dict[str, float]:
    """Share of the keys from each `Source` that answered any, by its name."""
    total = max(1, int(counts.sum()))
    return {Source(code).name.lower(): n / total for code, n in enumerate(counts.tolist()) if n}
