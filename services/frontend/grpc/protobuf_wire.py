"""The parts of protobuf's encoding that the hot path reads and writes itself."""

from __future__ import annotations

from typing import Any

from hps.errors import BadRequest


class MalformedMessage(ValueError):
    """The bytes are not a protobuf message."""


def varint(number: int) -> bytes:
    """Encode a non-negative number, seven bits a byte, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def field(tag: int, content: bytes) -> bytes:
    """Encode a field of bytes, text or a message, with its one-byte tag."""
    return b"%c%b%b" % (tag, varint(len(content)), content)


def content_at(message: bytes, at: int) -> tuple[int, int]:
    """Return the start and end of a field's content; its length is encoded at ``at``.

    Raises ``MalformedMessage`` if the message ends before the content does.
    """
    length = shift = 0
    for place in range(at, min(at + 5, len(message))):
        byte = message[place]
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            if place + 1 + length > len(message):
                break
            return place + 1, place + 1 + length
        shift += 7
    raise MalformedMessage("the message ends within a field")


def parse_message(kind: Any, message: bytes) -> Any:
    """Parse ``message`` as protobuf's class ``kind``. Raises ``BadRequest``."""
    try:
        return kind.FromString(message)
    except Exception as error:  # the class depends on protobuf's build
        name = kind.DESCRIPTOR.full_name
        raise BadRequest(f"the message is not a valid {name}: {error}") from None
