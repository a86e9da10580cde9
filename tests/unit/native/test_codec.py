"""The message decoders, compiled and twin: equal for any bytes, and refusing arrays that don't fit."""

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
    """With its own length and checksum, so that what stands behind them is looked at."""
    message = bytearray(message)
    struct.pack_into("<I", message, 12, len(message))
    struct.pack_into("<I", message, 8, zlib.crc32(message[:8] + message[12:]))
    return bytes(message)


LARGE = seal(
    HEADER.pack(b"HPSU", 1, 0, 64, 0, 0, 1000, 0, 256, 0, 0, 8, 0, 0, 0, 0, 0)
    + b"m/tables"
    + bytes(1000 * (16 + 1024))
)


def some(*usual):
    """Mostly a usual value."""
    return st.sampled_from([*usual * 8, 4, 127, 255])


@st.composite
def native_messages(draw):
    """Headers and columns that are often right, and rarely wrong in more than one place."""
    up, down, dim = draw(some(0, 1, 3)), draw(some(0, 2)), draw(some(1, 2, 5))
    dtype, name = (
        draw(some(0, 0, 1)),
        draw(st.sampled_from([b"m/t", b"m/other_tab", b"n/t", b"\xe4"])),
    )
    padded = name + bytes(-len(name) % 8)
    size = (
        16 * (up + down) + up * dim * (2 if dtype == 1 else 4) + draw(st.sampled_from([0, 0, 0, 8]))
    )
    columns = draw(st.binary(min_size=min(size, 64), max_size=64)).ljust(size, b"\7")[:size]
    fixed = (b"HPSU", draw(some(1)), draw(some(0, 0, 1)), draw(some(64)))
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
    """What a decoder returns, in terms that compare: arrays with their dtype and bytes."""

    def plain(value):
        if isinstance(value, np.ndarray):
            return value.dtype, value.shape, value.tobytes()
        return [plain(each) for each in value] if isinstance(value, list | tuple) else value

    return plain(call(*arguments))


@given(PAYLOADS, st.sampled_from([4, 8]), st.sampled_from([4, 8]), st.sampled_from([40, 10_000]))
def test_any_bytes_decode_alike_as_hps_messages(payloads, key_bytes, row_bytes, longest):
    m = len(payloads)
    keyed, stamps = np.arange(m) % 5 == 4, np.arange(m).astype(np.uint64) + np.uint64(2**63)
    rest = (keyed.astype(np.uint8), stamps, key_bytes, row_bytes, longest)
    mine = outcome(native.decode_hps, payloads, *rest)
    assert mine == outcome(twin_codec.decode_hps, payloads, *rest)


@given(PAYLOADS, st.sampled_from([120, 10_000]))
def test_any_bytes_decode_alike_as_native_messages(payloads, longest):
    mine = outcome(native.decode_native, payloads, longest)
    assert mine == outcome(twin_codec.decode_native, payloads, longest)


@given(st.lists(native_messages(), min_size=1, max_size=5))
def test_nothing_is_taken_of_a_message_with_a_fault(payloads):
    found, groups = native.decode_native(payloads, 10_000)
    messages = found.view(MESSAGE)
    assert ((messages["reason"] == Reason.OK) == (messages["group"] >= 0)).all()
    for number, group in enumerate(groups):
        own = messages[messages["group"] == number]
        assert len(own)
        assert [len(group[3]), len(group[6])] == [own["upserts"].sum(), own["deletes"].sum()]


def test_the_generated_messages_are_not_all_refused():
    """Or the tests above would compare refusals only."""
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
def test_hps_messages_are_encoded_alike_and_come_back(numbers, key_bytes, row_bytes, rows):
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
def test_the_checksum_is_zlibs(data, start, skip):
    array = np.frombuffer(data, np.uint8)[skip:]
    assert native.crc32(array, start) == zlib.crc32(data[skip:], start)
    assert twin_codec.crc32(array, start) == zlib.crc32(data[skip:], start)


def test_a_large_batch_decodes_alike():
    """Large enough for the GIL to be released."""
    random = np.random.default_rng(1)
    keys = random.integers(-(2**63), 2**63 - 1, 20_000)
    vectors = random.integers(0, 256, 20_000 * 20).astype(np.uint8)
    messages = native.encode_hps(keys, vectors, 8, 20, 300)
    m = len(messages)
    stamps = np.arange(m).astype(np.uint64)
    rest = (messages, np.zeros(m, np.uint8), stamps, 8, 20, 2**20)
    assert outcome(native.decode_hps, *rest) == outcome(twin_codec.decode_hps, *rest)


def hps(module, messages=(b"",), keyed=1, stamps=1, key_bytes=8, row_bytes=4, longest=99):
    keyed = np.zeros(keyed, np.uint8) if isinstance(keyed, int) else keyed
    return module.decode_hps(
        messages, keyed, np.zeros(stamps, np.uint64), key_bytes, row_bytes, longest
    )


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
def test_arguments_that_do_not_fit_are_refused(module, wrong):
    with pytest.raises(ValueError, match="must"):
        hps(module, **wrong)


@pytest.mark.parametrize("module", MODULES)
def test_messages_are_bytes_or_none(module):
    for messages in (["text"], [bytearray(3)], [3]):
        with pytest.raises(TypeError, match="messages must be bytes or None"):
            hps(module, messages)
        with pytest.raises(TypeError, match="messages must be bytes or None"):
            module.decode_native(messages, 99)
    with pytest.raises(ValueError, match="max_bytes"):
        module.decode_native([], 2**32)


@pytest.mark.parametrize("module", MODULES)
def test_what_cannot_be_encoded_is_refused(module):
    keys = np.zeros(2, np.int64)
    for wrong in ((NO_BYTES, 8, 4, 1), (np.zeros(8, np.uint8), 8, 4, 0)):
        with pytest.raises(ValueError, match="must"):
            module.encode_hps(keys, *wrong)


def test_compiled_functions_refuse_arrays_they_would_misread():
    for keyed in (np.zeros(1, np.int64), np.zeros((1, 1), np.uint8), np.zeros(3, np.uint8)[::2]):
        with pytest.raises(TypeError):
            hps(native, [b""] * len(keyed), keyed=keyed, stamps=len(keyed))
    with pytest.raises(TypeError):
        native.encode_hps(np.zeros(1, np.int32), np.zeros(4, np.uint8), 8, 4, 1)


@pytest.mark.parametrize("what", ["decode_hps", "encode_hps", "decode_native"])
def test_other_threads_run_while_a_large_batch_is_worked_on(what):
    """Nobody is made to hand the GIL over, so the other thread runs only where it is given."""
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
            calls[what]()
            if ran[0] != before:
                return
        pytest.fail("the GIL was never released")
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        other.join()
