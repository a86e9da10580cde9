"""A gRPC connection on the event loop: from HTTP/2 frames to calls, from answers to frames."""

from __future__ import annotations

from services.frontend.grpc.http2 import frames
from services.frontend.grpc.http2.control import ControlledConnection
from services.frontend.grpc.http2.frames import (
    END_HEADERS,
    END_STREAM,
    MAX_WINDOW,
    ConnectionFailed,
    ErrorCode,
    StreamFailed,
)
from services.frontend.grpc.http2.headers import CallHead, HeaderDecoder, list_bytes
from services.frontend.grpc.http2.limits import (
    LARGE_BLOCK_BYTES_PER_FRAME,
    LARGE_LIST_FRAMES,
    MAX_BLOCK_BYTES,
    MAX_BLOCK_FRAMES,
    MAX_HEADER_LIST_BYTES,
)
from services.frontend.grpc.http2.messages import ACCEPTED_ENCODINGS, ENCODINGS, CallFailed
from services.frontend.grpc.http2.port import PortContext
from services.frontend.grpc.http2.preface import NotHttp2, preface_size
from services.frontend.grpc.http2.status_codes import RESOURCE_EXHAUSTED, UNIMPLEMENTED
from services.frontend.grpc.http2.streams import BidiStream, Stream
from services.frontend.grpc.http2.unary_call import UnaryCall
from services.frontend.grpc.method_handlers import BidiStreamHandler

# The connection's window is returned in steps of this size. It does not limit clients; streams' windows do.
_RETURNED_BYTES = 1 << 28


