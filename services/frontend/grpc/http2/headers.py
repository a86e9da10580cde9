"""Header blocks of calls and answers: decoding with a cache, gRPC's metadata and timeouts."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import quote

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError

from hps.bounded_memo import memoize
from services.frontend.grpc.http2.frames import ConnectionFailed, ErrorCode, StreamFailed
from services.frontend.grpc.http2.limits import MAX_BLOCK_BYTES, MAX_HEADER_LIST_BYTES

Metadata = tuple[tuple[str, str | bytes], ...]
Trailers = Sequence[tuple[str, str | bytes]] | None

# Heads cached per connection, and the largest block and header list of one.
_CACHED, _CACHED_BLOCK, _CACHED_LIST = 16, 1024, 4096
_FIELD_BYTES = 32  # HTTP/2 adds them to the size of each field
MAX_DETAILS_BYTES = 2048
"""Longer error texts are cut: each byte may take three, and clients limit the size of trailers."""
# Fields that are no metadata of the application.
_PROTOCOL_FIELDS = frozenset(
    (b"te", b"content-type", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding")
)
_CONNECTION_FIELDS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_INVALID_VALUE = re.compile(rb"[\0\r\n]")
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TRAILER_NAME = re.compile(r"[0-9a-z_.-]+")


class CallHead(NamedTuple):
    """The head of a call. ``timeout_s`` is inf without a deadline; ``http_error`` is an HTTP status for a
    request that is no gRPC call. If the metadata exceed their limit, only ``is_too_large`` is meant."""

    path: str
    metadata: Metadata
    timeout_s: float
    encoding: str
    http_error: int = 0
    is_too_large: bool = False


class HeaderDecoder:
    """Decodes a connection's header blocks.

    Clients repeat blocks that refer to their table, so a block that leaves the table unchanged is answered
    from a cache until the table changes.
    """

    __slots__ = ("_cache", "_decoder")

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=MAX_BLOCK_BYTES)
        self._cache: dict[bytes, CallHead] = {}

    def call_head(self, block: bytes) -> CallHead:
        """Return the head of a call. Raises ``ConnectionFailed`` and ``StreamFailed``."""
        head = self._cache.get(block)
        if head is not None:
            return head
        fields = self.decode(block)
        size = list_bytes(fields)
        if size > MAX_HEADER_LIST_BYTES:
            return _TOO_LARGE
        head = _call_head(fields)
        if len(block) <= _CACHED_BLOCK and size <= _CACHED_LIST and not changes_table(block):
            memoize(self._cache, block, head, _CACHED)
        return head

    def decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        """Return the fields of a block. Raises ``ConnectionFailed``."""
        try:
            fields = list(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError:
            text = f"header list exceeds {MAX_BLOCK_BYTES} bytes"
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, text) from None
        except (HPACKError, IndexError, ValueError):
            text = "invalid header block"
            raise ConnectionFailed(ErrorCode.COMPRESSION_ERROR, text) from None
        if self._cache and changes_table(block):
            self._cache.clear()
        return fields  # type: ignore[return-value]  # bytes, as they are raw


def list_bytes(fields: Iterable[tuple[bytes, bytes]]) -> int:
    """Return the size of a header list as HTTP/2 counts it."""
    return sum(len(name) + len(value) + _FIELD_BYTES for name, value in fields)


def changes_table(block: bytes) -> bool:
    """Return True if a valid header block changes the decoder's table (RFC 7541, section 6)."""
    at, end = 0, len(block)
    while at < end:
        first = block[at]
        if first & 0x80:
            at = _integer(block, at, 0x7F)[1]
        elif first & 0x60:
            return True
        else:
            index, at = _integer(block, at, 0x0F)
            for _ in range(1 if index else 2):
                size, at = _integer(block, at, 0x7F)
                at += size
    return False


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """Return the integer at ``at`` and the position after it."""
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    shift = 0
    while True:
        part = block[at]
        at += 1
        value += (part & 0x7F) << shift
        shift += 7
        if part < 0x80:
            return value, at


_TOO_LARGE = CallHead("", (), math.inf, "identity", is_too_large=True)


