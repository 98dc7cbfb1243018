"""Adapter files: safetensors whose header lies, with good and hostile keys, metadata and peft settings."""

import json
import random
import struct
from typing import Any

from lora.apply import Use, delta_norms
from lora.contract import resolve_contract
from lora.convert import load_adapter
from tests.fuzz.box import Box, Broken, must_be_finite
from tests.fuzz.values import as_text, broken_bytes, mixed, text, value
from videogen.adapters import adapter_errors, settle
from videogen.config import Adapters, AdapterUse, Recipe

WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
ODD_TYPES = ("F4", "F6_E2M3", "F8_E8M0", "C64", "f32", "", "U16", "F128")
METADATA: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("alpha", "lora_alpha", "ss_network_alpha"), ("2", "1", "0.5")),
    "nfe": ("4", "8"),
    "forwards": ("4",),
    "shift_video": ("12", "6"),
    "shift_audio": ("3",),
    "sigmas": ("[1.0, 0.5, 0.25, 0.1, 0.0]", "1,0"),
    "partition": ("transformer", "transformer_ref"),
    "strength": ("1",),
    "trained_size": ("160x96",),
    "scale_folded": ("true",),
    "qkv_order": ("stacked", "interleaved"),
    "swiglu_gate_first": ("true", "false"),
    "lora_adapter_metadata": ('{"r": 2, "lora_alpha": 4}',),
}
CONFIG: dict[str, tuple[Any, ...]] = {
    "r": (2, 4),
    "lora_alpha": (2, 4, None),
    "alpha_pattern": ({"to_q": 4}, {}),
    "rank_pattern": ({"to_q": 2}, {}),
    "use_rslora": (True, False),
    "use_dora": (False, True),
    "peft_type": ("LORA", "LOHA"),
    "init_lora_weights": (True, "pissa"),
    "fan_in_fan_out": (False, True),
}
PATTERNS = ("(a+)+$", "([a-z_.0-9]+)+X", "(x|x)*y", "[", "(?P<a>", "(.|.)*!", "a" * 2000, r"(\w+\.?)+Z", "to_q")
HEADERS = (2**60, 2**64 - 1, 2**63, 0, 1, 100_000_000, 10**6)
_SUFFIXES = (
    ".lora_A.weight",
    ".lora_B.weight",
    ".lora_down.weight",
    ".lora_up.weight",
    ".alpha",
    ".diff",
    ".diff_b",
    ".set_weight",
    ".lora_A.default.weight",
)
_PREFIXES = (
    "",
    "transformer.",
    "diffusion_model.",
    "base_model.model.",
    "lora_unet_",
    "transformer_ref.",
    "model." * 30_000,
    "text_encoder.",
)


def pack(header: bytes, body: bytes, length: int | None = None) -> bytes:
    """A safetensors file; `length` is what it claims of its header."""
    return struct.pack("<Q", len(header) if length is None else length) + header + body


def _pairs(rng: random.Random, box: Box) -> dict[str, tuple[tuple[int, ...], str]]:
    names, found = sorted(box.target.linears), {}
    for module in rng.sample(names, rng.randint(1, 3)):
        rows, columns = box.target.shapes[f"{module}.weight"]
        rank, prefix, kind = rng.choice([1, 2]), rng.choice(_PREFIXES[:3]), rng.choice(list(WIDTHS)[:4])
        found |= {f"{prefix}{module}.lora_A.weight": ((rank, columns), kind), f"{prefix}{module}.lora_B.weight": ((rows, rank), kind)}
        if rng.random() < 0.2:
            found[f"{prefix}{module}.alpha"] = ((), "F32")
    return found


def _spoil(rng: random.Random, tensors: dict[str, tuple[tuple[int, ...], str]], box: Box) -> None:
    key = rng.choice(sorted(tensors))
    shape, kind = tensors[key]
    accident = rng.randrange(6)
    if accident == 0:
        tensors[key] = shape, rng.choice([*WIDTHS, *ODD_TYPES])
    elif accident == 1:
        tensors[key] = rng.choice([(), (0,), (1,), (3, 3), shape[::-1], (2**40, 2**40), (0, 2**62), (1, *shape)]), kind
    elif accident == 2:
        del tensors[key]
    elif accident == 3:
        tensors[text(rng)] = shape, kind
    else:
        tensors[rng.choice(_PREFIXES) + rng.choice(sorted(box.target.linears)) + rng.choice(_SUFFIXES)] = shape, kind


