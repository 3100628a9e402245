"""A small picture with a palette, as PNG: 512 ranks by 240 spans of time are one image, not 100,000 shapes."""

import base64
import struct
import zlib
from collections.abc import Sequence

# Cividis: read alike by colour-blind eyes, dark is little, light is much. Source: Nunez, Anderton, Renslow,
# PLOS ONE 13(7), 2018; sampled at 9 places.
PALETTE = (
    *((0, 34, 78), (18, 53, 112), (59, 73, 108), (87, 93, 109), (112, 113, 115)),
    *((138, 134, 120), (165, 156, 116), (195, 179, 105), (254, 232, 56)),
)
NUM_LEVELS = 64


def heatmap(rows: Sequence[Sequence[float | None]], low: float, high: float) -> str:
    """Return a picture as a `data:` URI: one pixel for each value, transparent where there is none.

    Args:
        rows: From top to bottom, of one length.
        low: The value of the darkest colour.
        high: The value of the lightest.
    """
    height, width = len(rows), max(map(len, rows), default=0)
    reach = high - low or 1.0
    packed = bytearray()
    for row in rows:
        packed.append(0)  # no filter
        for value in row:
            level = (
                0
                if value is None
                else 1 + round(min(max((value - low) / reach, 0.0), 1.0) * (NUM_LEVELS - 1))
            )
            packed.append(level)
        packed.extend(bytes(width - len(row)))
    colours = bytes((0, 0, 0)) + b"".join(
        bytes(colour_of(n / (NUM_LEVELS - 1))) for n in range(NUM_LEVELS)
    )
    parts = [
        _chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, 3, 0, 0, 0)),
        _chunk(b"PLTE", colours),
        _chunk(b"tRNS", b"\0"),
        _chunk(b"IDAT", zlib.compress(bytes(packed), 9)),
        _chunk(b"IEND", b""),
    ]
    picture = b"\x89PNG\r\n\x1a\n" + b"".join(parts)
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def colour_of(share: float) -> tuple[int, int, int]:
    """Return the colour of a place in the palette, 0 to 1."""
    place = min(max(share, 0.0), 1.0) * (len(PALETTE) - 1)
    number = min(int(place), len(PALETTE) - 2)
    rest = place - number
    one, other = PALETTE[number], PALETTE[number + 1]
    red, green, blue = (round(a + (b - a) * rest) for a, b in zip(one, other, strict=True))
    return red, green, blue


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
