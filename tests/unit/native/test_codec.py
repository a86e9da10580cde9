"""The update message codec, compiled and twin: equal results for any bytes; wrong arrays are rejected."""

import struct
import sys
import threading
import time
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hps import native
from hps.native import _core, twin_codec
from hps.native.twin_codec import HEADER, MESSAGE, Reason

MODULES = [pytest.param(twin_codec, id="twin"), pytest.param(native, id="native")]
NO_BYTES = np.zeros(0, np.uint8)


def seal(message):
    """Set the message's length and checksum, so that the decoder checks the fields behind them."""
    message = bytearray(message)
    struct.pack_into("<I", message, 12, len(message))
    struct.pack_into("<I", message, 8, zlib.crc32(message[:8] + message[12:]))
    return bytes(message)


LARGE = seal(
    HEADER.pack(b"HPSU", 1, 0, 64, 0, 0, 1000, 0, 256, 0, 0, 8, 0, 0, 0, 0, 0)
    + b"m/tables"
    + bytes(1000 * (16 + 1024))
)


def mostly(*usual):
    """A strategy that draws one of the usual values most of the time."""
    return st.sampled_from([*usual * 8, 4, 127, 255])


@st.composite
def native_messages(draw):
    """Headers and columns that are often valid, and rarely wrong in more than one field."""
    up, down, dim = draw(mostly(0, 1, 3)), draw(mostly(0, 2)), draw(mostly(1, 2, 5))
    dtype, name = (
        draw(mostly(0, 0, 1)),
        draw(st.sampled_from([b"m/t", b"m/other_tab", b"n/t", b"\xe4"])),
    )
    padded = name + bytes(-len(name) % 8)
    size = (
        16 * (up + down) + up * dim * (2 if dtype == 1 else 4) + draw(st.sampled_from([0, 0, 0, 8]))
    )
    columns = draw(st.binary(min_size=min(size, 64), max_size=64)).ljust(size, b"\7")[:size]
    fixed = (b"HPSU", draw(mostly(1)), draw(mostly(0, 0, 1)), draw(mostly(64)))
    counts = (up, down, dim, dtype, draw(st.sampled_from([0, 0, 0, 0, 0, 1])), len(name))
    head = HEADER.pack(
        *fixed,
        0,
        0,
        *counts,
        draw(st.sampled_from([0, 5, 2**44 - 1] * 4 + [-1, 2**44, 2**63 - 1])),
        9,
        0,
        8,
        7,
    )
    message = seal(head + padded + columns)
    cut = draw(st.sampled_from([None] * 12 + [5, 30, 64, 70, -1]))
    return message[:cut]


@st.composite
def hps_messages(draw):
    rows = draw(st.binary(max_size=60))
    size = draw(st.sampled_from([4, 8, 8, 8, 0]))
    whole = draw(st.sampled_from([12, 16, 16, 1]))
    return b"HCTR" + struct.pack("<I", size) + rows[: len(rows) // whole * whole]


PAYLOADS = st.lists(
    st.none() | st.binary(max_size=150) | hps_messages() | native_messages(), max_size=8
)


def outcome(call, *arguments):
    """A decoder's result in values that compare: arrays as dtype, shape and bytes."""

    def plain(value):
        if isinstance(value, np.ndarray):
            return value.dtype, value.shape, value.tobytes()
        return [plain(each) for each in value] if isinstance(value, list | tuple) else value

    return plain(call(*arguments))


@given(PAYLOADS, st.sampled_from([4, 8]), st.sampled_from([4, 8]), st.sampled_from([40, 10_000]))
def test_decode_hps_equals_its_twin_for_any_bytes(payloads, key_bytes, row_bytes, longest):
    m = len(payloads)
    keyed, stamps = np.arange(m) % 5 == 4, np.arange(m).astype(np.uint64) + np.uint64(2**63)
    rest = (keyed.astype(np.uint8), stamps, key_bytes, row_bytes, longest)
    compiled = outcome(native.decode_hps, payloads, *rest)
    assert compiled == outcome(twin_codec.decode_hps, payloads, *rest)


@given(PAYLOADS, st.sampled_from([120, 10_000]))
def test_decode_native_equals_its_twin_for_any_bytes(payloads, longest):
    compiled = outcome(native.decode_native, payloads, longest)
    assert compiled == outcome(twin_codec.decode_native, payloads, longest)


@given(st.lists(native_messages(), min_size=1, max_size=5))
def test_faulty_native_messages_contribute_to_no_group(payloads):
    records, groups = native.decode_native(payloads, 10_000)
    messages = records.view(MESSAGE)
    assert ((messages["reason"] == Reason.OK) == (messages["group"] >= 0)).all()
    for number, group in enumerate(groups):
        own = messages[messages["group"] == number]
        assert len(own)
        assert [len(group[3]), len(group[6])] == [own["upserts"].sum(), own["deletes"].sum()]


def test_generated_native_messages_are_partly_valid():
    """Otherwise the tests above would compare nothing but rejections."""
    accepted = []

    @settings(max_examples=500, derandomize=True)  # the share of a few varies
    @given(native_messages())
    def collect(message):
        accepted.append(native.decode_native([message], 10_000)[0].view(MESSAGE)["reason"][0] == 0)

    collect()
    assert 0.1 < np.mean(accepted) < 0.95


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
    st.sampled_from([4, 8]),
    st.sampled_from([1, 4, 64, 128, 512]),
    st.integers(1, 7),
)
def test_encode_hps_equals_its_twin_and_decodes_to_the_same_rows(
    numbers, key_bytes, row_bytes, rows
):
    keys = np.array(numbers, np.int64)
    vectors = np.arange(len(keys) * row_bytes).astype(np.uint8)
    messages = native.encode_hps(keys, vectors, key_bytes, row_bytes, rows)
    assert messages == twin_codec.encode_hps(keys, vectors, key_bytes, row_bytes, rows)
    m = len(messages)
    nothing = np.zeros(m, np.uint8), np.zeros(m, np.uint64)
    _, back, _, rows_back = native.decode_hps(messages, *nothing, key_bytes, row_bytes, 2**20)
    np.testing.assert_array_equal(back, keys if key_bytes == 8 else keys & 0xFFFFFFFF)
    np.testing.assert_array_equal(rows_back, vectors)