class GrpcConnection(ControlledConnection):
    """One client's connection. All of it runs on the event loop.

    Frames are read from the bytes of each arrival; those of a connection are answered in one write. The
    client must know that the server speaks HTTP/2 (prior knowledge, or ALPN with TLS).
    """

    def __init__(self, port: PortContext) -> None:
        super().__init__(port)
        self._rest = b""  # the beginning of a frame
        self._headers = HeaderDecoder()
        self._taken = 0  # bytes of data by which the connection's window has shrunk
        self._is_over = False
        # A header block that continues: its stream, its flags and its fragments.
        self._block: tuple[int, int, list[bytes]] | None = None

    # Receiving

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        sender = self.sender
        sender.cork()
        try:
            if self.has_preface:
                self._rest = self._read(data, 0)
            else:
                self._read_preface(data)
        except ConnectionFailed as error:
            self._is_over = True
            self._close_with(error.code, str(error))
        finally:
            sender.uncork()

    def _read_preface(self, data: bytes) -> None:
        try:
            size = preface_size(data)
        except NotHttp2 as error:
            self._is_over = True
            self.sender.write(error.answer)
            self.sender.uncork()
            self.transport.close()
            return
        if size:
            self.greet()
        self._rest = self._read(data, size) if size else data

    def _read(self, data: bytes, at: int) -> bytes:
        """Process the frames in ``data`` from ``at`` on; return the beginning of the next one."""
        end, unpack = len(data), frames.HEADER.unpack_from
        while end - at >= frames.HEADER_BYTES and not self._is_over:
            high, low, kind, flags, stream_id = unpack(data, at)
            if high or low > frames.MAX_FRAME_BYTES:
                raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "a frame is too large")
            begin = at + frames.HEADER_BYTES
            stop = begin + low
            if stop > end:
                break
            at = stop
            payload = data[begin:stop]
            stream_id &= MAX_WINDOW
            try:
                if self._block is not None and kind != frames.CONTINUATION:
                    raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "CONTINUATION expected")
                if kind == frames.DATA:
                    self._data(stream_id, flags, payload)
                elif kind == frames.HEADERS:
                    self._begin_block(stream_id, flags, payload)
                elif kind == frames.CONTINUATION:
                    self._continuation(flags, stream_id, payload)
                else:
                    self.control(kind, flags, stream_id, payload)
            except StreamFailed as error:
                self.fail_stream(stream_id, error)
            except CallFailed as error:
                if (stream := self.streams.get(stream_id)) is not None:
                    stream.fault(error.code, error.details, error.trailers)
        return data[at:] if at < end else b""

    def _data(self, stream_id: int, flags: int, payload: bytes) -> None:
        size = len(payload)
        self._taken += size
        if self._taken >= _RETURNED_BYTES:
            self.grant(0, self._taken)
            self._taken = 0
        if flags & frames.PADDED:
            payload = frames.unpadded(payload, flags, frames.DATA)
        is_last = flags & END_STREAM
        if not payload and not is_last:
            self.spend()
        stream = self.streams.get(stream_id)
        if stream is None:
            self.require_begun(stream_id, "DATA")
            return  # the stream has ended; the client may not know yet
        if stream.is_half_closed:
            raise StreamFailed(ErrorCode.STREAM_CLOSED, "DATA after END_STREAM")
        stream.receive(payload, size, is_last=bool(is_last))

    def _begin_block(self, stream_id: int, flags: int, payload: bytes) -> None:
        if not stream_id & 1:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "invalid stream of HEADERS")
        if flags & (frames.PADDED | frames.PRIORITIZED):
            payload = frames.unpadded(payload, flags, frames.HEADERS)
        if flags & END_HEADERS:
            self._head(stream_id, flags, payload)
        else:
            self._block = stream_id, flags, [payload]

    def _continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None or self._block[0] != stream_id:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "unexpected CONTINUATION")
        _, begin_flags, fragments = self._block
        fragments.append(payload)
        if len(fragments) > MAX_BLOCK_FRAMES or sum(map(len, fragments)) > MAX_BLOCK_BYTES:
            text = f"a header block exceeds {MAX_BLOCK_BYTES} bytes or {MAX_BLOCK_FRAMES} frames"
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, text)
        if flags & END_HEADERS:
            self._block = None
            self._head(stream_id, begin_flags, b"".join(fragments))

    def _head(self, stream_id: int, flags: int, block: bytes) -> None:
        """Begin the call of a header block, or end a request with trailers."""
        if len(block) > MAX_HEADER_LIST_BYTES:
            self.spend(len(block) // LARGE_BLOCK_BYTES_PER_FRAME)
        if stream_id <= self.last_stream:
            self._decode_unused(block)
            stream = self.streams.get(stream_id)
            if stream is None or stream.is_half_closed:
                raise StreamFailed(ErrorCode.STREAM_CLOSED, "HEADERS after the call's end")
            if not flags & END_STREAM:
                raise StreamFailed(ErrorCode.PROTOCOL_ERROR, "trailers without END_STREAM")
            stream.end_by_trailers()
            return
        if self._is_last_known:
            self._decode_unused(block)
            return  # after GOAWAY: the client makes the call elsewhere
        self.last_stream = stream_id
        head = self._headers.call_head(block)
        if head.is_too_large:
            self.spend(LARGE_LIST_FRAMES)
        open_calls = max(len(self.streams), self.running)
        if open_calls >= self.port.settings.max_calls_per_connection:
            raise StreamFailed(ErrorCode.REFUSED_STREAM, "too many calls")
        self._begin_call(stream_id, head)
        if flags & END_STREAM and (begun := self.streams.get(stream_id)) is not None:
            begun.end_by_trailers()

    def _decode_unused(self, block: bytes) -> None:
        """Decode a block that begins no call, to keep the decoder's table in step."""
        if list_bytes(self._headers.decode(block)) > MAX_HEADER_LIST_BYTES:
            self.spend(LARGE_LIST_FRAMES)

    def _begin_call(self, stream_id: int, head: CallHead) -> None:
        handler = self.port.methods.get(head.path)
        if handler is None or head.http_error or head.encoding not in ENCODINGS:
            stream = self.streams[stream_id] = Stream(self, stream_id, head)
            self._reject_call(stream)
        elif isinstance(handler, BidiStreamHandler):
            opened = self.streams[stream_id] = BidiStream(self, stream_id, head)
            opened.call = self.port.stream_call(self, opened, head, handler)
        else:
            call = self.streams[stream_id] = UnaryCall(self, stream_id, head, handler)
            self.running += 1
            self.port.calls.take(call)

    def _reject_call(self, stream: Stream) -> None:
        """Answer a request that cannot become a call."""
        head = stream.head
        if head.http_error:
            self.end_with_http_error(stream, head.http_error)
        elif head.is_too_large:
            text = f"the call's metadata exceed {MAX_HEADER_LIST_BYTES} bytes"
            self.end(stream, RESOURCE_EXHAUSTED, text)
        elif head.path not in self.port.methods:
            self.end(stream, UNIMPLEMENTED, f"method not found: {head.path[:200]}")
        else:
            encoding = f"compression {head.encoding[:40]!r}"
            text = f"{encoding} is not supported; use gzip, deflate or identity"
            self.end(stream, UNIMPLEMENTED, text, ACCEPTED_ENCODINGS)
