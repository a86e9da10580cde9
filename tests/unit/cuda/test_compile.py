"""Every kernel compiles with NVRTC for every supported architecture; no GPU is needed for that."""

import importlib.metadata
from types import SimpleNamespace

import pytest

from benchmarks import gpu_gather, gpu_rows
from hps.cuda import launch, loader
from hps.errors import GpuUnavailable
from hps.row_format import ROW_FORMAT_NAMES

EXPRESSIONS = {
    "fetch.cu": [
        name
        for tile, unit, units in [
            *((2, 16, units) for units in (0, 2, 4, 8)),
            *((4, 16, units) for units in (0, 2, 4, 8, 16, 32)),
            *((tile, 4, units) for tile in (2, 4) for units in (0, 9, 17, 33)),
            *((tile, unit, 0) for tile in (2, 4) for unit in (2, 1)),
        ]
        for form in (launch.ROWS, launch.TIER, launch.NUMBERS, launch.VECTORS)
        if unit == 16 or form != launch.NUMBERS
        for stamp, sweep in [(True, form != launch.NUMBERS), (False, False)]
        for name in (
            launch.fetch_name(tile, unit, units, form, stamp=stamp, sweep=sweep),
            launch.sweep_name(tile, unit, units),
        )
    ]
    + ["count_kernel"],
    "write.cu": [
        *("dedup_kernel", "compact_kernel", "evict_kernel", "leave_kernel"),
        *(
            launch.write_name(unit, update=update, scored=scored)
            for unit in (16, 4, 2, 1)
            for update in (True, False)
            for scored in (True, False)
        ),
    ],
    "pool.cu": [
        f"{name}<{tile}, {unit}>"
        for name in ("pool_kernel", "pool_rows_kernel")
        for tile in (4, 8, 16, 32)
        for unit in (4, 1)
    ],
    "pool_warp.cu": [
        kernel
        for code in range(len(ROW_FORMAT_NAMES))
        for dim in (16, 32, 64, 128)
        for kernel in (
            f"decode_warp_kernel<{code}, {dim}>",
            *(
                f"pool_warp_kernel<{code}, {dim}, {8 if code == 5 else 4}, {weighted}>"
                for weighted in ("false", "true")
            ),
        )
    ],
    "partition.cu": ["partition_kernel"],
    "scatter.cu": [
        f"{name}<{tile}, {unit}>"
        for name in ("scatter_kernel", "place_kernel")
        for tile in (4, 8, 32)
        for unit in (16, 4, 2, 1)
    ],
    "scored_table.cu": [
        f"{name}<{unit}>"
        for name in ("scored_find_kernel", "scored_split_kernel")
        for unit in (16, 4, 2, 1)
    ],
    "scored_write.cu": [
        "scored_link_kernel",
        *(
            f"scored_write_kernel<{unit}, {tile}, {code}, {on_host}>"
            for unit, codes in ((16, range(9)), *((unit, (0, 7, 8)) for unit in (4, 2, 1)))
            for code in codes
            for tile, on_host in ((8, "false"), (2, "true"))
        ),
    ],
    "scan.cu": [
        *("clear_kernel", "export_kernel"),
        *(f"gather_kernel<{threads}, {unit}>" for threads in (2, 4, 8) for unit in (16, 4, 2, 1)),
    ],
}


def options_for(architecture, *defines):
    return [*loader.options(), f"-arch=sm_{architecture}", *(f"-D{each}" for each in defines)]


@pytest.mark.parametrize("architecture", loader.ARCHITECTURES)
@pytest.mark.parametrize("file", EXPRESSIONS)
def test_every_kernel_compiles_with_nvrtc(nvrtc, file, architecture):
    code = nvrtc.compile(loader.FOLDER / file, options_for(architecture), EXPRESSIONS[file])
    for expression in EXPRESSIONS[file]:
        assert expression.partition("<")[0].encode() in code


