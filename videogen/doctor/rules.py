"""From facts to findings: pure functions on what was collected, one for each way in which speed is lost without an error."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from videogen.doctor.report import Row

TILES, EAGER = "bfloat16 tiles", "eager softmax"
_FAMILIES = (  # the first pattern found among the kernels of a call names what attended
    ("cuDNN", r"cudnn_generated.*sdpa|cudnn.*(flash|fmha)|_cudnn_attention"),
    ("FlashAttention-3", r"hopper.*flash|flash.*(sm90|fa3)|flash::flashattnfwdsm90"),
    ("FlashAttention-2", r"flash_fwd|pytorch_flash|_flash_attention_forward"),
    ("flash (CPU)", r"_scaled_dot_product_flash_attention_for_cpu"),
    ("cutlass efficient", r"fmha_cutlass|_efficient_attention_forward|mem_eff"),
    ("math", r"_scaled_dot_product_attention_math"),
    (EAGER, r"^aten::_softmax$"),
)
_SLOW_CONV = r"slow_conv3d|slow_conv_dilated3d|vol2col"
_COPIES = r"aten::(_to_copy|copy_)$|nchwtonhwc|nhwctonchw|copy_kernel_cuda|memcpy dtod"
_SLOW_ATTENTION = {
    "math": "scaled_dot_product_attention is held to its math version: scores of every pair are written to memory",
    EAGER: "a softmax of its own, no attention kernel: scores of every pair are written to memory",
    "unknown": "no kernel of a known attention ran",
}
_ATTENTION_FIX = {"math": "remove sdpa_kernel(MATH) or enable_flash_sdp(False)", EAGER: "attend through scaled_dot_product_attention"}


def attention_family(names: Sequence[str], *, is_tiled: bool = False) -> str:
    """Which attention these kernels or operators are; `unknown` is never a guess.

    `is_tiled`: our own processor attended, and products in bfloat16 ran; its tiles have no kernel name of their own.
    """
    lowered = [name.lower() for name in names]
    found = next((family for family, pattern in _FAMILIES if any(re.search(pattern, name) for name in lowered)), "unknown")
    return TILES if found == EAGER and is_tiled else found


@dataclass(frozen=True, slots=True)
class Call:
    """One call as the profiler saw it: kernels (operators on a CPU) by name with their milliseconds, slowest first.

    `products` are the number formats that matrix products took their operands in, as torch's dispatcher names them.
    """

    kernels: tuple[tuple[str, float], ...]
    ms: float
    products: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """Without the times."""
        return tuple(name for name, _ in self.kernels)


def check_attention(
    requested: str,
    seen: Call,
    mask: str,
    *,
    is_cuda: bool,
    best: tuple[str, float] | None = None,
    own_ms: float | None = None,
    area: str = "dense attention",
    is_tiled: bool = False,
    unit: str = "block",
) -> Row:
    """What attended in one `unit` of an area. `mask` is none, all true, or partial; `best` the fastest candidate with its milliseconds,
    and `own_ms` what ran took beside it. Without candidates the cost is that of the whole call."""
    executed, reasons, fixes = attention_family(seen.names, is_tiled=is_tiled), [], []
    if mask == "all true":
        reasons.append("an all-True mask goes with every call: it masks nothing, and flash attention refuses masks")
        fixes.append("pass no mask")
    if executed in _SLOW_ATTENTION:
        reasons.append(_SLOW_ATTENTION[executed])
        fixes += [_ATTENTION_FIX[executed]] if executed in _ATTENTION_FIX else []
    gain = own_ms / best[1] if best and own_ms and best[1] > 0 else 1.0
    if best and gain > 1.05:
        reasons.append(f"{best[0]} is {gain:.2f}x as fast here")
        kept = "videogen doctor --save keeps bfloat16 products for such sizes only where a whole block is faster with them"
        fixes.append(kept if executed == TILES else "videogen doctor --save, then the recipe exact")
    if is_cuda and executed == "cutlass efficient":
        reasons.append("neither cuDNN nor flash attention took the call")
    cost = f"{seen.ms if own_ms is None else own_ms:.2f} ms a {unit}" + (f", {best[1]:.2f} ms with {best[0]}" if best else "")
    return Row(area, requested, executed, "; ".join(reasons), cost, "; ".join(fixes), bool(reasons))


def check_convolution(area: str, dtype: str, seen: Call, *, is_cuda: bool) -> Row:
    """Whether 3-D convolutions run on torch's slow path."""
    slow = [(name, ms) for name, ms in seen.kernels if re.search(_SLOW_CONV, name.lower())]
    spent = sum(ms for _, ms in slow)
    if spent <= 0.05 * seen.ms:
        fast = next((name for name in seen.names if "conv" in name.lower()), "no convolution")
        return Row(area, dtype, fast, cost=f"{seen.ms:.1f} ms")
    fix = "vae.to(memory_format=torch.channels_last_3d), then measure again" if is_cuda else "bfloat16 where the result may change"
    return Row(area, dtype, slow[0][0], f"{dtype} conv3d has no fast kernel here", f"{spent:.1f} of {seen.ms:.1f} ms", fix, True)


