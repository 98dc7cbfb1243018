"""Every implementation against the definition, and the definition against dense attention and a loop over blocks."""

import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.videogen.attention.cases import Problem, apart, problem
from videogen.attention import gather, reference, triton_kernels, triton_sparse
from videogen.attention.dense import dense
from videogen.attention.flex import merged, summaries
from videogen.attention.route import MAX_VARIANCE_TERM, wide

CASES = [
    (333, 37, (32, 16), [6, 99, 8], 1),  # short last blocks, a dense head
    (256, 0, (32, 16), [5, 5], 2),  # no sinks, nothing short
    (131, 33, (64, 16), [5, 6], 1),
]


@pytest.mark.parametrize("tail", ["none", "mean", "variance"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_gathering_is_what_the_definition_says(case: tuple[Any, ...], tail: str) -> None:
    p = problem(*case[:4], batch=case[4])
    wanted, wanted_lse = reference.attend(*p.layer, tail)
    out, lse = gather.attend(*p.layer, tail)
    assert apart(out[:, p.blocks.first :], wanted) < 1e-6 and torch.allclose(lse, wanted_lse, atol=1e-5)
    if p.blocks.first:
        assert torch.equal(out[:, : p.blocks.first], dense(p.query[:, : p.blocks.first], p.key, p.value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_with_every_block_kept_it_is_dense_attention(dtype: torch.dtype) -> None:
    p = problem(205, 21, (32, 16), [99, 99])
    query, key, value = (x.to(dtype) for x in (p.query, p.key, p.value))
    wanted = dense(query.to(wide(dtype)), key.to(wide(dtype)), value.to(wide(dtype)))
    for module in (gather, reference):
        out, _ = module.attend(query, key, value, p.blocks, p.route, p.pooled, "variance")
        assert apart(out[:, -184:].to(wide(dtype)), wanted[:, -184:]) < (1e-3 if dtype == torch.float16 else 1e-6)


def test_the_definition_by_hand() -> None:
    p = problem(60, 4, (8, 4), [5])
    out, _ = reference.attend(*p.layer, "variance")
    row, scale = 31, p.query.shape[-1] ** -0.5
    q, keys, values = p.query[0, row, 0], p.key[0, :, 0], p.value[0, :, 0]
    weights, total = torch.zeros(16), 0.0
    kept = p.route.kept[0, 0, (row - 4) // 8]
    columns = [(scale * q @ keys[k], values[k]) for k in range(4)]
    for block in range(p.blocks.num_k):
        rows = range(4 + 4 * block, 8 + 4 * block)
        if kept[block]:
            columns += [(scale * q @ keys[k], values[k]) for k in rows]
            continue
        inside = keys[list(rows)]
        spread = 0.5 * scale**2 * (q.square() @ inside.var(0, unbiased=False))
        columns.append((scale * q @ inside.mean(0) + math.log(4) + min(spread, MAX_VARIANCE_TERM), values[list(rows)].mean(0)))
    for logit, value in columns:
        weights, total = weights + logit.exp() * value, total + logit.exp()
    assert 0 < int(kept.sum()) < p.blocks.num_k and apart(out[0, row - 4, 0], weights / total) < 1e-5


def test_two_parts_merge_by_log_sum_exp() -> None:
    p = problem(333, 37, (32, 16), [6, 99])
    wanted, wanted_lse = reference.attend(*p.layer, "variance")
    exact, lse = reference.attend(*p.layer, "none")
    out, both = merged(exact, lse, *summaries(p.query, p.blocks, p.route, p.pooled, "variance"))
    assert apart(out, wanted) < 1e-6 and torch.allclose(both, wanted_lse, atol=1e-5)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The kernels under Triton's interpreter, which must be chosen before Triton is imported: with a Triton of their own."""
    names = [name for name in sys.modules if name.partition(".")[0] == "triton" and not name.startswith("triton._C")]
    mine = {name: sys.modules.pop(name) for name in names}
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = importlib.util.spec_from_file_location("interpreted_kernels", triton_kernels.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton" and not name.startswith("triton._C")]:
            del sys.modules[name]
        sys.modules.update(mine)


@pytest.mark.skipif(not triton_kernels.IS_AVAILABLE, reason="no Triton for this platform")
def test_the_kernel_is_what_the_definition_says(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sparse, "triton_kernels", kernels)
    p = problem(131, 21, (32, 16), [6, 99], width=16)
    for launch, tail in (
        (triton_sparse.Launch(32, paired=True, tail=(16, 1)), "variance"),
        (triton_sparse.Launch(16, paired=False, has_tma=True, tail=(16, 1)), "mean"),
    ):
        check(p, launch, tail)
    check(problem(64, 0, (32, 16), [3]), triton_sparse.Launch(32, paired=False, has_tma=True, tail=(16, 1)), "variance")  # no sinks: Wan


def check(p: Problem, launch: triton_sparse.Launch, tail: str) -> None:
    out = torch.full(p.query.shape, math.nan)
    columns = (p.pooled.key, p.pooled.variance, p.pooled.value)
    lse = triton_sparse.run_kernel(p.query, p.key, p.value, columns, p.route, p.blocks, tail, launch, out)
    wanted, wanted_lse = reference.attend(*p.layer, tail)
    assert apart(out[:, p.blocks.first :], wanted) < 1e-6 and torch.allclose(lse, wanted_lse, atol=1e-5)


@pytest.mark.skipif(not triton_kernels.IS_AVAILABLE, reason="no Triton for this platform")
def test_the_kernel_compiles_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The interpreter takes what the compiler refuses; needs no device."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"D": 16, "BM": 16, "BN": 16, "BT": 16, "P": 2, "SHARED": 2, "TAIL": 2, "TAIL_STAGES": 1}
    constants |= {"EXACT": True, "RAGGED": True, "TMA": False}
    kinds = {"*bf16": "Q K V K_DESC V_DESC MEAN_K VAR_K MEAN_V OUT", "*i32": "LISTS BUDGETS", "*u8": "KEPT", "*fp32": "LSE"}
    kinds |= {"fp32": "scale most"}
    kind_of = {name: kind for kind, names in kinds.items() for name in names.split()} | dict.fromkeys(constants, "constexpr")
    names = triton_kernels.sparse_kernel.arg_names
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(triton_kernels.sparse_kernel, {name: kind_of.get(name, "i32") for name in names}, constexprs=values)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 1})
    assert "mma" in compiled.asm["ptx"]
