"""Cached prefixes under the step cache's policy: one decision function, one trace schema, and no prefix outlives its weights."""

import random
from typing import Any

import pytest
import torch
from torch import nn

from caches import policy, prefix_hook, step_hook
from caches.policy import Action, Budget, Decision, History, Step, decide
from caches.prefix_hook import TEXT_BUDGET, Look, PrefixCache
from caches.step_hook import Channel, State, replaced, watched
from caches.trace import Trace


def numbers(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(1000) for _ in range(length)]


def filled(**options: Any) -> tuple[PrefixCache, list[int]]:
    cache, prompt = PrefixCache("A", **options), numbers(100)
    cache.keep(prompt[:64], "payload", 10)
    return cache, prompt


def test_video_steps_and_text_prefixes_ask_one_function_and_keep_one_record() -> None:
    assert step_hook.decide is prefix_hook.decide is policy.decide
    asked: list[str] = []

    def spy(budget: Budget, history: History, step: Step, drift: Any) -> Decision:
        asked.append("step" if "video" in drift or not drift else "prefix")
        return decide(budget, history, step, drift)

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    owner = nn.Module()
    owner.blocks = nn.ModuleList([Twice(), Twice()])
    state = State(Budget(lam=1.0), {"video": Channel(torch.tensor([0]), [1.0, 0.5, 0.0])}, rule=spy)
    with replaced(owner, "blocks", watched(list(owner.blocks), state)):
        hidden = torch.ones(1, 1, 1)
        for block in owner.blocks:
            hidden = block(hidden)
    cache, prompt = filled(rule=spy)
    cache.look(prompt)
    assert (
        asked == ["step", "prefix"]
        and State.__dataclass_fields__["rule"].default is PrefixCache.__dataclass_fields__["rule"].default is decide
    )
    video, text = state.trace.record(), cache.record()["cache"]
    assert isinstance(cache.trace, Trace) and video.keys() == text.keys() and video["steps"][0].keys() == text["steps"][0].keys()


@pytest.mark.parametrize(
    ("change", "action", "reason"),
    [
        ({}, Action.REUSE, "within budget"),
        ({"budget": Budget(lam=0.0)}, Action.COMPUTE, "off"),
        ({"prompt": [7, *numbers(100)]}, Action.COMPUTE, "first"),
        ({"prompt": numbers(64)}, Action.COMPUTE, "first"),  # a prefix never covers the whole prompt
        ({"prompt": numbers(6)}, Action.COMPUTE, "few steps"),
        ({"identity": "B"}, Action.COMPUTE, "identity drift"),
        ({"generation": 1}, Action.COMPUTE, "identity drift"),
        ({"error": 0.1}, Action.COMPUTE, "shadow drift"),
        ({"streak": 31}, Action.COMPUTE, "streak"),
    ],
)  # fmt: skip
def test_every_reason(change: dict[str, Any], action: Action, reason: str) -> None:
    cache, prompt = filled(budget=change.get("budget", TEXT_BUDGET))
    entry = next(iter(cache.entries.values()), None)
    if entry is not None:
        entry.identity = change.get("identity", "A")
        entry.generation = change.get("generation", 0)
        entry.error = change.get("error", 0.0)
        entry.history = History(64, 0, change.get("streak", 0))
    look = cache.look(change.get("prompt", prompt))
    assert (look.decision.action, look.decision.reason) == (action, reason)
    assert look.cached == (64 if action is Action.REUSE else 0) and look.is_check == (reason == "streak")
    assert (len(cache.entries) == 0) == (reason in ("off", "identity drift"))
    assert entry is None or (entry.payload is None) == (reason == "identity drift")


def test_the_longest_prefix_of_these_weights_is_the_one() -> None:
    cache, prompt = filled()
    cache.keep(prompt[:32], "short", 1)
    assert cache.look(prompt).cached == 64 and cache.look(prompt[:50]).cached == 32
    assert cache.look([*prompt[:40], *numbers(30, 5)]).cached == 32
    cache.change("A", "adapter on")
    assert cache.look(prompt).cached == 0 and cache.generation == 1 and not cache.entries
    assert cache.keep(prompt[:8], "too short") is None and PrefixCache("A", Budget()).keep(prompt, "off") is None


def test_room_is_made_from_the_least_recently_used() -> None:
    cache = PrefixCache("A", max_bytes=30, max_entries=3)
    prompts = [numbers(40, seed) for seed in range(5)]
    for prompt in prompts[:3]:
        cache.keep(prompt[:32], "x", 10)
    cache.look(prompts[0])
    cache.keep(prompts[3][:32], "x", 10)
    assert [cache.look(prompt).cached for prompt in prompts[:4]] == [32, 0, 32, 32]
    assert cache.keep(prompts[4][:32], "huge", 31) is None and cache.num_bytes == 30
    assert cache.record()["prefixes"]["counts"]["evicted: room"] == 1


def hits_until_check(cache: PrefixCache, prompt: list[int]) -> tuple[int, Look]:
    for hits in range(10_000):
        look = cache.look(prompt)
        if look.is_check:
            return hits, look
    raise AssertionError("no check came due")


def test_checks_grow_rare_while_clean_and_frequent_after_a_miss() -> None:
    cache, prompt = filled()
    hits, look = hits_until_check(cache, prompt)
    assert hits == 31 and cache.record()["prefixes"]["check_share"] == 1 / 32
    assert cache.checked(look, 0.0)
    hits, look = hits_until_check(cache, prompt)
    assert hits == 63 and not cache.checked(look, float("nan"))
    assert not cache.entries and cache.look(prompt).cached == 0
    cache.keep(prompt[:64], "payload", 10)
    assert hits_until_check(cache, prompt)[0] == 31
    counts = cache.record()["prefixes"]["counts"]
    assert (counts["checks"], counts["misses"], counts["evicted: missed check"]) == (2, 1, 1)


def test_a_prefix_is_never_reused_across_a_change(seeds: int = 200) -> None:
    rng, cache, made = random.Random(0), PrefixCache("A"), {}
    prompts = [numbers(60, seed) for seed in range(6)]
    for _ in range(seeds):
        prompt = rng.choice(prompts)
        if rng.random() < 0.2:
            cache.change(rng.choice("AB"), "adapter")
            made.clear()
        look = cache.look(prompt)
        assert look.cached == (0 if look.is_check else made.get(tuple(prompt), 0))
        if not look.entry:
            cache.keep(prompt[:30], cache.generation, 1)
            made[tuple(prompt)] = 30
        elif look.cached:
            assert look.entry.payload == cache.generation
