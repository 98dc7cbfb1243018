"""How long a text an engine takes: by growth until it refuses, and by needles that must be found again."""

import random
from collections.abc import Sequence
from typing import Any

from videogen.errors import RequestError
from videogen.text.asks import AnswerFault, Ask
from videogen.text.bench import WAIT_S, Engine, Prompts, alone, vocabulary_of

NEEDLE, QUESTION = "The number in the blue envelope is {}.", "What is the number in the blue envelope? Answer with the number only."
FILLER = "The grass is green and the sky is wide. Someone walks along the river, and the day goes by slowly. "
DEPTHS = (0.1, 0.5, 0.9)


def ceiling(engine: Engine, start: int, most: int, halvings: int = 4) -> dict[str, Any]:
    """The longest prompt answered, doubling from `start`, then halving the gap; and what stopped it."""
    prompts, reason = Prompts(vocabulary_of(engine.text), 23), ""
    good, wrong = 0, 0

    def fits(length: int) -> bool:
        nonlocal reason
        try:
            alone(engine, prompts.tokens(length), 1)
        except (RequestError, AnswerFault) as error:
            reason = str(error)
            return False
        return True

    length = start
    while not wrong:
        if length > most:
            return {"tokens": good, "stopped_by": f"not tried beyond {most}"}
        good, wrong = (length, 0) if fits(length) else (good, length)
        length *= 2
    for _ in range(halvings):
        middle = (good + wrong) // 2
        good, wrong = (middle, wrong) if fits(middle) else (good, middle)
    return {"tokens": good, "stopped_by": reason}


def needle(engine: Engine, length: int, depth: float, seed: int = 0) -> bool:
    """Whether a number hidden at `depth` (0 to 1) of a text of about `length` tokens is found again."""
    text, number = engine.text, str(random.Random(seed).randrange(10_000, 99_999))
    unit = len(text.tokenizer(FILLER, add_special_tokens=False)["input_ids"])
    count = max(1, length // unit)
    parts = [FILLER] * count
    parts.insert(round(depth * count), NEEDLE.format(number) + " ")
    messages = [{"role": "user", "content": "".join(parts) + "\n" + QUESTION}]
    ids = text.tokenizer(text.prompt_text(messages), add_special_tokens=False)["input_ids"]
    answer = engine.submit(Ask(tuple(ids), 16, ends=frozenset(text.ends()))).result(WAIT_S)
    return number in text.tokenizer.decode(answer.tokens)


def supported_context(engine: Engine, lengths: Sequence[int]) -> dict[str, Any]:
    """The smallest of the model's own limit, what the cache takes, and the longest text whose needles were all found."""
    limit = int(getattr(engine.text.model.config.get_text_config(), "max_position_embeddings", 0))
    passed, told = 0, []
    if hasattr(engine.text.tokenizer, "decode"):
        for length in sorted(lengths):
            if length > engine.capacity - 64:
                break
            found = [needle(engine, length, depth, seed) for seed, depth in enumerate(DEPTHS)]
            told.append({"length": length, "found": found})
            if not all(found):
                break
            passed = length
    what = "all" if told else "not run: no tokenizer"
    return {"tokens": min(limit, engine.capacity, passed), "model_limit": limit, "cache": engine.capacity, "needles": told or what}
