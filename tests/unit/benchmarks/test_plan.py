"""The GPU memory that the benchmark of `hps plan` states for FBGEMM."""

from __future__ import annotations

from benchmarks.plan import fbgemm_bytes


def test_sets_of_32_slots_and_a_number_for_each_row() -> None:
    slot = 16 * 4 + 8 + 8
    assert fbgemm_bytes(1000, 16, 0.1) == 128 * slot + 1000 * 4
    assert fbgemm_bytes(1024, 16, 1.0) == 1024 * slot + 1024 * 4
    assert fbgemm_bytes(64, 16, 0.5, element_bytes=2) == 32 * (16 * 2 + 16) + 64 * 4