@given(st.binary(max_size=400), st.integers(0, 2**32 - 1), st.integers(0, 20))
def test_crc32_equals_zlib(data, start, skip):
    array = np.frombuffer(data, np.uint8)[skip:]
    assert native.crc32(array, start) == zlib.crc32(data[skip:], start)
    assert twin_codec.crc32(array, start) == zlib.crc32(data[skip:], start)


def test_decode_hps_equals_its_twin_for_a_batch_that_releases_the_gil():
    random = np.random.default_rng(1)
    keys = random.integers(-(2**63), 2**63 - 1, 20_000)
    vectors = random.integers(0, 256, 20_000 * 20).astype(np.uint8)
    messages = native.encode_hps(keys, vectors, 8, 20, 300)
    m = len(messages)
    stamps = np.arange(m).astype(np.uint64)
    rest = (messages, np.zeros(m, np.uint8), stamps, 8, 20, 2**20)
    assert outcome(native.decode_hps, *rest) == outcome(twin_codec.decode_hps, *rest)


def decode_hps_with(module, messages=(b"",), keyed=1, stamps=1, **changed):
    """Call ``decode_hps`` with valid arguments, except those passed; an integer is an array's length."""
    keyed = np.zeros(keyed, np.uint8) if isinstance(keyed, int) else keyed
    sizes = {"key_bytes": 8, "row_bytes": 4, "longest": 99} | changed
    return module.decode_hps(messages, keyed, np.zeros(stamps, np.uint64), *sizes.values())


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    "wrong",
    [
        {"keyed": 2},
        {"stamps": 0},
        {"key_bytes": 5},
        {"row_bytes": 0},
        {"row_bytes": 2**32},
        {"longest": 2**32},
    ],
)
def test_decode_hps_rejects_arguments_that_do_not_fit(module, wrong):
    with pytest.raises(ValueError, match="must"):
        decode_hps_with(module, **wrong)


@pytest.mark.parametrize("module", MODULES)
def test_decoders_reject_messages_other_than_bytes_and_none(module):
    for messages in (["text"], [bytearray(3)], [3]):
        with pytest.raises(TypeError, match="messages must be bytes or None"):
            decode_hps_with(module, messages)
        with pytest.raises(TypeError, match="messages must be bytes or None"):
            module.decode_native(messages, 99)
    with pytest.raises(ValueError, match="max_bytes"):
        module.decode_native([], 2**32)


@pytest.mark.parametrize("module", MODULES)
def test_encode_hps_rejects_invalid_arguments(module):
    keys = np.zeros(2, np.int64)
    for wrong in ((NO_BYTES, 8, 4, 1), (np.zeros(8, np.uint8), 8, 4, 0)):
        with pytest.raises(ValueError, match="must"):
            module.encode_hps(keys, *wrong)


def test_compiled_codec_rejects_other_dtypes_dimensions_and_strides():
    for keyed in (np.zeros(1, np.int64), np.zeros((1, 1), np.uint8), np.zeros(3, np.uint8)[::2]):
        with pytest.raises(TypeError):
            decode_hps_with(native, [b""] * len(keyed), keyed=keyed, stamps=len(keyed))
    with pytest.raises(TypeError):
        native.encode_hps(np.zeros(1, np.int32), np.zeros(4, np.uint8), 8, 4, 1)


@pytest.mark.parametrize("function", ["decode_hps", "encode_hps", "decode_native"])
def test_codec_releases_the_gil_for_a_large_batch(function):
    """With a switch interval of 60 s, another thread runs only if the call releases the GIL."""
    keys, vectors = np.arange(50_000), np.zeros(50_000 * 256, np.uint8)
    messages = _core.encode_hps(keys, vectors, 8, 256, 1000)
    marks = np.zeros(len(messages), np.uint8), np.zeros(len(messages), np.uint64)
    calls = {
        "decode_hps": lambda: _core.decode_hps(messages, *marks, 8, 256, 2**30),
        "encode_hps": lambda: _core.encode_hps(keys, vectors, 8, 256, 1000),
        "decode_native": lambda: _core.decode_native([LARGE] * 20, 2**30),
    }
    ran, stop = [0], threading.Event()

    def run():
        while not stop.is_set():
            ran[0] += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    other = threading.Thread(target=run)
    other.start()
    try:
        for _ in range(200):
            before = ran[0]
            calls[function]()
            if ran[0] != before:
                return
        pytest.fail("the GIL was never released")
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        other.join()
