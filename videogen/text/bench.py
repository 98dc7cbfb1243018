"""Measures a text engine: prefill, decode, time to first token under open-loop arrivals, and how long a context it takes.

A run's settings are read back from the engine before anything is timed. Speed needs no trained weights, so prompts are drawn tokens;
only the needle test reads answers.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from videogen.errors import EnvironmentFault, RequestError, bad, say
from videogen.text.asks import AnswerFault, Ask, Ticket
from videogen.text.batching import BatchingEngine
from videogen.text.loop import cache_of
from videogen.text.metrics import percentile, sample_of, summary
from videogen.text.model import TextModel
from videogen.text.snapshots import SnapshotEngine
from videogen.timing import time_call

Engine = BatchingEngine | SnapshotEngine
Opener = Callable[[bool], Engine]  # with or without reuse

WAIT_S = 900.0
LONG = 65_536  # prompts from here on are measured without a warm-up: the shorter ones were one


@dataclass(frozen=True, slots=True)
class Load:
    """One measurement: prompts of `shared` + `own` tokens, `write` tokens each; `mix` is the share that has the common prefix.

    concurrency: arrivals a second are so many times what one request after the other would allow; above 1 only an engine that gains
    from batches keeps up. In a closed loop it is the number of requests kept in hand.
    """

    shared: int = 2048
    own: int = 32
    write: int = 16
    requests: int = 20
    mix: float = 1.0
    concurrency: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("shared", 0), ("own", 1), ("write", 1), ("requests", 1)):
            if getattr(self, name) < least:
                raise bad(f"bench {name}", getattr(self, name), f"at least {least}", f"change --{name}")
        if not 0 <= self.mix <= 1 or not self.concurrency > 0:
            raise bad("bench mix or concurrency", (self.mix, self.concurrency), "a share from 0 to 1, and more than 0", "change them")


class Prompts:
    """Drawn prompts: the same for the same seed, and never the same prefix twice unless it is meant to be shared."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._draw, self._vocabulary = random.Random(seed), vocabulary

    def tokens(self, length: int) -> tuple[int, ...]:
        """`length` tokens, the special ones at the beginning of the vocabulary left out."""
        return tuple(self._draw.choices(range(8, self._vocabulary), k=length))


def vocabulary_of(text: TextModel) -> int:
    """How many tokens there are to draw from."""
    return int(text.model.config.get_text_config().vocab_size)


def settings(engine: Engine) -> dict[str, Any]:
    """What the engine really runs with, read from the model and the loop."""
    model = engine.text.model
    found: dict[str, Any] = {
        "engine": engine.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(next(iter(model.parameters())).device),
        "attention": str(model.config._attn_implementation),
        "layers": int(model.config.get_text_config().num_hidden_layers),
        "reuse": engine.prefixes.budget.lam > 0,
        "capacity_tokens": engine.capacity,
    }
    if isinstance(engine, BatchingEngine):
        cache = cache_of(engine._manager)
        found |= {"pages": int(cache.num_blocks), "page": engine.paging.page, "prefill": int(cache.max_batch_tokens)}
    else:
        found |= {"prefill": engine.forward.chunk}
    return found


