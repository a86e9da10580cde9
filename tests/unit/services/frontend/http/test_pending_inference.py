"""When a request in flight is answered: as soon as its result is there, on the event loop."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace

from services.frontend.http.protocol.pending_inference import PendingInference
from services.frontend.pending import PendingRequests


class Request:
    """A request on a connection; ``answers`` are those that were sent."""

    def __init__(self):
        self.answers = []
        loop = asyncio.get_running_loop()
        flow, transport = SimpleNamespace(write_paused=False), SimpleNamespace(is_closing=bool)
        self.protocol = SimpleNamespace(
            loop=loop, tasks=set(), flow=flow, transport=transport, when_gone=lambda _: None
        )
        state = SimpleNamespace(pending=PendingRequests())
        self.http = SimpleNamespace(
            future=Future(), deadline=loop.time() + 60, port=SimpleNamespace(state=state)
        )
        self.http.outcome, self.http.give_up = self.http.future, lambda: None
        self.http.ready_reply = lambda: self.http.outcome.exception() or self.http.outcome.result()

    def begin(self):
        cycle = SimpleNamespace(finish=self.answers.append)
        return PendingInference(self.protocol, cycle, self.http)


def test_result_on_the_event_loop_is_answered_without_a_turn_of_it():
    async def answered():
        request = Request()
        request.begin()
        request.http.future.set_result("answer")
        assert request.answers == ["answer"]
        assert not request.protocol.tasks

    asyncio.run(answered())


def test_result_while_the_request_is_read_is_answered_after_it():
    async def answered():
        request = Request()
        request.http.future.set_result("answer")
        request.begin()
        assert not request.answers
        await asyncio.sleep(0)
        assert request.answers == ["answer"]

    asyncio.run(answered())


def test_result_on_another_thread_is_answered_on_the_event_loop():
    async def answered():
        request = Request()
        request.begin()
        await asyncio.to_thread(request.http.future.set_result, "answer")
        while not request.answers:
            await asyncio.sleep(0.001)
        assert request.answers == ["answer"]

    asyncio.run(answered())


def test_cancelled_request_is_ended_after_what_cancels_it():
    async def ended():
        request = Request()
        request.begin()
        request.http.future.cancel()
        assert not request.answers
        await asyncio.sleep(0)
        assert len(request.answers) == 1

    asyncio.run(ended())
