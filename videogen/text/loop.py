"""Transformers' batching loop, started and asked the same way on every version: an empty cache, a pause, an eviction, a count of hits.

Not public interface there, and held by tests here: `batch_processor.cache`, its `search_prefix_match` and `evict_cached_blocks`.
"""

import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from videogen.errors import EnvironmentFault, bad, say
from videogen.text import varlen

START_S = 60.0


@dataclass(frozen=True, slots=True)
class Paging:
    """Settings of the paged cache. page: tokens a page, and the unit of sharing; pages: how many, 0 for what memory allows.

    prefill: most tokens of one forward, decoding requests first; at_once: most requests of one forward, 0 for no limit.
    """

    page: int = 32
    pages: int = 1024
    prefill: int = 2048
    at_once: int = 0

    def __post_init__(self) -> None:
        for name, least in (("page", 4), ("pages", 0), ("prefill", 1), ("at_once", 0)):
            if getattr(self, name) < least:
                raise bad(f"paging {name}", getattr(self, name), f"at least {least}", f"change {name}")


def has_loop(model: Any) -> bool:
    """Whether this transformers has continuous batching for the model."""
    return hasattr(model, "init_continuous_batching")


def start_loop(model: Any, paging: Paging, matched: MutableMapping[str, int], *, is_sharing: bool, is_sampling: bool) -> Any:
    """A running manager with an empty cache; `matched` gets, by request, how many tokens of its prompt were cached.

    Raises EnvironmentFault when there is none for the model, or it does not start.
    """
    if not has_loop(model):
        told = f"transformers without it for {type(model).__name__}"
        raise EnvironmentFault(say("continuous batching", told, "one with it", "use prefix snapshots"))
    saved, manager = attention_of(model), None
    try:
        manager = _manager(model, paging, is_sharing=is_sharing, is_sampling=is_sampling)
        manager.start()
        _wait(manager)
    except BaseException:
        if manager is not None:
            manager.destroy()
        set_attention(saved)
        raise
    _count_hits(cache_of(manager), matched)
    return manager


def attention_of(model: Any) -> list[tuple[Any, Any]]:
    """Every config of a model with the attention that it names."""
    found, left = list[tuple[Any, Any]](), [model.config]
    while left:
        config = left.pop()
        found.append((config, config._attn_implementation_internal))
        left += [part for name in config.sub_configs if (part := getattr(config, name, None)) is not None]
    return found


def set_attention(saved: list[tuple[Any, Any]]) -> None:
    """Give every config its attention back."""
    for config, name in saved:
        config._attn_implementation_internal = name


def _manager(model: Any, paging: Paging, *, is_sharing: bool, is_sampling: bool) -> Any:
    known = {field.name for field in fields(ContinuousBatchingConfig)}
    is_paged = "auto_switch_to_flash" not in known  # names of their own; else it picks one, and may ask the hub
    if varlen.suits(model):
        varlen.put_on(model, is_paged=is_paged)
    elif is_paged and "paged|" not in str(model.config._attn_implementation):
        model.set_attn_implementation(f"paged|{model.config._attn_implementation}")
    drawing = {"do_sample": True, "temperature": 0.5, "top_p": 0.5, "top_k": 2} if is_sampling else {"do_sample": False}
    generation = GenerationConfig(**drawing, max_new_tokens=1, eos_token_id=-1, pad_token_id=0)
    config = _config(known, paging, is_sharing=is_sharing, is_sampling=is_sampling)
    return model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)


def _wait(manager: Any) -> None:
    until = time.perf_counter() + START_S
    while cache_of(manager) is None:
        if not manager.is_running() or time.perf_counter() > until:
            reason = str(getattr(manager.background_thread_status, "fatal_error", "") or "no cache")[:200]
            raise EnvironmentFault(say("continuous batching", reason, "a loop that starts", "use prefix snapshots"))
        time.sleep(0.01)


def _config(known: set[str], paging: Paging, *, is_sharing: bool, is_sampling: bool) -> Any:
    wanted = {
        "page_size" if "page_size" in known else "block_size": paging.page,
        "num_blocks": paging.pages or None,
        "max_batch_tokens": paging.prefill,
        "max_requests_per_batch": paging.at_once or None,
        "allow_block_sharing": is_sharing,
        "auto_switch_to_flash": False,  # it would change the attention of a text encoder that others use, and may ask the hub
        "per_request_processors": is_sampling,
        "use_cuda_graph": False,  # a graph replays the weights that it was captured with, adapters or none
        "use_async_batching": False,
    }
    return ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known and value is not None})


def _count_hits(cache: Any, matched: MutableMapping[str, int]) -> None:
    lookup = cache.search_prefix_match

    def counted(request_id: str, prompt_ids: list[int]) -> int:
        matched[request_id] = found = int(lookup(request_id, prompt_ids))
        return found

    cache.search_prefix_match = counted


def cache_of(manager: Any) -> Any:
    """The paged cache, or None before there is one."""
    return getattr(manager.batch_processor, "cache", None)


def can_pause(manager: Any) -> bool:
    """Whether the model itself can be used between two forwards of the loop."""
    return hasattr(manager, "pause")


@contextmanager
def paused(manager: Any) -> Iterator[None]:
    """Between two forwards; in an older transformers the caller's idle loop has to do."""
    if can_pause(manager):
        with manager.pause():
            yield
    else:
        yield


def can_evict(manager: Any) -> bool:
    """Whether cached pages can be dropped without another loop."""
    return hasattr(cache_of(manager), "evict_cached_blocks")
