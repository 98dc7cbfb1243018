"""Which certificate covers a request: the fingerprint of its stratum, and certificate files on disk."""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from caches.certificate import Certificate, Fingerprint, read_certificate
from videogen.config import StepCache
from videogen.errors import RequestError, bad
from videogen.families.base import Resolved
from videogen.identity import hash_text
from videogen.sampling import told_shifts


@cache
def cache_code(*more: str) -> str:
    """The identity of the code that decides and predicts, a family's own modules included: another version may reuse other steps."""
    names = [*(f"caches.{name}" for name in ("policy", "drift", "prior", "step_hook")), *more]
    found = [find_spec(name) for name in names]  # not imported: planning needs no torch
    return hash_text("\n".join(Path(str(spec.origin)).read_text(encoding="utf-8") for spec in found if spec))


def fingerprint(resolved: Resolved, *, weights: str, dtype: str, device: str, parallel: str = "1", streams: str = "") -> Fingerprint:
    """The stratum a request belongs to; `weights` is their identity, `streams` how two of guidance decide. Prompt, seed and pictures
    vary within a stratum; a negative prompt does not."""
    return Fingerprint(
        weights=weights,
        adapters=resolved.adapters,
        workflow=resolved.stratum + (f", streams {streams}" if streams else ""),
        canvas=f"{resolved.width}x{resolved.height}x{resolved.frames}",
        steps=resolved.steps,
        shifts=told_shifts(resolved.shifts, resolved.sigmas),
        dtype=dtype,
        device=device,
        parallel=parallel,
        code=cache_code(*resolved.cache_code),
    )


def certified(options: StepCache, stratum: Fingerprint) -> tuple[StepCache, str]:
    """The step cache a request may use, and a note when its certificate did not cover it.

    The certificate that covers the stratum gives its lambda and stays as the only one. Where none does, lambda is 0, or a
    RequestError names what the nearest one differs in, as `on_mismatch` says. Without any the options stay as they are.
    """
    if not options.certificates:
        return options, ""
    for certificate in options.certificates:
        if certificate.fingerprint == stratum:
            return covered_by(certificate, options), ""
    nearest = min(options.certificates, key=lambda each: len(each.fingerprint.differences(stratum)))
    told = "; ".join(nearest.fingerprint.differences(stratum))
    if options.on_mismatch == "compute":
        return StepCache(), f"computed in full: the certificate is for another stratum ({told})"
    raise bad("certificate", told, "the stratum it was calibrated for", "calibrate this one, or pass --cache-mismatch=compute")


def covered_by(certificate: Certificate, options: StepCache) -> StepCache:
    """The options with what a certificate was calibrated with."""
    return replace(
        options,
        lam=certificate.lam,
        max_streak=certificate.max_streak,
        video_order=certificate.video_order,
        audio_order=certificate.audio_order,
        warm_up=certificate.warm_up,
        drift_order=certificate.drift_order,
        prior=certificate.prior,
        certificates=(certificate,),
    )


def open_certificate(path: Path) -> Certificate:
    """A certificate file.

    Raises RequestError when it is missing or not one.
    """
    try:
        found = read_certificate(path.read_text(encoding="utf-8"), path.name)
        covered_by(found, StepCache())  # its options must be possible ones
        return found
    except UnicodeDecodeError as error:
        raise bad("certificate", str(path), "UTF-8 text", f"byte {error.start} is not; calibrate again") from None
    except OSError as error:
        raise bad("certificate", str(path), "a file that can be read", error.strerror or "check the path") from None
    except RequestError as error:
        raise RequestError(f"certificate {path.name}: {error}") from None
    except ValueError as error:
        raise RequestError(str(error)) from None
