"""Settings of dynamic batching and admission."""

from __future__ import annotations

from pydantic import Field

from hps.config.model_schema import StrictModel


class BatchingSettings(StrictModel):
    """Dynamic batching of requests that wait at the same time; see docs/overload.md."""

    max_rows: int = Field(1024, ge=1)
    """Largest number of samples per batch, within the model's `max_batch_size`."""
    max_keys: int = Field(1_000_000, ge=1)
    """Largest number of keys per batch."""
    max_delay_us: float = Field(0.0, ge=0, le=1e6)
    """Time for which a request waits for others; 0: a batch is formed of the requests that are queued."""
    at_once: int = Field(2, ge=1)
    """Batches of a model that run in parallel; further requests wait and form the next batch."""


class ClientSettings(StrictModel):
    """Limits of one client, identified by its API key or else its address; they apply per worker."""

    running: int | None = Field(None, ge=1)
    """Concurrent requests, including queued ones; more get 429. null: no limit."""
    per_second: float | None = Field(None, gt=0)
    """Average requests per second; more get 429. null: no limit."""
    burst: float | None = Field(None, ge=1)
    """Requests that it may send in a burst after a pause; null: those of one second."""


class AdmissionSettings(StrictModel):
    """Limits on running and queued inference requests; see docs/overload.md."""

    running: int | None = Field(None, ge=1)
    """Concurrent requests per model; null: one per thread, on a GPU 32, with `server.batching` 64."""
    queue: int = Field(1024, ge=0)
    """Queued requests per model in addition to those; more get 503."""
    queue_bytes: int = Field(256 << 20, ge=1 << 20)
    """Largest total size in bytes of queued requests and of those being received; more get 503."""
    max_wait_ms: float = Field(1_000.0, gt=0)
    """Longest wait; requests that would wait longer get 503. In an overload less: see docs/overload.md."""
    client: ClientSettings = ClientSettings()
    """Limits of each client."""