def check_settings(engine: Engine, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The settings. Raises EnvironmentFault when one differs from what was asked for: such a run measures something else."""
    found = settings(engine)
    for name, value in wanted.items():
        if found.get(name) != value:
            raise EnvironmentFault(
                say(f"text bench: {name}", repr(found.get(name)), repr(value), "the run is discarded; change the settings")
            )
    return found


def alone(engine: Engine, tokens: Sequence[int], write: int, shared: int = 0) -> Ticket:
    """One request with nobody else there."""
    return engine.submit(Ask(tuple(tokens), write, shared=shared)).result(WAIT_S)


def cold_and_warm(engine: Engine, load: Load, pairs: int) -> dict[str, Any]:
    """Time to first token of a new prefix and of the same with another end, one after the other, `pairs` times after a warm-up."""
    prompts = Prompts(vocabulary_of(engine.text), load.seed)
    rows: list[tuple[Ticket, Ticket]] = []
    for _ in range(pairs + 1):
        common = prompts.tokens(load.shared)
        cold = alone(engine, (*common, *prompts.tokens(load.own)), load.write, load.shared)
        rows.append((cold, alone(engine, (*common, *prompts.tokens(load.own)), load.write)))
    cold_s, warm_s = ([cast(float, ticket.ttft_s) for ticket in side] for side in zip(*rows[1:]))
    ratios = [warm / cold for cold, warm in zip(cold_s, warm_s)]
    return {
        "cold": summary([s for cold, _ in rows[1:] if (s := sample_of(cold))]),
        "warm": summary([s for _, warm in rows[1:] if (s := sample_of(warm))]),
        "warm_to_cold": percentile(ratios, 50),
        "worst_warm_to_cold": max(ratios),
        "cached_tokens": sorted({warm.cached for _, warm in rows[1:]}),
    }


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Moments of a Poisson process of `rate` a second, the first at 0."""
    return [0.0, *np.random.default_rng(seed).exponential(1 / rate, count - 1).cumsum().tolist()] if count > 1 else [0.0]


def open_loop(engine: Engine, load: Load, one_s: float) -> dict[str, Any]:
    """Requests that arrive whether or not earlier ones are answered; `one_s` is what one takes alone."""
    asked, common = _asked(engine, load)
    alone(engine, (*common, *asked[0][load.shared :]), load.write, load.shared)
    moments = arrivals(load.requests, load.concurrency / one_s, load.seed)
    tickets: list[Ticket] = []
    in_hand: list[int] = []
    began = time.perf_counter()
    for moment, tokens in zip(moments, asked):
        time.sleep(max(0.0, began + moment - time.perf_counter()))
        in_hand.append(sum(not ticket.done.is_set() for ticket in tickets))
        tickets.append(engine.submit(Ask(tokens, load.write)))
    for ticket in tickets:
        ticket.result(WAIT_S)
    seconds = time.perf_counter() - began
    told = summary([sample for ticket in tickets if (sample := sample_of(ticket))])
    mean = float(np.mean(in_hand[1:])) if len(in_hand) > 1 else 0.0
    return asdict(load) | {"loop": "open", "offered_per_s": load.concurrency / one_s, "in_hand_at_arrival": mean, "wall_s": seconds} | told


def closed_loop(engine: Engine, load: Load) -> dict[str, Any]:
    """`concurrency` clients that each send a request when the one before is answered."""
    asked, common = _asked(engine, load)
    alone(engine, (*common, *asked[0][load.shared :]), load.write, load.shared)
    tickets: list[Ticket] = []

    def client(start: int, step: int) -> None:
        for tokens in asked[start::step]:
            tickets.append(engine.submit(Ask(tokens, load.write)).result(WAIT_S))

    clients = max(1, round(load.concurrency))
    seconds = _together([threading.Thread(target=client, args=(start, clients)) for start in range(clients)])
    return asdict(load) | {"loop": "closed", "wall_s": seconds} | summary([s for ticket in tickets if (s := sample_of(ticket))])


def _together(threads: Sequence[threading.Thread]) -> float:
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def _asked(engine: Engine, load: Load) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """The prompts of a load, and the prefix that some of them share."""
    prompts, draw = Prompts(vocabulary_of(engine.text), load.seed), random.Random(load.seed)
    common = prompts.tokens(load.shared)
    begins = [common if draw.random() < load.mix else prompts.tokens(load.shared) for _ in range(load.requests)]
    return [(*begin, *prompts.tokens(load.own)) for begin in begins], common


@contextmanager
def opened(open_engine: Opener, reuse: bool) -> Iterator[Engine]:
    """An engine for one leg."""
    engine = open_engine(reuse)
    try:
        yield engine
    finally:
        engine.close()


def loads(open_engine: Opener, base: Load, levels: Sequence[float], mixes: Sequence[float]) -> list[dict[str, Any]]:
    """Every level and mix, without and with reuse in turn, over the same prompts and arrivals."""
    rows: list[dict[str, Any]] = []
    with opened(open_engine, False) as engine:
        prompts = Prompts(vocabulary_of(engine.text), base.seed + 1)
        tickets = [alone(engine, prompts.tokens(base.shared + base.own), base.write) for _ in range(3)]
        one_s = float(np.median([ticket.times[-1] - ticket.arrived for ticket in tickets]))
    for mix in mixes:
        for level in levels:
            for reuse in (False, True):
                load = Load(base.shared, base.own, base.write, base.requests, mix, level, base.seed)
                for run in (partial(open_loop, one_s=one_s), closed_loop):
                    with opened(open_engine, reuse) as engine:
                        rows.append({"reuse": reuse, "settings": settings(engine)} | run(engine, load))
    return rows


def prefills(engine: Engine, lengths: Sequence[int], write: int, runs: int = 3, flops_per_s: float | None = None) -> list[dict[str, Any]]:
    """Prefill and decode speed of prompts never seen before, by length; lengths that do not fit are left out and said.

    flops_per_s is the measured ceiling of matrix products: with it, and a model that lies on one device, the share reached is told.
    """
    prompts, rows = Prompts(vocabulary_of(engine.text), 17), []
    for length in lengths:
        try:
            warm_up = int(length < LONG)
            tickets = [alone(engine, prompts.tokens(length), write) for _ in range(runs + warm_up)][warm_up:]
        except (RequestError, AnswerFault) as error:
            rows.append({"length": length, "refused": str(error)})
            continue
        row = {"length": length} | summary([sample for ticket in tickets if (sample := sample_of(ticket))])
        if flops_per_s is not None:
            linear, square = arithmetic(engine.text.model)
            count = linear * length + square * length**2
            reached = count / float(np.median([s.prefill_s for ticket in tickets if (s := sample_of(ticket))]))
            row |= {"tflop": count / 1e12, "tflop_per_s": reached / 1e12, "share_of_matmul": reached / flops_per_s}
        rows.append(row)
    return rows


def arithmetic(model: Any) -> tuple[float, float]:
    """(a, b) so that a prefill of L tokens takes a L + b L^2 operations.

    a: two for every weight that a token meets, of experts only its own; b: causal attention of the layers that attend to everything.
    Embeddings, the last layer's logits, indexers' scores, compressors and linear attention's state are not counted.
    """
    config = model.config.get_text_config()
    experts = next((n for name in ("n_routed_experts", "num_experts", "num_local_experts") if (n := getattr(config, name, None))), 0)
    share = config.num_experts_per_tok / experts if experts else 1.0
    met = 0.0
    for name, weight in model.named_parameters():
        if weight.ndim < 2 or any(part in name for part in ("embed", "lm_head", "visual", "vision")):
            continue
        met += weight.numel() * (share if weight.ndim == 3 and weight.shape[0] == experts else 1.0)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    width = config.num_attention_heads * (getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads)
    return 2 * met, 2.0 * kinds.count("full_attention") * width


def matmul_ceiling(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Floating-point operations a second of a square product, the best of five."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    wait = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    return 2 * size**3 / min(time_call(lambda: a @ b, synchronize=wait).runs_s)


def flood(engine: Engine, count: int, length: int, write: int) -> dict[str, Any]:
    """`count` requests from ten threads at once: how many were answered."""
    prompts = Prompts(vocabulary_of(engine.text), 5)
    asked = [prompts.tokens(length) for _ in range(count)]
    tickets: list[Ticket] = []

    def send(start: int) -> None:
        for tokens in asked[start::10]:
            tickets.append(engine.submit(Ask(tokens, write)))

    began = time.perf_counter()
    _together([threading.Thread(target=send, args=(start,)) for start in range(10)])
    answered = sum(len(ticket.result(WAIT_S).tokens) == write for ticket in tickets)
    seconds = time.perf_counter() - began
    return {"sent": count, "answered": answered, "seconds": seconds}
