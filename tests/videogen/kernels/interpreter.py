"""A file of Triton kernels run by Triton's interpreter, which must be chosen before Triton is imported."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest


def is_triton(name: str) -> bool:
    return name.partition(".")[0] == "triton" and not name.startswith("triton._C")


@contextmanager
def loaded(path: str | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module at `path` over an interpreted Triton; the process's own Triton is back afterwards."""
    mine = {name: sys.modules.pop(name) for name in list(sys.modules) if is_triton(name)}
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert path is not None
    spec = importlib.util.spec_from_file_location("interpreted_kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        for name in [name for name in sys.modules if is_triton(name)]:
            del sys.modules[name]
        sys.modules.update(mine)
