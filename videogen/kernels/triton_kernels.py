# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,no-redef"
"""The Triton kernels behind `fused.py`; `definitions.py` says what each computes. Arithmetic is float32, rounded once at the end.

Arguments carry no annotation: a kernel's names must be the kernel's own. Row numbers are 64-bit: 15 s of H3 has 3.4 G values.
"""

from typing import Any

triton: Any = None
ERRORS: tuple[type[Exception], ...] = ()
try:
    import triton
    import triton.language as tl
    from triton.errors import TritonError

    ERRORS = (TritonError,)
except ImportError:  # a torch built without it: `fused.refusal` says so
    pass

IS_AVAILABLE = triton is not None

if triton is not None:

    @triton.jit
    def rms_modulate(X, WEIGHT, SCALE, SHIFT, ROWS, OUT, seq, width, eps, table_s, BLOCK: tl.constexpr):
        """One packed row a program."""
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(X + row * width + column, mask=inside, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
        x = x * tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
        at = tl.load(ROWS + row % seq) * table_s + column
        scale = tl.load(SCALE + at, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(SHIFT + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(OUT + row * width + column, (x * (1.0 + scale) + shift).to(OUT.dtype.element_ty), mask=inside)

    @triton.jit
    def rms_norm(X, WEIGHT, OUT, width, eps, BLOCK: tl.constexpr):
        """One row a program."""
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(X + row * width + column, mask=inside, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
        x = x * tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(OUT + row * width + column, x.to(OUT.dtype.element_ty), mask=inside)

    @triton.jit
    def gated_add(X, Y, GATE, ROWS, OUT, seq, width, table_s, BLOCK: tl.constexpr):
        """A stretch of one packed row a program."""
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        at = row * width + column
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(GATE + tl.load(ROWS + row % seq) * table_s + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(OUT + at, (x + gate * y).to(OUT.dtype.element_ty), mask=inside)

    @triton.jit
    def qk_rotate(
        X, WEIGHT, COS, SIN, OUT, seq, heads, rotated, eps, x_s, angle_s, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr
    ):  # fmt: skip
        """A few heads of one packed row a program; a channel's partner is half the rotated width away."""
        row = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        channel = tl.arange(0, BLOCK_D)
        half = rotated // 2
        partner = tl.where(channel < half, channel + half, tl.where(channel < rotated, channel - half, channel))
        inside = (head < heads)[:, None] & (channel < WIDTH)[None, :]
        base = X + row * x_s + head[:, None] * WIDTH
        x = tl.load(base + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        y = tl.load(base + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        share = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        x = x * share * tl.load(WEIGHT + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)[None, :]
        y = y * share * tl.load(WEIGHT + partner, mask=channel < WIDTH, other=0.0).to(tl.float32)[None, :]
        angle = (row % seq) * angle_s + channel
        cos = tl.load(COS + angle, mask=channel < rotated, other=1.0).to(tl.float32)
        sin = tl.load(SIN + angle, mask=channel < rotated, other=0.0).to(tl.float32)
        sin = tl.where(channel < half, -sin, sin)
        at = OUT + (row * heads + head[:, None]) * WIDTH + channel[None, :]
        tl.store(at, (x * cos[None, :] + y * sin[None, :]).to(OUT.dtype.element_ty), mask=inside)

    @triton.jit
    def swiglu(X, OUT, width, BLOCK: tl.constexpr):
        """A stretch of one row a program."""
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        hidden = tl.load(X + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(X + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(OUT + row * width + column, (hidden * gate * tl.sigmoid(gate)).to(OUT.dtype.element_ty), mask=inside)

    @triton.jit
    def quantise(X, OUT, SCALE, width, BLOCK: tl.constexpr):
        """One row a program: its largest value becomes 448, the most that e4m3 holds."""
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(X + row * width + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-12) / 448.0
        tl.store(SCALE + row, scale)
        x = tl.minimum(tl.maximum(x / scale, -448.0), 448.0)
        tl.store(OUT + row * width + column, x.to(OUT.dtype.element_ty), mask=inside)
