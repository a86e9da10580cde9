"""HTTP transport for asyncio, by aiohttp."""

from __future__ import annotations

import aiohttp

from hps.client.address import ServerAddress
from hps.client.errors import left_s, unreachable_error
from hps.client.http_messages import Reply, Request


class AsyncHttpConnectionPool:
    """Connections to one server, for the event loop of the first call."""

    def __init__(self, at: ServerAddress) -> None:
        self._base = at.base
        self._ssl = True if at.tls is None else at.tls.context()
        self._session: aiohttp.ClientSession | None = None

    async def send(self, request: Request, until: float) -> Reply:
        """Send; return the reply of any status.

        Raises ServerUnreachable, and DeadlineExceeded at ``until``."""
        if self._session is None:  # unbounded, so that no call waits for another's connection
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        try:
            async with self._session.request(
                request.verb,
                self._base + request.path,
                data=request.body,
                headers=request.headers,
                timeout=aiohttp.ClientTimeout(total=left_s(until)),
                ssl=self._ssl,
                skip_auto_headers=("User-Agent", "Content-Type"),
            ) as reply:
                headers = {name.lower(): value for name, value in reply.headers.items()}
                return Reply(reply.status, headers, await reply.read())
        except (OSError, aiohttp.ClientError) as error:
            raise unreachable_error(self._base, _plain(error)) from None

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _plain(error: Exception) -> Exception:
    """Convert an aiohttp error to the standard library's."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return error.certificate_error
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error
    return error
