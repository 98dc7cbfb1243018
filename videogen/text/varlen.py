"""Attention of transformers' batching loop without masks: each request attends to its own pages alone.

Its `sdpa` attends from every query of a batch to the keys of all requests and masks most of them away: work grows with the square of
the batch. Here torch's variable-length kernel (FlashAttention's, `torch.nn.attention.varlen`) gets the lengths instead, and a CPU goes
request by request. The name has "flash" in it: by that transformers knows that it need not build a mask.
"""

import inspect
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from videogen.errors import bad
from videogen.kernels.check import FAILS

logger = logging.getLogger(__name__)

NAME = "flash_varlen"
PAGED_NAME = f"paged|{NAME}"  # where the attention itself writes to the cache (transformers before 5.23)
FULL = "full_attention"
WITHIN = 2e-2  # relative, of half precision
_UNKNOWN = ("sliding_window", "softcap", "s_aux", "position_bias")  # what would change the answer
_TAKES = inspect.signature(varlen_attn).parameters  # torch 2.11 knows no shared heads of keys


def suits(model: Any) -> bool:
    """Whether every layer of a language model attends to everything before it, and the kernel takes its numbers."""
    config = model.config.get_text_config()
    if kinds := getattr(config, "layer_types", None):
        has_window = {*kinds} != {FULL}
    else:  # Mistral, Phi: a window for every layer, unless the config says that it is not used
        has_window = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None
    if has_window or is_capped or model.config._attn_implementation != "sdpa":
        return False
    weight, heads = next(iter(model.parameters())), config.num_attention_heads
    sizes = (heads, getattr(config, "num_key_value_heads", None) or heads, getattr(config, "head_dim", None) or config.hidden_size // heads)
    if weight.device.type != "cuda":
        return bool(weight.device.type == "cpu")
    if reason := kernel_fault(weight.device, weight.dtype, *sizes):
        logger.info("text engine: transformers' own attention, since torch's variable-length kernel %s", reason)
    return not reason


@cache
def kernel_fault(device: torch.device, dtype: torch.dtype, heads: int, shared: int, size: int) -> str:
    """Why the kernel cannot be used there: it fails, or is not its definition in float32; empty where it is. Tried once a process."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes no {dtype}"
    queries, keys = [1, 40, 7], [70, 40, 50]
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(n), h, size, generator=rng).to(dtype) for n, h in ((queries, heads), (keys, shared), (keys, shared)))
    begins, seen = (torch.tensor([0, *n]).cumsum(0) for n in (queries, keys))
    wanted = one_by_one(q.float(), k.float(), v.float(), begins.tolist(), seen.tolist(), None)
    q, k, v, begins, seen = (each.to(device) for each in (q, k, v, begins, seen))
    try:
        found = _ragged(q, k, v, begins, seen, (max(queries), max(keys)), None)
    except FAILS as error:
        return f"fails ({type(error).__name__}: {str(error)[:120]})"
    apart = float((found.cpu().float() - wanted).norm() / wanted.norm())
    return "" if apart < WITHIN else f"is {apart:.2g} from its definition"


def put_on(model: Any, *, is_paged: bool) -> None:
    """Have a language model attend so, not what it sees with; `is_paged` where transformers wants that in the name."""
    name = PAGED_NAME if is_paged else NAME
    AttentionInterface.register(name, attend)
    for config in (model.config, model.config.get_text_config()):
        config._attn_implementation_internal = name  # the public setter reaches every part, and looks for a package of that name


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    cache: Any = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: Any = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Queries (1, H, T, D), one request behind the other, over keys and values (1, K, S, D); returns (1, T, H, D).

    `cu_seq_lens_*` (N + 1) are where requests begin. Without them it is one sequence whose end is the keys' end; padding, or several
    sequences, raise RequestError: transformers makes no mask for this attention.
    """
    if odd := sorted(name for name in _UNKNOWN if more.get(name) is not None):
        raise bad("text model", f"attention with {', '.join(odd)}", "none of these", "use prefix snapshots")
    if cu_seq_lens_q is None and (len(query) > 1 or (mask is not None and not bool(mask.all()))):
        told = f"{len(query)} sequences, {'padded' if mask is not None else 'no padding'}"
        raise bad("text model", told, "one, without padding, while its requests are batched", "close the engine first")
    if cache is not None:
        pages = {name: more[name] for name in ("read_index", "write_index")}
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **pages)  # (S, K, D)
    else:
        key, value = (each[0].transpose(0, 1) for each in (key, value))
    query = query[0].transpose(0, 1)
    if cu_seq_lens_q is None:
        starts = [torch.tensor([0, len(each)], dtype=torch.int32, device=query.device) for each in (query, key)]
        longest = [len(query), len(key)]
    else:
        starts = [cu_seq_lens_q, _of_kind(cu_seq_lens_k)]
        longest = [_of_kind(more.get(f"max_length_{side}", more.get(f"max_seqlen_{side}"))) for side in "qk"]
    if query.device.type == "cpu":
        return one_by_one(query, key, value, starts[0].tolist(), starts[1].tolist(), scaling)[None], None
    return _ragged(query, key, value, starts[0], starts[1], (longest[0], longest[1]), scaling)[None], None


def _ragged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries_from: torch.Tensor,
    keys_from: torch.Tensor,
    longest: tuple[int, int],
    scaling: float | None,
) -> torch.Tensor:
    """What `one_by_one` defines, by torch's kernel."""
    how: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}
    if "enable_gqa" in _TAKES:
        how["enable_gqa"] = True
    else:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    out: Any = varlen_attn(query, key, value, queries_from.to(torch.int32), keys_from.to(torch.int32), *longest, **how)
    return cast(torch.Tensor, out)


def one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries_from: Sequence[int],
    keys_from: Sequence[int],
    scaling: float | None,
) -> torch.Tensor:
    """The definition: causal attention of every request, its last query at its last key; (T, H, D) over (S, K, D)."""
    out = torch.empty((*query.shape[:2], value.shape[-1]), dtype=query.dtype, device=query.device)
    for index in range(len(queries_from) - 1):
        mine = slice(queries_from[index], queries_from[index + 1])
        seen = slice(keys_from[index], keys_from[index + 1])
        q, k, v = (each.transpose(0, 1)[None] for each in (query[mine], key[seen], value[seen]))
        mask: Any = None if q.shape[2] == 1 else causal_lower_right(q.shape[2], k.shape[2])
        out[mine] = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True)[0].transpose(0, 1)
    return out


def _of_kind(found: Any) -> Any:
    return found[FULL] if isinstance(found, dict) else found
