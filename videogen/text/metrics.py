"""What requests to a text model cost: counters for a server, and the arithmetic of a measurement. Pure; knows no model."""

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from videogen.text.asks import Ticket

FEW = 20  # below that many values the 95th percentile is the largest
KEPT = 10_000
_RESAMPLES, _SEED = 2000, 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request, in seconds and tokens."""

    queued_s: float
    ttft_s: float
    prompt: int
    cached: int
    written: int
    decode_s: float
    decision: str

    @property
    def prefill_s(self) -> float:
        """From the first computing to the first token."""
        return max(self.ttft_s - self.queued_s, 1e-9)


def sample_of(ticket: Ticket) -> Sample | None:
    """A ticket's sample; None when it has no token."""
    if ticket.ttft_s is None:
        return None
    reason = "" if ticket.decision is None else ticket.decision.reason
    counts = (len(ticket.ask.tokens), ticket.cached, len(ticket.tokens))
    return Sample(ticket.queued_s, ticket.ttft_s, *counts, ticket.decode_s, reason)


def percentile(values: Sequence[float], q: float) -> dict[str, Any]:
    """The q-th percentile with its 95 % bootstrap interval and n; `is_max` where so few values make the largest stand for it."""
    if not values:
        return {"value": None, "low": None, "high": None, "n": 0, "is_max": False}
    data = np.asarray(values, dtype=float)
    is_max = q > 90 and len(data) < FEW
    if is_max:
        return {"value": float(data.max()), "low": None, "high": None, "n": len(data), "is_max": True}
    drawn = np.random.default_rng(_SEED).choice(data, (_RESAMPLES, len(data)))
    low, high = np.percentile(np.percentile(drawn, q, axis=1), (2.5, 97.5))
    return {"value": float(np.percentile(data, q)), "low": float(low), "high": float(high), "n": len(data), "is_max": False}


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Totals of a measurement. Prefill speeds are of the tokens computed, and effective: cached ones counted as well."""
    if not samples:
        return {"n": 0}
    seconds = sum(each.prefill_s for each in samples)
    decoding = [each.decode_s for each in samples if each.decode_s > 0]
    return {
        "n": len(samples),
        "prompt_tokens": sum(each.prompt for each in samples),
        "cached_tokens": sum(each.cached for each in samples),
        "prefill_tokens_per_s_computed": sum(each.prompt - each.cached for each in samples) / seconds,
        "prefill_tokens_per_s_effective": sum(each.prompt for each in samples) / seconds,
        "ttft_p50_s": percentile([each.ttft_s for each in samples], 50),
        "ttft_p95_s": percentile([each.ttft_s for each in samples], 95),
        "queued_p50_s": percentile([each.queued_s for each in samples], 50),
        "decode_tokens_per_s": len(decoding) / sum(decoding) if decoding else None,
    }


@dataclass(slots=True)
class Requests:
    """The requests of a running server."""

    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=KEPT))
    counts: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self, ticket: Ticket) -> None:
        """Count one request that is over."""
        with self._lock:
            self.counts["cancelled" if ticket.is_cancelled else "failed" if ticket.error else "answered"] += 1
            self.counts["prompt_tokens"] += len(ticket.ask.tokens)
            self.counts["cached_tokens"] += ticket.cached
            self.counts["written_tokens"] += len(ticket.tokens)
            if (sample := sample_of(ticket)) is not None:
                self.samples.append(sample)

    def prometheus(self, engine: Any) -> str:
        """Counters and the last requests' percentiles as Prometheus text."""
        with self._lock:
            lines = [f"videogen_text_{name}_total {value}" for name, value in sorted(self.counts.items())]
            times = [each.ttft_s for each in self.samples]
        record = engine.record()
        prefixes = record["prefixes"]
        for name, value in (("waiting", record["waiting"]), ("prefixes", prefixes["entries"]), ("generation", prefixes["generation"])):
            lines.append(f"videogen_text_{name} {value}")
        for name, value in prefixes["counts"].items():
            lines.append(f'videogen_text_prefix_events_total{{event="{name}"}} {value}')
        for q in (50, 95):
            if (value := percentile(times, q)["value"]) is not None:
                lines.append(f'videogen_text_ttft_seconds{{quantile="{q / 100}"}} {value:.6f}')
        return "\n".join(lines) + "\n"
