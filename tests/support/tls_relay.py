"""A TLS relay in front of a plain-text server, as in a mesh or a load balancer, on a separate thread."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.support.certificates import Made


@contextmanager
def tls_relay(address: str, server: Made, ca: Made, *protocols: str) -> Iterator[str]:
    """Address of a relay that accepts TLS from clients with a certificate of ``ca``, and forwards it in plain
    text to ``address`` (``host:port``). ``protocols``: ALPN names of the offered protocols."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server[1], server[0])
    context.load_verify_locations(ca[1])
    context.verify_mode = ssl.CERT_REQUIRED
    if protocols:
        context.set_alpn_protocols(protocols)
    loop = asyncio.new_event_loop()
    opened: list[asyncio.StreamWriter] = []
    host, _, port = address.rpartition(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, back = await asyncio.open_connection(host, int(port))
        opened.extend((writer, back))
        with suppress(OSError):
            await asyncio.gather(_pass_on(reader, back), _pass_on(onward, writer))

    async def end() -> None:
        listening.close()
        for writer in opened:
            writer.transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

    listens = asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    listening = loop.run_until_complete(listens)
    loop.set_exception_handler(lambda *_: None)  # clients that are refused
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(end())
        loop.close()


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    finally:
        target.close()