def check_xformers(version: str | None, has_extension: bool) -> Row | None:
    """xformers that is there without the part that computes."""
    if version is None or has_extension:
        return None
    reason = "its C++ extension does not load beside this torch; diffusers offers the back end all the same"
    fix = "install the build for this torch, or do not choose back end xformers"
    return Row("xformers", f"xformers {version}", "no kernels", reason, "fails when called", fix, True)


def check_cudnn(version: int | None, files: Sequence[str], *, is_hopper_or_later: bool) -> Row | None:
    """A cuDNN other than the wheel's, or one that torch does not attend with."""
    if version is None:
        return None
    outside = [path for path in files if "site-packages" not in path and "dist-packages" not in path]
    if outside:
        reason = "a library path puts another cuDNN before the one torch was built with"
        return Row(
            "cuDNN", "the wheel's own", f"{version} from {outside[0]}", reason, fix="unset LD_LIBRARY_PATH for this process", is_slow=True
        )
    if is_hopper_or_later and version < 91500:
        reason = "torch prefers cuDNN attention on this GPU only from 9.15 on, and takes FlashAttention-2 instead"
        cost = "1.8x per attention call on an H200 (measured elsewhere)"
        return Row("cuDNN", "9.15 or newer", str(version), reason, cost, "pip install -U nvidia-cudnn-cu13 as torch allows", True)
    return Row("cuDNN", "the wheel's own", str(version))


def check_hub(backends: Mapping[str, str], *, is_offline: bool, missing: Collection[str] = ()) -> list[Row]:
    """Back ends that come from the hub at run time, by component. `missing` are those whose kernel this process has not loaded."""
    rows = []
    for component, backend in backends.items():
        if not is_from_hub(backend):
            continue
        reason, fix = "loaded from the hub", ""
        if backend in missing:
            reason = "its kernel comes from the hub and is not loaded here, and a back end named by DIFFUSERS_ATTN_BACKEND never loads it"
            reason = "its kernel comes from the hub, and this process is offline" if is_offline else reason
            fix = f"{component}.set_attention_backend('native'), or unset DIFFUSERS_ATTN_BACKEND"
        is_slow = bool(fix)
        rows.append(Row(f"back end of {component}", backend, "fails when called" if is_slow else backend, reason, "", fix, is_slow))
    return rows


def is_from_hub(backend: str) -> bool:
    """Whether it is downloaded: diffusers' names end so, transformers' are those of repositories."""
    return backend.endswith("_hub") or "/" in backend


def check_compile(counters: Mapping[str, Mapping[str, int]]) -> Row | None:
    """Dynamo's counters: what was not compiled, and why."""
    breaks = dict(counters.get("graph_break", {}))
    limits = {
        name: count
        for group in counters.values()
        for name, count in group.items()
        if re.search(r"recompile.limit|cache.size.limit", name.lower())
    }
    if not breaks and not limits:
        return None
    worst = max([*breaks, *limits], key=lambda name: (breaks | limits)[name]).splitlines()[0][:120]
    what = [*([f"{sum(breaks.values())} graph breaks"] if breaks else []), *(["the recompile limit was hit"] if limits else [])]
    executed = "eager from then on" if limits else "in pieces"
    fix = (
        "find what changes from call to call (TORCH_LOGS=recompiles) and keep it constant"
        if limits
        else "TORCH_LOGS=graph_breaks says where"
    )
    return Row("torch.compile", "one graph a block", executed, f"{', '.join(what)}: {worst}", "", fix, True)


