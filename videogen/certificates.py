"""Which certificate covers a request: the fingerprint of its stratum, and certificate files on disk."""

from pathlib import Path
from typing import Any

import caches.drift
import caches.policy
import caches.step_hook
from caches.certificate import Certificate, Fingerprint, read_certificate
from videogen.errors import RequestError, bad
from videogen.families.base import Resolved
from videogen.identity import hash_text


def cache_code() -> str:
    """The identity of the code that decides and predicts: another version may reuse other steps."""
    sources = (Path(str(module.__file__)).read_text(encoding="utf-8") for module in (caches.policy, caches.drift, caches.step_hook))
    return hash_text("\n".join(sources))


def fingerprint(pipe: Any, resolved: Resolved, *, weights: str, dtype: str, device: str) -> Fingerprint:
    """The stratum a request belongs to, on this pipeline. Prompt, seed and pictures vary within a stratum."""
    return Fingerprint(
        weights=weights,
        adapters="",
        workflow=resolved.workflow,
        canvas=f"{resolved.width}x{resolved.height}x{resolved.frames}",
        steps=resolved.steps,
        shifts=f"{pipe.scheduler.shift:g}/{pipe.audio_scheduler.shift:g}",
        dtype=dtype,
        device=device,
        parallel="1",
        code=cache_code(),
    )


def open_certificate(path: Path) -> Certificate:
    """A certificate file.

    Raises RequestError when it is missing or not one.
    """
    try:
        return read_certificate(path.read_text(encoding="utf-8"), path.name)
    except OSError as error:
        raise bad("certificate", str(path), "a file that can be read", error.strerror or "check the path") from None
    except ValueError as error:
        raise RequestError(str(error)) from None
