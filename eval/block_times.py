"""One transformer block at the real shape: its time under each attention back end of diffusers, and how far the results differ."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.attention_dispatch import attention_backend

from eval.timing import time_call

logger = logging.getLogger(__name__)

NATIVE = "native"
EXACT_BACKENDS = (NATIVE, "_native_flash", "_native_cudnn", "flash", "_flash_3")  # dense arithmetic in the model's own dtype
FAILS = (RuntimeError, ImportError, ValueError, TypeError, NotImplementedError)


class _Caught(Exception):
    """Ends a forward at its first block."""


def first_block_inputs(transformer: Any, forward: Callable[[], object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the first block gets when `forward` runs; the rest of the forward does not run."""
    caught: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def catch(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append((args, kwargs))
        raise _Caught

    handle = transformer.transformer_blocks[0].register_forward_pre_hook(catch, with_kwargs=True)
    try:
        forward()
    except _Caught:
        pass
    finally:
        handle.remove()
    return caught[0]


@contextmanager
def attending(transformer: Any, name: str) -> Iterator[None]:
    """Only this transformer attends through the back end `name`; the default is back afterwards.

    Raises one of FAILS when the back end is not there. A back end that would be downloaded is refused.
    """
    if name.endswith("_hub"):
        raise ValueError("comes from the hub; nothing is downloaded")
    with attention_backend(NATIVE):
        transformer.set_attention_backend(name)
        try:
            with attention_backend(NATIVE):
                yield
        finally:
            transformer.reset_attention_backend()


@contextmanager
def only_first_block(transformer: Any) -> Iterator[None]:
    """The transformer without its other blocks, to warm up what surrounds them cheaply."""
    blocks = transformer.transformer_blocks
    transformer.transformer_blocks = blocks[:1]
    try:
        yield
    finally:
        transformer.transformer_blocks = blocks


def time_backends(
    transformer: Any, forward: Callable[[], object], names: tuple[str, ...], synchronize: Callable[[], None]
) -> list[dict[str, Any]]:
    """A row per back end: milliseconds per block and relative L2 distance of its update from `native`'s, or why it cannot run."""
    args, kwargs = first_block_inputs(transformer, forward)
    block, made = transformer.transformer_blocks[0], [args[0]]

    def call() -> None:
        made[0] = block(*args, **kwargs)

    reference: torch.Tensor | None = None
    rows: list[dict[str, Any]] = []
    for name in names:
        try:
            with attending(transformer, name), torch.no_grad():
                timing = time_call(call, warmup=1, synchronize=synchronize)
        except FAILS as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error).strip() else ''}"
            rows.append({"backend": name, "block_ms": None, "reason": reason})
            logger.info("attention %s: %s", name, reason)
            continue
        update = (made[0] - args[0]).float()  # without the residual stream, beside which it is small
        reference = update if name == NATIVE else reference
        apart = None if reference is None else float((update - reference).norm() / reference.norm())
        row = {"backend": name, "block_ms": 1e3 * timing.median_s, "spread": timing.spread, "runs": len(timing.runs_s)}
        rows.append(row | {"relative_l2_to_native": apart})
        logger.info("attention %s: %.2f ms per block", name, row["block_ms"])
    return rows


def fastest(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of the back end whose block took least.

    Raises RuntimeError when none could be timed.
    """
    timed = [row for row in rows if row["block_ms"] is not None]
    if not timed:
        raise RuntimeError("attention back ends: got none that runs, expected at least one; pass --attention native")
    return min(timed, key=lambda row: float(row["block_ms"]))
