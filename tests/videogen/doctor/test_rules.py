"""Each way in which speed is lost without an error, planted as facts, is found and told with what to do; sound facts are quiet."""

import pytest

from videogen.doctor.report import Row, table
from videogen.doctor.rules import (
    Call,
    attention_family,
    check_attention,
    check_collectives,
    check_compile,
    check_convolution,
    check_cudnn,
    check_elementwise,
    check_hub,
    check_products,
    check_threads,
    check_xformers,
)

FLASH, MATH = "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_attention_math"
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0"
CASTS = (  # as the profiler names them on a GPU
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>(int)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}>",
    "Memcpy DtoD (Device -> Device)",
)
EAGER = Call((("aten::mm", 2.0), ("aten::_softmax", 1.0)), 3.0)
TWO = Call((("vectorized_elementwise_kernel<silu>", 1.0), ("vectorized_elementwise_kernel<mul>", 1.0)), 2.0)
NO_HUB = {"transformer": "native", "vae": "flash_hub"}


@pytest.mark.parametrize(
    ("names", "family"),
    [
        ([FLASH], "flash (CPU)"),
        ([MATH, "aten::_softmax"], "math"),
        ([CUDNN, "aten::_cudnn_attention_forward"], "cuDNN"),
        (["void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "aten::_flash_attention_forward"], "FlashAttention-2"),
        (["fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention)"], "cutlass efficient"),
        (["aten::mm", "aten::_softmax"], "eager softmax"),
        (["some_new_kernel"], "unknown"),
    ],
)
def test_families_are_read_from_names_and_never_guessed(names: list[str], family: str) -> None:
    assert attention_family(names) == family
    assert attention_family(names, is_tiled=True) == ("bfloat16 tiles" if family == "eager softmax" else family)


@pytest.mark.parametrize(
    ("row", "word", "fix"),
    [
        (
            check_attention("native", Call(((FLASH, 1.0),), 1.0), "all true", is_cuda=True, best=None, own_ms=1.0),
            "all-True mask",
            "no mask",
        ),
        (
            check_attention("native", Call(((MATH, 1.0),), 1.0), "none", is_cuda=True, best=None, own_ms=1.0),
            "held to its math",
            "sdpa_kernel",
        ),
        (
            check_attention("native", Call(((FLASH, 2.0),), 2.0), "none", is_cuda=False, best=("x", 1.0), own_ms=2.0),
            "2.00x",
            "doctor --save",
        ),
        (check_attention("native", Call((("k", 1.0),), 1.0), "none", is_cuda=True, best=None, own_ms=1.0), "no kernel of a known", ""),
        (check_attention("native", EAGER, "none", is_cuda=False), "no attention kernel", "scaled_dot_product_attention"),
        (
            check_attention("native", EAGER, "none", is_cuda=False, best=("native", 1.0), own_ms=3.0, is_tiled=True),
            "native is 3.00x as fast",
            "where a whole block is faster",
        ),
        (
            check_attention("sdpa", Call(((MATH, 1.0),), 1.0), "none", is_cuda=False, area="text encoder", unit="text"),
            "held to its math",
            "sdpa_kernel",
        ),
        (
            check_convolution("VAE", "float32", Call((("aten::slow_conv3d_forward", 9.0),), 10.0), is_cuda=False),
            "no fast kernel",
            "bfloat16",
        ),
        (check_convolution("VAE", "bfloat16", Call((("vol2col_kernel", 9.0),), 10.0), is_cuda=True), "no fast kernel", "channels_last_3d"),
        (check_xformers("0.0.35", False), "C++ extension does not load", "install the build"),
        (check_cudnn(91900, ["/usr/lib/libcudnn.so.9"], is_hopper_or_later=True), "another cuDNN", "unset LD_LIBRARY_PATH"),
        (
            check_cudnn(90800, ["/x/site-packages/nvidia/cudnn/lib/libcudnn.so.9"], is_hopper_or_later=True),
            "FlashAttention-2",
            "pip install",
        ),
        (check_hub(NO_HUB, is_offline=True, missing=["flash_hub"])[0], "process is offline", "vae.set_attention_backend"),
        (check_hub(NO_HUB, is_offline=False, missing=["flash_hub"])[0], "never loads it", "unset DIFFUSERS_ATTN_BACKEND"),
        (check_compile({"graph_break": {"call to print": 3}}), "3 graph breaks", "graph_breaks"),
        (check_compile({"unimplemented": {"Dynamo recompile limit exceeded": 1}}), "recompile limit was hit", "recompiles"),
        (check_collectives({"NCCL_P2P_DISABLE": "1"}, gpus=2, has_peer_access=True), "host memory", "unset NCCL_P2P_DISABLE"),
        (check_collectives({}, gpus=2, has_peer_access=False), "cannot reach", "nvidia-smi topo -p2p r"),
        (check_threads(8, 2, "passive"), "wait for each other", "OMP_NUM_THREADS=2"),
        (check_threads(1, 4, "passive"), "the other processors wait", "OMP_NUM_THREADS=4"),
        (check_products("linears", "bfloat16", "bfloat16", Call((("gemm", 1.0), ("aten::copy_", 1.0)), 2.0)), "50% of the time", ""),
        *[
            (check_products("linears", "bfloat16", "bfloat16", Call((("nvjet", 1.0), (name, 1.0)), 2.0)), "50%", "one format")
            for name in CASTS
        ],
        (check_elementwise("SwiGLU", "swiglu", "torch", TWO, "1 ms", is_cuda=True), "asks for no fused", "savings kernels"),
        (check_elementwise("SwiGLU", "swiglu", "triton", TWO, "1 ms", "off: no Triton", is_cuda=True), "off: no Triton", "install triton"),
    ],
)
def test_a_planted_loss_is_found_with_its_reason_and_cure(row: Row | None, word: str, fix: str) -> None:
    assert row is not None and row.is_slow and word in row.reason and fix in row.fix
    assert table([row]).startswith("! ") and "1 of 1 areas" in table([row])


def test_sound_facts_are_quiet() -> None:
    sound = [
        check_attention("native", Call(((CUDNN, 1.0),), 1.0), "none", is_cuda=True, best=("native", 1.0), own_ms=1.0),
        check_convolution("VAE", "float32", Call((("aten::slow_conv3d", 0.1), ("aten::mm", 9.9)), 10.0), is_cuda=False),
        check_cudnn(91900, ["/x/site-packages/nvidia/cudnn/lib/libcudnn.so.9"], is_hopper_or_later=True),
        check_collectives({"NCCL_P2P_DISABLE": "0"}, gpus=8, has_peer_access=True),
        check_collectives({}, gpus=2, has_peer_access=True),
        check_threads(2, 2, None),
        check_threads(1, 2, None),
        check_hub({"vae": "flash_hub"}, is_offline=True)[0],  # loaded before
        check_attention("native", EAGER, "none", is_cuda=False, best=("bfloat16 tiles", 1.0), own_ms=1.0, is_tiled=True),
        check_attention("native", Call(((FLASH, 2.0),), 2.0), "partial", is_cuda=False, area="video VAE attention", unit="chunk"),
        check_products("linears", "bfloat16", "bfloat16", Call((("nvjet", 9.0), (CASTS[0], 1.0)), 10.0)),
        check_elementwise("SwiGLU", "swiglu", "torch", TWO, "1 ms", is_cuda=False),
        check_elementwise("SwiGLU", "swiglu", "triton", Call((("swiglu", 1.0), ("aten::empty", 0.0)), 1.0), "1 ms", is_cuda=True),
    ]
    assert not any(row is None or row.is_slow for row in sound) and "nothing runs on a slow way" in table([r for r in sound if r])
    silent = (
        check_xformers(None, False),
        check_xformers("0.0.35", True),
        check_cudnn(None, [], is_hopper_or_later=False),
        check_compile({}),
    )
    assert (
        silent == (None,) * 4
        and check_collectives({}, gpus=1, has_peer_access=True) is None
        and check_hub({"vae": "native"}, is_offline=True) == []
    )


def test_an_elementwise_area_says_what_ran_and_what_the_recipe_asked_for() -> None:
    ran = Call((("swiglu", 1.0), ("aten::empty", 0.0)), 1.0)
    assert check_elementwise("SwiGLU", "swiglu", "triton", ran, "1 ms", is_cuda=True).executed == "triton, 1 kinds of kernels"
    torch = check_elementwise("SwiGLU", "swiglu", "triton", TWO, "1 ms", "off: why", is_cuda=False)
    assert (torch.requested, torch.executed, torch.reason) == ("triton", "torch, 2 kinds of kernels", "off: why")
    own = check_elementwise("q/k norm + RoPE", "qk_rotate", "triton", TWO, "1 ms", is_cuda=False, own="with the bfloat16 attention")
    assert own.executed == "with the bfloat16 attention" and "not timed apart" in own.cost
