# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"
"""The Triton kernels: sparse attention, and block means and variances. Launched by `triton_sparse` and `triton_pool`.

Arguments carry no annotation: a kernel's names must be the kernel's own. Strides are named tensor_axis, as in `q_s`.
"""

from typing import Any

import torch

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # a torch built without it: `select` says so
    triton = None

IS_AVAILABLE = triton is not None
IS_INTERPRETED = triton is not None and bool(triton.knobs.runtime.interpret)


def descriptor(x: torch.Tensor, block: int) -> Any:
    """Rows of x (B, S, H, D) as a table for the tensor memory accelerator, read `block` rows of one head at a time."""
    batch, rows, heads, width = x.shape
    return TensorDescriptor(x, [batch * rows, heads * width], [x.stride(1), 1], [block, width])


if triton is not None:

    @triton.jit
    def _tile(base, row, stride, end, D: tl.constexpr, MASKED: tl.constexpr):
        """Rows (BN, D); where masked, zeros from `end` on."""
        at = base + row.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
        return tl.load(at, mask=(row < end)[:, None], other=0.0) if MASKED else tl.load(at)

    @triton.jit
    def _absorb(acc, total, top, scores, values):
        """One step of the online softmax, in base 2."""
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.math.exp2(scores - higher[:, None])
        shrink = tl.math.exp2(top - higher)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        return acc, total * shrink + tl.sum(weights, 1), higher

    @triton.jit
    def _masked(acc, total, top, q, keys, values, row, end, k_s, v_s, scale2, D: tl.constexpr):
        """Rows of which those before `end` are there: the sinks, and blocks that do not come in pairs or are short."""
        scores = tl.dot(q, tl.trans(_tile(keys, row, k_s, end, D, True)), input_precision="ieee") * scale2
        scores = tl.where((row < end)[None, :], scores, float("-inf"))
        return _absorb(acc, total, top, scores, _tile(values, row, v_s, end, D, True))

    @triton.jit
    def _summaries(
        acc, total, top, q, MEAN_K, VAR_K, MEAN_V, skipped, pooled, num_k, last_k,
        scale, most, D: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """Every block that is not kept as one column: mean key, log n, clamped variance term, mean value."""
        d = tl.arange(0, D)
        scale2 = scale * 1.4426950408889634
        squares = (q.to(tl.float32) * q.to(tl.float32)).to(q.dtype)
        for start in tl.range(0, num_k, BT, num_stages=STAGES):
            j = start + tl.arange(0, BT)
            at = pooled + j[:, None] * D + d[None, :]
            is_there = (j < num_k)[:, None]
            scores = tl.dot(q, tl.trans(tl.load(MEAN_K + at, mask=is_there, other=0.0)), input_precision="ieee") * scale2
            if TAIL == 2:
                spread = tl.dot(squares, tl.trans(tl.load(VAR_K + at, mask=is_there, other=0.0)), input_precision="ieee")
                scores += tl.minimum(spread * (0.5 * scale * scale2), most * 1.4426950408889634)
            scores += tl.math.log2(tl.where(j == num_k - 1, last_k, BN).to(tl.float32))[None, :]
            is_out = tl.load(skipped + j, mask=j < num_k, other=1) != 0
            scores = tl.where(is_out[None, :], float("-inf"), scores)
            acc, total, top = _absorb(acc, total, top, scores, tl.load(MEAN_V + at, mask=is_there, other=0.0))
        return acc, total, top

    @triton.jit
    def sparse_kernel(
        Q, K, V, K_DESC, V_DESC, MEAN_K, VAR_K, MEAN_V,
        LISTS, BUDGETS, KEPT, OUT, LSE,
        q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, o_b, o_s, o_h,
        heads, first, rows, tiles, num_q, num_k, width, last_k, scale, most,
        D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, P: tl.constexpr, SHARED: tl.constexpr,
        TAIL: tl.constexpr, TAIL_STAGES: tl.constexpr, EXACT: tl.constexpr, RAGGED: tl.constexpr, TMA: tl.constexpr,
    ):  # fmt: skip
        """BM query rows of one head; `SHARED` programs share the list of a query block."""
        tile, bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
        block, b, h = tile // SHARED, (bh // heads).to(tl.int64), bh % heads
        rows_q = first + tile * BM + tl.arange(0, BM)
        q = _tile(Q + b * q_b + h * q_h, rows_q, q_s, rows, D, True)
        keys, values = K + b * k_b + h * k_h, V + b * v_b + h * v_h
        acc, total = tl.zeros((BM, D), tl.float32), tl.zeros((BM,), tl.float32)
        top = tl.full((BM,), -1.0e30, tl.float32)  # finite, so that a step without any column leaves no NaN
        scale2 = scale * 1.4426950408889634
        n = tl.minimum(tl.load(BUDGETS + h), num_k)
        if EXACT:
            for start in tl.range(0, first, BN, num_stages=1):
                acc, total, top = _masked(acc, total, top, q, keys, values, start + tl.arange(0, BN), first, k_s, v_s, scale2, D)
            is_dense = n == num_k
            listed = LISTS + (bh.to(tl.int64) * num_q + block) * width
            whole = n
            if RAGGED:  # the short block comes last in an ascending list
                last = tl.load(listed + tl.minimum(n, width) - 1)
                whole = n - tl.where(is_dense | (last == num_k - 1), 1, 0)
            for step in range(whole // P):
                if TMA:
                    one = tl.where(is_dense, step, tl.load(listed + tl.minimum(step, width - 1)))
                    at = (b * rows + first + one * BN).to(tl.int32)
                    scores = tl.dot(q, tl.trans(K_DESC.load([at, h * D])), input_precision="ieee") * scale2
                    acc, total, top = _absorb(acc, total, top, scores, V_DESC.load([at, h * D]))
                else:
                    slot = step * P + tl.arange(0, P * BN) // BN
                    j = tl.where(is_dense, slot, tl.load(listed + tl.minimum(slot, width - 1)))
                    row = first + j * BN + tl.arange(0, P * BN) % BN
                    scores = tl.dot(q, tl.trans(_tile(keys, row, k_s, rows, D, False)), input_precision="ieee") * scale2
                    acc, total, top = _absorb(acc, total, top, scores, _tile(values, row, v_s, rows, D, False))
            for step in tl.range(whole // P * P, n, num_stages=1):
                j = tl.where(is_dense, step, tl.load(listed + tl.minimum(step, width - 1)))
                row = first + j * BN + tl.arange(0, BN)
                acc, total, top = _masked(acc, total, top, q, keys, values, row, rows, k_s, v_s, scale2, D)
        if TAIL > 0:  # noqa: SIM102  (known when compiled; the next is not)
            if n < num_k:
                skipped, pooled = KEPT + (bh.to(tl.int64) * num_q + block) * num_k, bh.to(tl.int64) * num_k * D
                acc, total, top = _summaries(
                    acc, total, top, q, MEAN_K, VAR_K, MEAN_V, skipped, pooled, num_k, last_k, scale, most, D, BN, BT, TAIL, TAIL_STAGES
                )  # fmt: skip
        is_empty = total == 0.0
        o_at = OUT + b * o_b + h * o_h + rows_q.to(tl.int64)[:, None] * o_s + tl.arange(0, D)[None, :]
        tl.store(o_at, (acc / tl.where(is_empty, 1.0, total)[:, None]).to(OUT.dtype.element_ty), mask=rows_q[:, None] < rows)
        lse = tl.where(is_empty, float("-inf"), (top + tl.math.log2(total)) * 0.6931471805599453)
        tl.store(LSE + bh.to(tl.int64) * (rows - first) + rows_q - first, lse, mask=rows_q < rows)

    @triton.jit
    def pool_kernel(
        X, MEAN, VARIANCE, x_b, x_s, x_h, heads, first, rows, count,
        D: tl.constexpr, BLOCK: tl.constexpr, HAS_VARIANCE: tl.constexpr,
    ):  # fmt: skip
        """One block of one head; summed in float32."""
        block, bh = tl.program_id(0) % count, tl.program_id(0) // count
        row, d = first + block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
        is_there = (row < rows)[:, None]
        at = X + (bh // heads).to(tl.int64) * x_b + (bh % heads) * x_h + row.to(tl.int64)[:, None] * x_s + d[None, :]
        x = tl.load(at, mask=is_there, other=0.0).to(tl.float32)
        size = tl.minimum(BLOCK, rows - first - block * BLOCK).to(tl.float32)
        mean = tl.sum(x, 0) / size
        out = (bh * count + block).to(tl.int64) * D + d
        tl.store(MEAN + out, mean)
        if HAS_VARIANCE:
            apart = tl.where(is_there, x - mean[None, :], 0.0)
            tl.store(VARIANCE + out, tl.sum(apart * apart, 0) / size)
