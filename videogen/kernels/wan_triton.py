# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,no-redef"
"""The Triton kernels behind `wan.py`, which says what each computes. Arithmetic is float32.

Row numbers are 64-bit: 81 frames of 1280x720 in A14B have 387 M values, longer clips more than 2 G.
"""

from typing import Any

triton: Any = None
try:
    import triton
    import triton.language as tl
except ImportError:  # a torch built without it: `fused.refusal` says so
    pass

if triton is not None:

    @triton.jit
    def layer_modulate(X, SCALE, SHIFT, OUT, seq, width, eps, base, batch_s, row_s, BLOCK: tl.constexpr):
        """One row a program: its layer norm times (base + scale), plus shift; tables have a row for each, or one for all."""
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(X + row * width + column, mask=inside, other=0.0).to(tl.float32)
        apart = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
        normed = apart * tl.rsqrt(tl.sum(apart * apart, 0) / width + eps)
        at = (row // seq) * batch_s + (row % seq) * row_s + column
        scale = tl.load(SCALE + at, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(SHIFT + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(OUT + row * width + column, (normed * (base + scale) + shift).to(OUT.dtype.element_ty), mask=inside)

    @triton.jit
    def gate_add(X, Y, GATE, OUT, seq, width, batch_s, row_s, BLOCK: tl.constexpr):
        """A stretch of one row a program."""
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        at = row * width + column
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(GATE + (row // seq) * batch_s + (row % seq) * row_s + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(OUT + at, (x + y * gate).to(OUT.dtype.element_ty), mask=inside)

    @triton.jit
    def norm_rotate(X, WEIGHT, COS, SIN, OUT, seq, width, head_width, eps, BLOCK: tl.constexpr):
        """One row of all heads a program. The norm is rounded, then pairs are turned, as stock: a pair stays in one thread."""
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(X + row * width + column, mask=inside, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
        x = x * tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
        x = x.to(X.dtype.element_ty).to(tl.float32)
        angle = (row % seq) * head_width + column % head_width
        even, odd = tl.split(tl.reshape(x, (BLOCK // 2, 2)))
        cos, _ = tl.split(tl.reshape(tl.load(COS + angle, mask=inside, other=1.0).to(tl.float32), (BLOCK // 2, 2)))
        _, sin = tl.split(tl.reshape(tl.load(SIN + angle, mask=inside, other=0.0).to(tl.float32), (BLOCK // 2, 2)))
        turned = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BLOCK,))
        tl.store(OUT + row * width + column, turned.to(OUT.dtype.element_ty), mask=inside)
