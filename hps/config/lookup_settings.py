"""Settings of remote lookups: processes whose lookups other nodes answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from hps.config.checks import ConfigFinding, is_address
from hps.config.model_schema import StrictModel
from hps.config.server_settings import ClientTlsSettings


class LookupTlsSettings(ClientTlsSettings):
    """TLS of the connections to lookup nodes."""


class EjectionSettings(StrictModel):
    """Outlier ejection: nodes that fail get no lookups for a while."""

    failures: int = Field(5, ge=1, le=10)
    """Failures among a node's last ten lookups after which it is ejected; at most half of the nodes are."""
    base_s: float = Field(1.0, gt=0)
    """Duration of the first ejection; it doubles each time the node fails again."""
    most_s: float = Field(30.0, gt=0)
    """Longest duration of an ejection."""


class LookupSettings(StrictModel):
    """The nodes that answer the lookups of front ends (`server.role: frontend`, `hps.connect`)."""

    nodes: list[str] = []
    """`host:port` of each node's gRPC port; `dns:///name:port`: every address of the name is a node."""
    resolve_s: float = Field(5.0, gt=0)
    """Seconds between DNS queries for the names of `dns:///`."""
    tls: LookupTlsSettings | None = None
    """TLS certificates; null: plain text."""
    api_key_file: Path | None = None
    """File with the API key for the nodes, role read; read again when it changes."""
    in_flight: int = Field(1024, ge=1)
    """Concurrent lookups per model; more get 503."""
    retries: int = Field(2, ge=0, le=10)
    """Number of other nodes to which a failed lookup is sent."""
    timeout_ms: float = Field(1_000.0, gt=0)
    """Timeout of a lookup without a deadline."""
    attempt_ms: float = Field(1_000.0, gt=0)
    """Timeout of one node, after which another is tried; at most half of the remaining time."""
    ejection: EjectionSettings = EjectionSettings()
    """Outlier ejection of nodes that fail."""

    def violations(self) -> Iterator[ConfigFinding]:
        for i, node in enumerate(self.nodes):
            if not is_address(node.removeprefix("dns:///")):
                message = f"expected host:port or dns:///name:port, found {node!r}"
                yield ConfigFinding(("nodes", i), message)
