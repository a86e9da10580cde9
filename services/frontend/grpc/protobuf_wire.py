"""The little of protobuf's encoding that the hot path reads and writes itself."""

from __future__ import annotations

from typing import Any

from hps.errors import BadRequest


class MalformedMessage(ValueError):
    """The bytes are no protobuf message."""


def varint(number: int) -> bytes:
    """A number that is not negative, seven bits a byte, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def field(tag: int, content: bytes) -> bytes:
    """A field of bytes, text or a message, with its one-byte tag."""
    return b"%c%b%b" % (tag, varint(len(content)), content)


def content_at(message: bytes, at: int) -> tuple[int, int]:
    """Where the content of a field begins and ends whose length stands ``at``; Malformed when the message
    does not have all of it."""
    length = shift = 0
    for place in range(at, min(at + 5, len(message))):
        byte = message[place]
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            if place + 1 + length > len(message):
                break
            return place + 1, place + 1 + length
        shift += 7
    raise MalformedMessage("it ends within a field")


def parse_message(kind: Any, message: bytes) -> Any:
    """``message`` as one of protobuf's class ``kind``. Raises ``BadRequest``."""
    try:
        return kind.FromString(message)
    except Exception as error:  # the class of protobuf's depends on how protobuf was built
        name = kind.DESCRIPTOR.full_name
        raise BadRequest(f"the message is no {name}: {error}") from None