def _call_head(fields: Iterable[tuple[bytes, bytes]]) -> CallHead:
    pseudo: dict[bytes, bytes] = {}
    protocol: dict[bytes, bytes] = {}
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in fields:
        if name[:1] == b":":
            if metadata or protocol or name in pseudo:
                raise StreamFailed(ErrorCode.PROTOCOL_ERROR, "misplaced pseudo header")
            pseudo[name] = value
        elif not _NAME.fullmatch(name) or _INVALID_VALUE.search(value):
            raise StreamFailed(ErrorCode.PROTOCOL_ERROR, "invalid header field")
        elif name in _PROTOCOL_FIELDS:
            protocol[name] = value
        elif name in _CONNECTION_FIELDS:
            raise StreamFailed(ErrorCode.PROTOCOL_ERROR, "connection-specific header field")
        else:
            metadata.append(_metadatum(name, value))
    path, method = pseudo.get(b":path"), pseudo.get(b":method")
    if not path or method is None or b":scheme" not in pseudo:
        raise StreamFailed(ErrorCode.PROTOCOL_ERROR, "a pseudo header is missing")
    return CallHead(
        path.decode("latin-1"),
        tuple(metadata),
        _timeout_s(protocol.get(b"grpc-timeout")),
        protocol.get(b"grpc-encoding", b"identity").decode("latin-1"),
        _http_error(method, protocol.get(b"content-type", b"")),
    )


def _http_error(method: bytes, content_type: bytes) -> int:
    if method != b"POST":
        return 405
    if content_type.startswith(b"application/grpc") and content_type[16:17] in (b"", b"+", b";"):
        return 0
    return 415


def _metadatum(name: bytes, value: bytes) -> tuple[str, str | bytes]:
    if name.endswith(b"-bin"):
        try:
            # Values that a proxy has joined are separated by commas; gRPC omits padding.
            joined = value.split(b",", 1)[0]
            return name.decode(), base64.b64decode(joined + b"=" * (-len(joined) % 4))
        except binascii.Error:
            raise StreamFailed(ErrorCode.PROTOCOL_ERROR, "invalid binary metadata") from None
    return name.decode(), value.decode("latin-1")


def _timeout_s(value: bytes | None) -> float:
    if value is None:
        return math.inf
    match = _TIMEOUT.fullmatch(value)
    if match is None:
        raise StreamFailed(ErrorCode.PROTOCOL_ERROR, "invalid grpc-timeout")
    return int(match[1]) * _UNIT_S[match[2]]


def _literal(name: bytes, value: bytes) -> bytes:
    """Return a literal field without indexing: the answer's bytes depend on no table."""
    return b"\0" + _length(len(name)) + name + _length(len(value)) + value


def _length(size: int) -> bytes:
    if size < 0x7F:
        return bytes((size,))
    size -= 0x7F
    encoded = b"\x7f"
    while size >= 0x80:
        encoded += bytes((size & 0x7F | 0x80,))
        size >>= 7
    return encoded + bytes((size,))


# ``:status: 200`` is entry 8 of the static table; ``content-type`` is 31, which takes two bytes.
ANSWER_HEAD = b"\x88\x0f\x10\x10application/grpc"
EMPTY_TABLE = b"\x20"
"""Begins the first header block after a client has reduced its table: answers use none (RFC 7541, 4.2)."""
TRAILERS_OK = _literal(b"grpc-status", b"0")


def status_block(code: int, details: str, trailers: Trailers) -> bytes:
    """Return the trailers' block with gRPC's status."""
    block = TRAILERS_OK if not code else _literal(b"grpc-status", b"%d" % code)
    if details:
        shown = details.encode(errors="replace")[:MAX_DETAILS_BYTES].decode(errors="ignore")
        message = quote(shown, safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~")
        block += _literal(b"grpc-message", message.encode())
    for name, value in trailers or ():
        block += _trailer(name, value)
    return block


def _trailer(name: str, value: str | bytes) -> bytes:
    if not _TRAILER_NAME.fullmatch(name):
        raise ValueError(f"invalid name of metadata: {name!r}")
    if name.endswith("-bin"):
        plain = value.encode() if isinstance(value, str) else value
        return _literal(name.encode(), base64.b64encode(plain).rstrip(b"="))
    text = value.decode() if isinstance(value, bytes) else value
    if not text.isprintable() or not text.isascii():
        raise ValueError(f"metadata {name!r} must be printable ASCII; name it {name}-bin")
    return _literal(name.encode(), text.encode())


def http_error_block(status: int) -> bytes:
    """Return the block of an HTTP error for a request that is no gRPC call."""
    return b"\x08\x03" + str(status).encode()
