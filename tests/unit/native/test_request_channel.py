"""The channel between a client and the batch scheduler: limits, and clients that break the protocol.

Offsets of the header and of slots are those of hps/native/include/hps/request_channel.hpp."""

import os
import threading
import time

import numpy as np
import pytest

from tests.support.waiting import until

pytest.importorskip("hps.native._core")
from hps.native.scheduler import ChannelClient
from tests.support.native_scheduler import (
    CHANNEL_BYTES,
    DONE,
    FAILED,
    Channel,
    opened_scheduler,
)

RING = 1024
SUBMITTED, TAKEN, COMPLETED, SUBMISSIONS = 64, 128, 192, 448
SLOT_IN, SLOT_OUT, SLOT_STATUS = 24, 32, 40


@pytest.fixture
def scheduler():
    with opened_scheduler() as scheduler:
        yield scheduler


@pytest.fixture
def model(scheduler):
    return scheduler.model((1, 64))[0]


def word(channel, offset, dtype=np.uint32):
    return channel.raw[offset : offset + np.dtype(dtype).itemsize].view(dtype)


# -- clients -------------------------------------------------------------------------------------------


def test_channel_takes_as_many_requests_as_its_ring_has_places(scheduler, model):
    channel = Channel(scheduler)
    sent = [channel.submit(model, [i], ticket=i) for i in range(RING + 3)]
    assert sent == [True] * RING + [False] * 3
    scheduler.start()
    assert [(a.ticket, a.values) for a in channel.receive(RING)] == [
        (i, [3 * i]) for i in range(RING)
    ]
    assert channel.predict(model, [5]).values == [15]


