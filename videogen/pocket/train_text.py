"""Trains the text encoder's live layers as a small language model on the caption grammar; it then also completes short prompts."""

import argparse
import json
import logging
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from videogen.pocket import captions, sizes
from videogen.pocket.build import new_text_encoder, save_model
from videogen.pocket.tokenizer import save_tokenizer
from videogen.pocket.train_vae import parser
from videogen.pocket.training import Average, Log, adamw, load_state, optimise, rate_at, save_state, set_rate

RATE = 2e-3
BATCH = 256
IGNORED = -100


def lines(number: int, seed: int) -> list[tuple[str, str]]:
    """Pairs (given, to be learnt): captions of every kind after nothing, and full captions after a short prompt."""
    rng = random.Random(seed)
    out = []
    writers = (captions.full, captions.full, captions.short, captions.animate, captions.pictured)
    for index in range(number):
        scene = captions.draw_scene(rng, held_out=False)
        out.append(captions.expansion(scene, rng) if index % 2 else ("", rng.choice(writers)(scene, rng) + "<|endoftext|>"))
    return out


def encode(tokenizer: Any, pairs: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded token ids and labels (N, L); what is given and padding carry no label."""
    rows = []
    for given, learnt in pairs:
        a = tokenizer(given, add_special_tokens=False)["input_ids"]
        b = tokenizer(learnt, add_special_tokens=False)["input_ids"]
        rows.append((a + b, [IGNORED] * len(a) + b))
    length = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [0] * (length - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [IGNORED] * (length - len(row)) for _, row in rows])
    return ids, labels


def live_language(model: Any) -> Any:
    """The language stack with its identity layers left out: same features, a sixth of the work."""
    language = model.model.language_model
    language.layers = language.layers[: sizes.TEXT_FEATURE_LAYERS] + language.layers[50:]
    return language


def language_loss(model: Any, language: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Next-token cross-entropy, with a nudge to features of unit scale; right padding needs no mask in a causal stack."""
    held: list[torch.Tensor] = []
    features = features_during(language, lambda: held.append(language(input_ids=ids, use_cache=False).last_hidden_state))
    logits = model.lm_head(held[0][:, :-1])
    scale = features.float().pow(2).mean()
    return F.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED) + 0.02 * (scale - 1).pow(2)


@torch.no_grad()
def kept(model: Any, language: Any, tokenizer: Any, device: torch.device, number: int = 32) -> float:
    """The share of unseen short prompts whose greedy completion keeps count, colour and shape."""
    rng = random.Random(77)
    good = 0
    for _ in range(number):
        scene = captions.draw_scene(rng, held_out=True)
        ids = tokenizer(captions.EXPAND_PREFIX.format(short=captions.short(scene, rng)), add_special_tokens=False)["input_ids"]
        begun = len(ids)
        for _ in range(32):
            hidden = language(input_ids=torch.tensor([ids], device=device), use_cache=False).last_hidden_state
            ids.append(int(model.lm_head(hidden[:, -1]).argmax()))
            if ids[-1] == tokenizer.convert_tokens_to_ids(captions.EXPAND_END):
                break
        text = tokenizer.decode(ids[begun:-1]).lower()
        words = captions.subject(scene).split()
        good += all(word in text.replace(",", " ").replace(".", " ").split() for word in (words[0], *words[2:]))
    return good / number


def features_during(language: Any, call: Callable[[], Any]) -> torch.Tensor:
    """What the pipeline reads at hidden_states[50]: the output of the last live layer before the identities, during `call`."""
    held: list[torch.Tensor] = []
    layer = language.layers[sizes.TEXT_FEATURE_LAYERS - 1]
    hook = layer.register_forward_hook(lambda _module, _args, out: held.append(out[0] if isinstance(out, tuple) else out))
    try:
        call()
    finally:
        hook.remove()
    return held[0]


@torch.no_grad()
def feature_facts(language: Any, tokenizer: Any, device: torch.device) -> dict[str, float]:
    """Scale of the features, likeness of neighbouring tokens, and how far one swapped word moves them."""
    language.eval()

    def features(text: str) -> torch.Tensor:
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]], device=device)
        return features_during(language, lambda: language(input_ids=ids, use_cache=False))[0].float()

    a = features("a large red circle moves right on a navy background, a low tone on the left")
    b = features("a large green circle moves right on a navy background, a low tone on the left")
    moved = (a - b).norm(dim=-1) / a.norm(dim=-1)
    return {
        "std": float(a.std()),
        "neighbour_cosine": float(F.cosine_similarity(a[1:], a[:-1], dim=-1).abs().mean()),
        "swap_at_word": float(moved[2]),
        "swap_after": float(moved[3:].mean()),
    }


def train(args: argparse.Namespace) -> None:
    """The whole stage: grammar, steps, checks, folder with all its layers."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed + 2)
    log = Log(args.out / "text.jsonl", "text")
    tokenizer = save_tokenizer(args.out / "tokenizer")
    model = new_text_encoder(tokenizer).to(device)
    every = model.model.language_model.layers
    language = live_language(model)
    state = load_state(args.out / "text.pt", device) if args.resume else None
    if state is not None:
        language.load_state_dict(state["model"])
    average = Average(language.parameters(), 0.998)
    optimiser = adamw(language.parameters(), RATE, device, decay=0.0)
    ids, labels = (t.to(device) for t in encode(tokenizer, lines(64 if args.smoke else 60000, 40)))

    def loss() -> torch.Tensor:
        index = torch.randint(len(ids), (8 if args.smoke else BATCH,), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False):
            return language_loss(model, language, ids[index], labels[index])

    step = optimise(loss, optimiser, average)
    start, said, steps = log.seconds(), log.seconds(), 0
    while (spent := log.seconds() - start) < args.seconds:
        set_rate(optimiser, RATE * rate_at(spent / args.seconds))
        value = step()
        steps += 1
        if log.seconds() - said > (3 if args.smoke else 10):
            said = log.seconds()
            log(steps=steps, loss=value)
    average.swap()
    facts = feature_facts(language, tokenizer, device)
    log(event="done", steps=steps, kept=kept(model.eval(), language, tokenizer, device, 4 if args.smoke else 32), features=facts)
    save_state(args.out / "text.pt", model=language.state_dict())
    language.layers = every
    save_model(model, args.out / "text_encoder")
    (args.out / "text.done").write_text(json.dumps({"steps": steps}))


def main() -> None:
    """`python -m videogen.pocket.train_text`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train(parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
