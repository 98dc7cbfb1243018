"""A clip that does not fit: what runs out of memory is tried once more in less of it, from nothing; knows no model."""

import errno
import gc
import logging
import os
from collections.abc import Callable

import torch

from videogen.errors import DoesNotFit, say
from videogen.result import Result

logger = logging.getLogger(__name__)

_OF_HOST = ("DefaultCPUAllocator", os.strerror(errno.ENOMEM))  # torch has no class for host memory


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether device or host memory ran out, there or in what the error comes from: loaders hide it behind errors of their own."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in _OF_HOST):
            return True
        error = error.__cause__ or error.__context__
    return False


def collect() -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def once_more(what: str, attempt: Callable[[], Result], let_go: Callable[[], None], again: Callable[[], Result] | None) -> Result:
    """`attempt()`; where that runs out of memory `again()`, if there is such a way, with everything let go before and after.

    Raises DoesNotFit, naming `what`, where that is not enough.
    """
    try:
        return attempt()
    except (RuntimeError, MemoryError) as error:
        first = _reason(error)
    let_go()  # here, where the failed attempt's frames hold nothing any more
    if again is None:
        raise DoesNotFit(_message(what, first))
    logger.warning("%s: out of memory (%s); once more, in less of it", what, first)
    try:
        result = again()
    except (RuntimeError, MemoryError) as error:
        second = _reason(error)
    else:
        let_go()
        result.record["memory"] = {"attempts": 2, "first": first}
        return result
    let_go()
    raise DoesNotFit(_message(what, f"twice, the second time in less of it: {second}"))


def _reason(error: BaseException) -> str:
    """The first line of an error that is about memory; any other is raised again."""
    if not is_out_of_memory(error):
        raise error
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _message(what: str, got: str) -> str:
    return say(what, f"out of memory ({got})", "a clip that fits", "render it smaller or shorter, or over more devices (--ulysses)")
