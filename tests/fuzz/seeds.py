"""The smallest input of every violation that was found, so that none comes back; each ended in a traceback, a hang or worse."""

import json
import math
from typing import Any

from caches.certificate import SCHEMA
from tests.fuzz.adapters import adapter_beyond_floats, pack
from tests.fuzz.box import certificate
from tests.fuzz.jobfiles import BOMBS
from tests.fuzz.records import SIDECAR

_NOBODY = "~nobody-of-this-name/x"
_HOST = [(b"host", b"127.0.0.1:8000")]
_JSON = [*_HOST, (b"content-type", b"application/json")]


def _job(**values: Any) -> bytes:
    return json.dumps({"prompt": "x"} | values).encode()


def _certificate(**values: Any) -> bytes:
    return json.dumps({"schema": SCHEMA} | certificate().to_plain() | values).encode()


def _without(key: str) -> bytes:
    return json.dumps({name: value for name, value in SIDECAR.items() if name != key}).encode()


def _adapter(key: str, config: bytes = b"") -> tuple[str, bytes, bytes]:
    header = {key: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    return "adapter_model.safetensors", pack(json.dumps(header).encode(), bytes(4)), config


def _ask(body: bytes = b"", path: str = "/v1/videos", query: bytes = b"", headers: list[tuple[bytes, bytes]] = _JSON) -> dict[str, Any]:
    return {"method": "POST" if body else "GET", "path": path, "query": query, "headers": headers, "body": body, "pick": 99}


LOSS_BEYOND_FLOATS = b'{"lam": 1, "case": "x", "parts": {"lpips": 1' + b"0" * 400 + b'}, "reused": 0.5}'
JOBS = [  # numbers of too many digits, homes of nobody, names of no disk, templates, seeds beyond the largest
    *(_job(seconds=10**400), b'{"prompt":"x","seed":' + b"9" * 5000 + b"}", _job(image=_NOBODY), _job(expand=_NOBODY), _job(lora=_NOBODY)),
    *(_job(expand="é" * 300), *(_job(output=each) for each in ("{", "{0}", "{index:{foo}}", "{index:0999999999d}", "{seed:c}", "{id!z}"))),
    *(_job(seed=2**63 - 1, repeat=2), _job(output="x", repeat=3, seed=1), b"[" * 100_000),
]
REQUESTS: list[dict[str, Any]] = [
    *({"size": 5}, {"size": (160, None)}, {"guidance": 5}, {"guidance": ("4",)}, {"references": 5}, {"negative_prompt": 5}),
    *({"seconds": True}, {"round_size": math.nan}, {"references": "ab"}),
]
RECIPES: list[tuple[str, dict[str, Any]]] = [
    *(("adapters", {"contract": "apply", "stated": 5, "fuse": False}), ("adapters", {"contract": "apply", "stated": (5,), "fuse": False})),
    *(("adapters", {"contract": "apply", "stated": (), "fuse": {}}), ("cache", {"warm_up": {}}), ("cache", {"lam": 10**400})),
    *(("cache", {"certificates": 5}), ("savings", {"kernels": math.nan}), ("sparse", {"guard": 5}), ("recipe", {"name": 5})),
    ("named", {"name": [], "lam": 0, "budget": 1}),
]
JOURNALS = [
    *(
        {"name": "../../inputs/good"},
        {"name": "a" * 300},
        {"name": "\ud800"},
        {"event": "done", "name": "x", "seconds": math.nan, "tflop": 1},
    ),
    *({"event": "done", "name": "x", "seconds": 10**400, "tflop": 1}, {"event": "seed", "draft": "x", "seed": math.inf}),
]
SEEDS: list[tuple[str, Any]] = [
    *(("job file .jsonl", each) for each in JOBS),
    *(("job file .csv", each) for each in BOMBS[".csv"][:1]),
    *(("job file .yaml", each) for each in BOMBS[".yaml"] if len(each) < 4500 and b"repeat" not in each),
    *(("request", {"prompt": "x"} | each) for each in REQUESTS),
    *(("recipe", each) for each in RECIPES),
    *(
        ("certificate", _certificate(**{key: value}))
        for key, value in (("alpha", "x"), ("n", {}), ("mean_reused", math.nan), ("lam", 10**400))
    ),
    *(
        ("certificate", _certificate(**{key: value}))
        for key, value in (("tolerances", 5), ("max_streak", 0), ("fingerprint", {}), ("n", 2.5), ("method", math.nan))
    ),
    *(("certificate", each) for each in (b"\xff", b"9" * 5000, b"[" * 100_000)),
    *(("sidecar", each) for each in (_without("resolved"), _without("cache"), _without("software"), b"[" * 100_000, b"9" * 5000)),
    *(("journal", json.dumps({"event": "start", "job": "j"} | each).encode() + b"\n") for each in JOURNALS),
    ("journal", b"[" * 100_000 + b"\n"),
    ("device profile", b"[" * 100_000),
    *(
        ("losses", each)
        for each in (b'{"lam": 1, "case": "x"}\n', b'{"case": {}, "lam": 1}', LOSS_BEYOND_FLOATS, b"[" * 100_000, b"\xff", b"[5]")
    ),
    ("adapter", _adapter("model." * 30_000 + "x.lora_A.weight")),
    *(("adapter", _adapter("x.lora_A.weight", each)) for each in (b"[" * 100_000, b"9" * 5000)),
    ("adapter", adapter_beyond_floats()),
    *(("API request", _ask(each)) for each in (b'{"\\ud800":1}', b'{"prompt":"x","seed":' + b"9" * 5000 + b"}")),
    ("API request", _ask(query=b"limit=0001" + b"9" * 60, headers=_HOST)),
    ("API request", _ask(path="/v1/videos/", query=b"\xc3(", headers=_HOST)),
    ("API request", _ask(headers=[*_HOST, (b"content-length", b"9" * 5000)])),
    *(("command line", ["inspect", each]) for each in ("a" * 300, _NOBODY, "inputs")),
    *(("command line", ["status", each]) for each in ("a" * 300, _NOBODY)),
    *(
        ("command line", ["plan", "--prompt", "x", option, _NOBODY])
        for option in ("--output-dir", "--certificate", "--lora", "--model", "--expand")
    ),
    *(
        ("command line", ["plan", "--prompt", "x", option, "a" * 300])
        for option in ("--output-dir", "--certificate", "--lora", "--model", "--expand")
    ),
    ("command line", ["plan", "--prompt", "x", "--certificate", "inputs/good.png"]),
]
