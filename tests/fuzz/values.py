"""Values, texts and bytes that break parsers, drawn from a seeded `random.Random`; knows nothing of what they are fed to."""

import math
import random
from collections.abc import Sequence
from typing import Any

NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 5, 17, 22, 39, 124, 345, 346, 1000, 1001, 2**31, 2**63 - 1, 2**63, 2**64, 10**400, -(10**400)),
    *(0.0, -0.0, 0.5, 1.0, 1.5, 1e308, 5e-324, math.inf, -math.inf, math.nan, True, False),
)
TEXTS = (
    *("", " ", "\t\n", "\0", "a\0b", "nan", "NaN", "inf", "-inf", "1e999", "0x10", "1_000", "١٢", "²", "-1", "-0", "1.5", "1e3", "007"),
    *("96x64", "160×96", "160X96x3", "x", "0x0", "1x99999", "-160x96", "4,3", "5s", "true", "null", "None", "[]", "{}", "a=b", "=", ":"),
    *("../../escape", "..", ".", "/etc/passwd", "/", "~", "~nobody-of-this-name/x", "C:\\x", "con", "a/b", "a\\b", "-rf", "$HOME", "%s%n"),
    *("{index}", "{index:0999999999d}", "{prompt:99999999999}", "{", "}", "{0}", "{}", "{seed:c}", "{index:{foo}}", "{prompt.__class__}"),
    *("\ud800", "é" * 300, "a" * 300, "9" * 5000, "\u202e", "🎬", "\ufeff", "\u2028", "<script>", "'; --", "\x1b[31m", "a\r\nb: c", "#"),
    *("model:turbo4", "model:", "model:../../weights", "turbo4.safetensors:nan", "x.safetensors:1e400", "good.safetensors:0.5"),
    *(
        "own",
        "template",
        "embedded",
        "http://127.0.0.1:1/v1#m",
        "http://[",
        "http://a:b@c/?d",
        "x.gguf",
        "a/b",
        "exact",
        "turbo",
        "balanced",
    ),
)
_BYTES = (
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"\r",
    b"\n",
    b'"',
    b",",
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b"&a ",
    b"*a",
)


def number(rng: random.Random) -> Any:
    """An edge case, or any number."""
    return (
        rng.choice(NUMBERS)
        if rng.random() < 0.7
        else rng.choice([rng.randint(-(10**6), 10**6), rng.uniform(-2, 2), 10 ** rng.randint(0, 30)])
    )


def text(rng: random.Random) -> str:
    """An edge case, a mixture of two, or letters of any alphabet."""
    kind = rng.random()
    if kind < 0.6:
        return rng.choice(TEXTS)
    if kind < 0.8:
        return rng.choice(TEXTS) + rng.choice(TEXTS)
    return "".join(
        chr(rng.choice([rng.randint(1, 127), rng.randint(128, 0x2FFF), rng.randint(0x1F300, 0x1F6FF)])) for _ in range(rng.randint(1, 40))
    )


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any plain value, nested at most three levels."""
    kind = rng.random()
    if kind < 0.35:
        return number(rng)
    if kind < 0.75 or depth == 3:
        return text(rng)
    if kind < 0.8:
        return None
    if kind < 0.9:
        return [value(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    return {text(rng): value(rng, depth + 1) for _ in range(rng.randint(0, 3))}


def mixed(rng: random.Random, good: Sequence[Any], odds: float = 0.6) -> Any:
    """One of the good ones with these odds, else anything."""
    return rng.choice(good) if rng.random() < odds else value(rng)


def broken_bytes(rng: random.Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """The bytes after one to four accidents: cut, flipped, doubled, spliced with another, stuffed, emptied."""
    for _ in range(rng.randint(1, 4)):
        at, to = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
        kind = rng.randrange(8)
        if kind == 0:
            data = data[:at]
        elif kind == 1:
            data = data[:at] + data[to:]
        elif kind == 2:
            data = data[:to] + data[at:to] * rng.choice([1, 2, 50]) + data[to:]
        elif kind == 3 and data:
            flipped = bytearray(data)
            for _ in range(rng.choice([1, 1, 3, 20])):
                flipped[rng.randrange(len(flipped))] = rng.randrange(256)
            data = bytes(flipped)
        elif kind == 4:
            data = data[:at] + rng.choice(_BYTES) * rng.choice([1, 1, 100]) + data[at:]
        elif kind == 5:
            data = data[:at] + rng.randbytes(rng.choice([1, 4, 64])) + data[to:]
        elif kind == 6 and others:
            data = data[:at] + rng.choice(others)[to:]
        else:
            data = data[rng.randint(0, min(8, len(data))) :]
        data = data[:200_000]
    return data


def as_text(value: Any) -> str:
    """A cell or word of a file: JSON's spelling for numbers, the text itself else."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float | int) and not isinstance(value, bool):
        return "9" * 5000 if isinstance(value, int) and abs(value) > 10**300 else str(value)
    return value if isinstance(value, str) else repr(value)