@pytest.mark.parametrize("architecture", loader.ARCHITECTURES)
def test_the_race_tests_build_compiles(nvrtc, architecture):
    """Fetches that wait between slot and row, of each form."""
    names = [
        launch.fetch_name(4, 16, 0, form, stamp=True, sweep=False)
        for form in (launch.ROWS, launch.TIER, launch.NUMBERS, launch.VECTORS)
    ]
    options = options_for(architecture, "HPS_SLOW_READS=500000")
    nvrtc.compile(loader.FOLDER / "fetch.cu", options, [*names, launch.sweep_name(4, 16, 0)])


def test_older_architectures_do_not_compile(nvrtc):
    """The least one that the loader accepts is the least one that there is machine code for."""
    older = min(loader.ARCHITECTURES) - 5
    name = launch.fetch_name(4, 16, 32, launch.ROWS, stamp=True, sweep=False)
    with pytest.raises(RuntimeError, match="sm_80"):
        nvrtc.compile(loader.FOLDER / "fetch.cu", options_for(older), [name])


@pytest.mark.parametrize("capability", ["70", "75"])
def test_device_older_than_the_kernels_is_refused_by_name(monkeypatch, capability):
    twin = SimpleNamespace(
        cuda=SimpleNamespace(Device=lambda _: SimpleNamespace(compute_capability=capability))
    )
    monkeypatch.setattr(loader, "cupy", lambda: twin)
    text = rf"GPU 2 has compute capability {capability[0]}\.{capability[1]}.* need 8\.0"
    with pytest.raises(GpuUnavailable, match=text):
        loader.check_architecture(2)
    with pytest.raises(GpuUnavailable, match=text):
        loader._kernel(2, "count_kernel", ())


@pytest.mark.parametrize("capability", ["80", "86", "90", "100", "120"])
def test_newer_devices_are_accepted(monkeypatch, capability):
    twin = SimpleNamespace(
        cuda=SimpleNamespace(Device=lambda _: SimpleNamespace(compute_capability=capability))
    )
    monkeypatch.setattr(loader, "cupy", lambda: twin)
    loader.check_architecture(0)


def test_compile_error_names_the_faulty_kernel(nvrtc, tmp_path):
    (tmp_path / "wrong.cu").write_text("__global__ void wrong() { return 1; }")
    with pytest.raises(RuntimeError, match="wrong"):
        nvrtc.compile(tmp_path / "wrong.cu", ["-arch=sm_90"], ["wrong"])


def test_files_table_lists_every_compiled_kernel():
    assert sorted(loader.FILES) == sorted(
        {name.partition("<")[0] for names in EXPRESSIONS.values() for name in names}
    )
    for name, file in loader.FILES.items():
        assert f"{name}(const __grid_constant__" in (loader.FOLDER / file).read_text()


def test_compiler_options_include_the_source_digest():
    assert f"-DHPS_SOURCES=0x{loader.digest()}" in loader.options()
    assert len(loader.digest()) == 16


def test_kernel_table_names_every_cu_file():
    installed = importlib.metadata.distribution("hps-server")
    assert installed is not None
    assert {file.name for file in loader.FOLDER.glob("*.cu")} == set(loader.FILES.values())


def test_the_benchmarks_decoding_gathers_compile(nvrtc):
    names = [
        f"decode<{code}, {dim}, {rows}, {block}>"
        for code in range(len(ROW_FORMAT_NAMES))
        for dim in gpu_rows.DIMS
        for rows, block in gpu_rows.SHAPES
    ]
    nvrtc.compile(gpu_rows.SOURCE, options_for(90), names)


def test_the_benchmarks_gathers_compile(nvrtc):
    for units in (2, 8, 16, 32):
        shapes = list(gpu_gather.shapes(units))
        every = [*shapes, *gpu_gather.policies(shapes[-1])]
        names = [gather.expression(units) for gather in every]
        nvrtc.compile(gpu_gather.SOURCE, [*gpu_gather.OPTIONS, "-arch=sm_90"], names)
        assert all(gather.rows * units // gather.threads <= 8 for gather in every)
