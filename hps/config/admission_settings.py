"""Settings of batching and admission: what becomes of requests that come at the same time."""

from __future__ import annotations

from pydantic import Field

from hps.config.model_schema import StrictModel


class BatchingSettings(StrictModel):
    """Requests that wait at the same time, answered as one; see docs/overload.md."""

    max_rows: int = Field(1024, ge=1)
    """Most samples of a batch, a model's `max_batch_size` permitting."""
    max_keys: int = Field(1_000_000, ge=1)
    """Most keys of a batch."""
    max_delay_us: float = Field(0.0, ge=0, le=1e6)
    """How long a request waits for others to come; 0: batches are made of what waits already."""
    at_once: int = Field(2, ge=1)
    """Batches of a model under way at a time; more requests wait and are the next batch."""


class ClientSettings(StrictModel):
    """What one client may ask, known by its API key or else by its address; of each worker as much."""

    running: int | None = Field(None, ge=1)
    """Requests at a time, waiting ones included; more get 429. null: any number."""
    per_second: float | None = Field(None, gt=0)
    """Requests a second, in the long run; more get 429. null: any number."""
    burst: float | None = Field(None, ge=1)
    """Requests it may send at once after a pause; null: those of one second."""


class AdmissionSettings(StrictModel):
    """How many inference requests are worked at, and how many wait; see docs/overload.md."""

    running: int | None = Field(None, ge=1)
    """Requests to a model under way at a time; null: one for each thread, with `server.batching` 64."""
    queue: int = Field(1024, ge=0)
    """Requests to a model that may wait beyond those; more get 503."""
    queue_bytes: int = Field(256 << 20, ge=1 << 20)
    """Most bytes of waiting requests, and of those whose bodies are still coming; more get 503."""
    max_wait_ms: float = Field(1_000.0, gt=0)
    """Longest wait; who would wait longer gets 503 at once. In an overload less: see docs/overload.md."""
    client: ClientSettings = ClientSettings()
    """Bounds of each client."""
