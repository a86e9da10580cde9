"""Short scheduler slices of workers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from services.frontend.workers.scheduler_slice import SLICE_NS, request_short_slices, slice_ns


def test_thread_and_its_children_get_short_slices():
    if not slice_ns():
        pytest.skip("this kernel knows no slices of a thread's own")

    def slices() -> tuple[int, int]:
        request_short_slices()
        with ThreadPoolExecutor(1) as child:
            return slice_ns(), child.submit(slice_ns).result()

    before = slice_ns()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(slices).result() == (SLICE_NS, SLICE_NS)
    assert slice_ns() == before


def test_request_is_ignored_if_the_kernel_does_not_support_it(monkeypatch):
    monkeypatch.setattr("services.frontend.workers.scheduler_slice._NUMBERS", {})
    assert slice_ns() == 0
    request_short_slices()