def _content(rng: random.Random, size: int) -> bytes:
    kind = rng.random()
    if kind < 0.6:
        return bytes(size)
    return b"\x00\x00\xc0\x7f" * (size // 4) + bytes(size % 4) if kind < 0.75 else rng.randbytes(size)


def make(rng: random.Random, box: Box) -> tuple[str, bytes, bytes]:
    """(name, file, peft settings beside it or nothing)."""
    tensors = _pairs(rng, box)
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        if tensors:
            _spoil(rng, tensors, box)
    header: dict[str, Any] = {}
    if rng.random() < 0.6:
        header["__metadata__"] = {key: as_text(mixed(rng, METADATA[key], 0.7)) for key in rng.sample(sorted(METADATA), rng.randint(0, 3))}
    at = 0
    for key, (shape, kind) in tensors.items():
        size = WIDTHS.get(kind, 1)
        for side in shape:
            size *= side
        end = at + min(size, 4_000_000)
        header[key] = {
            "dtype": kind,
            "shape": list(shape),
            "data_offsets": [at, end if rng.random() < 0.97 else rng.choice([0, end + 5, 2**62])],
        }
        at = end
    if rng.random() < 0.05:
        header[text(rng)] = value(rng)
    data = pack(json.dumps(header).encode(), _content(rng, at), rng.choice(HEADERS) if rng.random() < 0.05 else None)
    data = broken_bytes(rng, data[:200_000]) if rng.random() < 0.15 else data
    config = b""
    if rng.random() < 0.25:
        settings = {key: mixed(rng, CONFIG[key], 0.75) for key in rng.sample(sorted(CONFIG), rng.randint(1, 4))}
        if rng.random() < 0.3:
            settings[rng.choice(["alpha_pattern", "rank_pattern"])] = {rng.choice(PATTERNS): 2}
        config = json.dumps(settings).encode()
        config = broken_bytes(rng, config, [b"[" * 100_000]) if rng.random() < 0.15 else config
    return (
        rng.choice(["adapter_model.safetensors", "h3-turbo-4step.safetensors", "a.pt"] if not config else ["adapter_model.safetensors"]),
        data,
        config,
    )


def adapter_beyond_floats() -> tuple[str, bytes, bytes]:
    """Two finite factors of 1e30 each, for the shipped model."""
    shapes = {f"transformer_blocks.0.attn.to_q.lora_{half}.weight": shape for half, shape in (("A", [1, 256]), ("B", [256, 1]))}
    header = {
        key: {"dtype": "F32", "shape": shape, "data_offsets": [1024 * at, 1024 * (at + 1)]}
        for at, (key, shape) in enumerate(shapes.items())
    }
    return "adapter_model.safetensors", pack(json.dumps(header).encode(), struct.pack("<f", 1e30) * 512), b""


def check(case: tuple[str, bytes, bytes], box: Box) -> None:
    """Read for the shipped model and its contract settled, as for a render; the factors are finite."""
    name, data, config = case
    path = box.work / name
    path.write_bytes(data)
    if config:
        (box.work / "adapter_config.json").write_bytes(config)
    with adapter_errors():
        adapter = load_adapter(path, box.target)
        contract = resolve_contract(str(path), adapter.metadata, partition=adapter.partition)
        norms = delta_norms(Use(adapter))
    must_be_finite([contract, contract.schedule(), [each.scale for each in adapter.factors.values()], norms])
    recipe = settle(Recipe(adapters=Adapters((AdapterUse(str(path)),))), box.source)  # what was taken, again as a render takes it
    must_be_finite(recipe)
    if not recipe.adapters.identity:
        raise Broken("an adapter without an identity")