def check_collectives(environment: Mapping[str, str], *, gpus: int, has_peer_access: bool) -> Row | None:
    """How GPUs of one machine reach each other."""
    if gpus < 2:
        return None
    if environment.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        reason = "NCCL_P2P_DISABLE is set: what one GPU sends another goes through host memory"
        return Row(
            "collectives",
            "peer to peer",
            "through host memory",
            reason,
            "1.2x on two cards (reported elsewhere)",
            "unset NCCL_P2P_DISABLE",
            True,
        )
    if has_peer_access:
        return Row("collectives", "peer to peer", "peer to peer")
    reason, cost = "the GPUs cannot reach each other's memory", "1.2x on two cards (reported elsewhere)"
    fix = f"nvidia-smi topo -p2p r says which pair and why (IOMMU, ACS, a virtual machine); videogen doctor --link {gpus} measures it"
    return Row("collectives", "peer to peer", "through host memory", reason, cost, fix, True)


def check_threads(threads: int, cpus: int, policy: str | None) -> Row:
    """Threads of the CPU kernels against the processors this process may use."""
    asked = f"{cpus} processors"
    if threads > cpus:
        return Row(
            "threads", asked, f"{threads} threads", "more threads than processors wait for each other", "", f"OMP_NUM_THREADS={cpus}", True
        )
    if threads == 1 and cpus >= 4:
        reason, fix = "one thread, and the other processors wait", f"OMP_NUM_THREADS={cpus}, or unset it"
        return Row("threads", asked, "1 thread", reason, f"up to {cpus}x in products", fix, True)
    reason = "" if policy else "with other work on the machine, waiting threads spin"
    fix = "" if policy else "OMP_WAIT_POLICY=passive"
    return Row("threads", asked, f"{threads} threads", reason, "", fix)


def check_products(area: str, requested: str, made: str, seen: Call) -> Row:
    """Products of a stretch of the model: which kernel, in which format, and how much of the time goes into conversions."""
    copied = sum(ms for name, ms in seen.kernels if re.search(_COPIES, name.lower()))
    products = [name for name in seen.names if re.search(r"gemm|nvjet|cutlass|::mm$|::addmm$|mkldnn.*(linear|matmul)", name.lower())]
    share = copied / seen.ms if seen.ms else 0.0
    reason = f"{share:.0%} of the time goes into conversions" if share > 0.25 else ""
    fix = "keep rows and weights in one format" if reason else ""
    return Row(area, requested, f"{made}, {products[0] if products else 'unknown'}", reason, f"{seen.ms:.2f} ms", fix, bool(reason))


def check_elementwise(
    area: str, kernel: str, requested: str, seen: Call, cost: str, reason: str = "", *, is_cuda: bool, own: str = ""
) -> Row:
    """One operation between the products. `kernel` is our Triton kernel's name, `requested` what the recipe asks for, `own` who does
    the work in place of either."""
    if own:
        return Row(area, requested, own, reason, "part of its own pass, not timed apart")
    kinds, is_fused = sum(ms > 0.02 * seen.ms for _, ms in seen.kernels), any(name.startswith(kernel) for name in seen.names)
    executed = f"{'triton' if is_fused else 'torch'}, {kinds} kinds of kernels"
    is_slow = is_cuda and not is_fused
    reasons = [reason] if reason else ["the recipe asks for no fused kernels"] if is_slow and requested == "torch" else []
    fix = "the recipe exact, or its savings kernels; pip install triton where it is missing" if is_slow else ""
    return Row(area, requested, executed, "; ".join(reasons), cost, fix, is_slow)
