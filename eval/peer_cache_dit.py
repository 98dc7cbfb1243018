"""cache-dit's DBCache on H3 through its own `BlockAdapter`, which 1.5.3 does not support by name; used where it is installed.

Settings are those its users run H3 with: one block computed first, none last, four warm-up steps, three reused steps in a row.
CACHE_DIT_LOG_LEVEL=ERROR keeps it quiet.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from importlib.util import find_spec

from eval.batched_loop import Group

_WARM_UP, _STREAK = 4, 3


def is_installed() -> bool:
    """Whether there is something to compare with; `pip install --no-deps --target FOLDER cache-dit` and PYTHONPATH are enough."""
    return find_spec("cache_dit") is not None


def cache_dit(order: int) -> Callable[[Group, float], AbstractContextManager[object]]:
    """DBCache at residual threshold `strength`, copying (order 0) or with its TaylorSeer forecast of that order."""

    @contextmanager
    def scope(group: Group, strength: float) -> Iterator[None]:
        library, transformer = import_module("cache_dit"), group.transformer
        had_forward = "forward" in transformer.__dict__
        adapter = library.BlockAdapter(
            transformer=transformer, blocks=transformer.transformer_blocks, forward_pattern=library.ForwardPattern.Pattern_3
        )
        config = library.DBCacheConfig(
            Fn_compute_blocks=1,
            Bn_compute_blocks=0,
            residual_diff_threshold=strength,
            max_warmup_steps=_WARM_UP,
            max_continuous_cached_steps=_STREAK,
            num_inference_steps=len(group.state.get("timesteps")),
        )
        calibrator = library.TaylorSeerCalibratorConfig(taylorseer_order=order) if order else None
        library.enable_cache(adapter, cache_config=config, calibrator_config=calibrator)
        try:
            yield
        finally:
            library.disable_cache(adapter)
            if not had_forward:
                transformer.__dict__.pop("forward", None)

    return scope