def test_channel_without_memory_refuses_until_slots_are_free(scheduler, model):
    channel = Channel(scheduler)
    large = np.arange(20_000)
    assert [channel.submit(model, large) for _ in range(5)] == [True] * 3 + [False] * 2
    assert not channel.submit(model, np.zeros(CHANNEL_BYTES // 8))
    scheduler.start()
    for answer in channel.receive(3):
        assert answer.values == (large * 3).tolist()
    capacity = channel.client.capacity
    n = capacity // 16 - 16
    assert channel.predict(model, np.arange(n)).values == list(range(0, 3 * n, 3))
    assert not channel.submit(model, np.zeros(capacity // 8 + 64))


def test_free_memory_of_a_channel_becomes_one_piece_again(scheduler, model):
    channel = Channel(scheduler)
    scheduler.start()
    random = np.random.default_rng(3)
    for _ in range(300):
        sizes = random.integers(1, 2_000, 12)
        sent = [n for n in sizes if channel.submit(model, np.arange(n), ticket=int(n))]
        assert sorted(a.ticket for a in channel.receive(len(sent))) == sorted(sent)
    n = channel.client.capacity // 16 - 16
    assert channel.predict(model, np.arange(n)).status == DONE


def test_interrupt_ends_a_wait_for_answers(scheduler):
    channel = Channel(scheduler)
    threading.Timer(0.05, channel.client.interrupt).start()
    started = time.monotonic()
    assert channel.client.receive(30_000) == []
    assert time.monotonic() - started < 10
    channel.client.interrupt()  # before the wait
    assert channel.client.receive(30_000) == []


def test_concurrent_callers_of_one_channel_get_their_own_answers(scheduler, model):
    channel = Channel(scheduler, 1 << 24)
    scheduler.start()

    def send(caller):
        for i in range(500):
            ticket = caller * 1_000 + i
            until(lambda t=ticket: channel.submit(model, [t, t + 1], ticket=t))

    threads = [threading.Thread(target=send, args=[caller]) for caller in range(4)]
    for each in threads:
        each.start()
    answers = channel.receive(2_000, timeout_s=60)
    assert {a.ticket for a in answers} == {c * 1_000 + i for c in range(4) for i in range(500)}
    assert all(a.values == [3 * a.ticket, 3 * a.ticket + 3] for a in answers)


@pytest.mark.parametrize("size", [0, 4096, 1 << 20])
def test_file_that_is_no_channel_is_rejected(size):
    memory = os.memfd_create("not-a-channel")
    os.ftruncate(memory, size)
    with pytest.raises((ValueError, RuntimeError), match="channel"):
        ChannelClient(memory, os.eventfd(0), os.eventfd(0))


def test_rejected_channel_leaves_no_open_file(scheduler):
    memory = os.memfd_create("too-small")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises((ValueError, RuntimeError)):
            scheduler.native.add_channel(memory, os.eventfd(0))
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(memory)


# -- clients that break the protocol -------------------------------------------------------------------


def sent_by(channel, model, **options):
    """Send a request before the scheduler runs; return the offset of its slot."""
    assert channel.submit(model, [1, 2], **options)
    at = int(word(channel, SUBMITTED)[0]) - 1
    return int(word(channel, SUBMISSIONS + 4 * (at % RING))[0]) * 64


@pytest.mark.parametrize("field", [SLOT_IN, SLOT_OUT])
@pytest.mark.parametrize("size", [CHANNEL_BYTES, 2**63, 2**64 - 1, 2**64 - 64])
def test_slot_with_wrong_sizes_fails_alone(scheduler, model, field, size):
    channel = Channel(scheduler)
    slot = sent_by(channel, model, ticket=1)
    right = word(channel, slot + field, np.uint64)[0]
    word(channel, slot + field, np.uint64)[0] = size
    channel.submit(model, [7], ticket=2)
    scheduler.start()
    until(lambda: word(channel, COMPLETED)[0] == 2)
    assert word(channel, slot + SLOT_STATUS)[0] == FAILED
    word(channel, slot + field, np.uint64)[0] = right
    assert {a.ticket: a.values for a in channel.receive(2)} == {1: [], 2: [21]}


def break_offset_in_header(channel):
    word(channel, SUBMISSIONS)[0] = 1


def break_offset_beyond_the_end(channel):
    word(channel, SUBMISSIONS)[0] = CHANNEL_BYTES // 64


def break_offset_of_the_last_unit(channel):
    word(channel, SUBMISSIONS)[0] = CHANNEL_BYTES // 64 - 1


def break_offset_that_wraps(channel):
    word(channel, SUBMISSIONS)[0] = 2**32 - 1


def break_position_ahead(channel):
    word(channel, SUBMITTED)[0] += 5_000


def break_position_behind(channel):
    word(channel, SUBMITTED)[0] = 2**32 - 7


@pytest.mark.parametrize(
    "breach",
    [
        break_offset_in_header,
        break_offset_beyond_the_end,
        break_offset_of_the_last_unit,
        break_offset_that_wraps,
        break_position_ahead,
        break_position_behind,
    ],
)
def test_client_with_impossible_positions_is_not_read_any_more(scheduler, model, breach):
    broken, other = Channel(scheduler), Channel(scheduler)
    sent_by(broken, model)
    breach(broken)
    scheduler.start()
    assert other.predict(model, [5]).values == [15]
    broken.submit(model, [1])
    assert broken.receive(1, timeout_s=0.1) == []
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1  # the scheduler sleeps
    assert other.predict(model, [6]).values == [18]
    scheduler.native.remove_channel(broken.number)
    assert other.predict(model, [7]).values == [21]


def test_client_that_sends_one_slot_without_end_does_not_fill_memory(scheduler, model):
    """Its requests in flight are as many as it can have slots; others are answered."""
    scheduler.set_missing(1)  # batches stay incomplete, so nothing is answered
    broken, other = Channel(scheduler), Channel(scheduler)
    slot = sent_by(broken, model)
    word(broken, SUBMISSIONS, np.uint32)[0] = slot // 64
    broken.raw[SUBMISSIONS : SUBMISSIONS + 4 * RING].view(np.uint32)[:] = slot // 64
    scheduler.start()
    for _ in range(20):
        word(broken, SUBMITTED)[0] = word(broken, TAKEN)[0] + RING
        os.eventfd_write(scheduler.wake, 1)
        time.sleep(0.005)
    assert scheduler.counts(model)["requests"] <= RING
    scheduler.native.remove_channel(broken.number)
    scheduler.set_missing(0)
    scheduler.take().finish()
    other.submit(model, [5])
    while batch := scheduler.take(0.2):
        batch.finish()
    assert other.receive()[0].values == [15]


def test_positions_of_the_scheduler_are_not_read_from_memory(scheduler, model):
    channel = Channel(scheduler)
    scheduler.start()
    channel.predict(model, [1])
    word(channel, TAKEN)[0] = 2**32 - 9
    assert channel.predict(model, [2]).values == [6]
    channel.submit(model, [3])
    until(lambda: word(channel, COMPLETED)[0] == 3)
    word(channel, COMPLETED)[0] = 2
    channel.submit(model, [4], ticket=9)
    until(lambda: word(channel, COMPLETED)[0] == 4)
    assert [a.values for a in channel.receive(2)] == [[9], [12]]


def test_request_changed_after_it_was_sent_changes_its_own_answer_only(scheduler, model):
    scheduler.set_missing(1)
    broken, other = Channel(scheduler), Channel(scheduler)
    slot = sent_by(broken, model)
    other.submit(model, [5])
    scheduler.start()
    batch = scheduler.take()
    broken.raw[slot : slot + 128] = 255
    batch.finish()
    assert other.receive()[0].values == [15]
