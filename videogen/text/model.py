"""A text model in memory: its tokens, its answers by seed, and how likely it finds a text; knows nothing of video."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.utils import logging as transformers_logging

from videogen.errors import EnvironmentFault, say
from videogen.text.source import TextSource

logger = logging.getLogger(__name__)

Messages = Sequence[dict[str, Any]]
TURN, TURN_END = "<|im_start|>", "<|im_end|>"
TEMPERATURE, TOP_P = 0.7, 0.95


@dataclass(frozen=True, slots=True)
class TextModel:
    """A decoder with a language head and its tokenizer; `processor` is there when the model sees pictures."""

    model: Any
    tokenizer: Any
    processor: Any = None

    @property
    def sees(self) -> bool:
        """Whether messages may hold pictures: only through a processor with a conversation form."""
        return getattr(self.processor, "chat_template", None) is not None

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return torch.device(next(iter(self.model.parameters())).device)

    def ends(self) -> list[int]:
        """The tokens that end an answer: the model's own, and the end of a turn."""
        own = getattr(self.model.generation_config, "eos_token_id", None)
        ends = set(own if isinstance(own, list) else [own]) | {self.tokenizer.eos_token_id}
        turn = self.tokenizer.convert_tokens_to_ids(TURN_END)
        if turn is not None and turn != self.tokenizer.unk_token_id:
            ends.add(turn)
        return sorted(each for each in ends if each is not None)

    def prompt_text(self, messages: Messages) -> str:
        """The conversation as the text whose continuation is the answer."""
        if self.tokenizer.chat_template is not None:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
        turns = "".join(f"{TURN}{each['role']}\n{each['content']}{TURN_END}\n" for each in messages)
        return f"{turns}{TURN}assistant\n"

    def inputs(self, messages: Messages, pictures: Sequence[Image.Image] = ()) -> dict[str, torch.Tensor]:
        """What the model takes: `input_ids` (1, L), and pixels when there are pictures, which the last message gets."""
        if pictures and self.sees:
            shown = [{"type": "image", "image": picture} for picture in pictures]
            told = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in messages]
            told[-1]["content"] = [*shown, *told[-1]["content"]]
            made = self.processor.apply_chat_template(
                told, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        else:
            made = self.tokenizer(self.prompt_text(messages), add_special_tokens=False, return_tensors="pt")
        return {name: value.to(self.device) for name, value in made.items()}

    def write(self, messages: Messages, seed: int, *, limit: int, pictures: Sequence[Image.Image] = ()) -> str:
        """The answer, sampled with `seed`, of at most `limit` tokens; torch's random state is as it was afterwards.

        The same on one device and version; another device may answer otherwise.
        """
        inputs = self.inputs(messages, pictures)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(seed % 2**63)
            out = self.model.generate(
                **inputs,
                max_new_tokens=limit,
                do_sample=True,
                temperature=TEMPERATURE,
                top_p=TOP_P,
                top_k=0,
                eos_token_id=self.ends(),
                pad_token_id=self.ends()[0] if self.ends() else None,
            )
        return str(self.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    @torch.no_grad()
    def likelihood(self, messages: Messages, answer: str) -> float:
        """Mean log probability of the answer's tokens after the conversation."""
        before = self.inputs(messages)["input_ids"]
        after = self.tokenizer(answer, add_special_tokens=False, return_tensors="pt")["input_ids"].to(self.device)
        logits = self.model(input_ids=torch.cat([before, after], dim=1), use_cache=False).logits[0, before.shape[1] - 1 : -1]
        return float(logits.float().log_softmax(-1).gather(1, after[0][:, None]).mean())


@contextmanager
def _quiet() -> Iterator[None]:
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def load_text(source: TextSource, device: torch.device, dtype: torch.dtype) -> TextModel:
    """Load a folder or GGUF file, from this machine's files only.

    Raises EnvironmentFault when it does not load, or not completely.
    """
    gguf: dict[str, Any] = {"gguf_file": Path(source.place).name} if source.kind == "gguf" else {}
    place = str(Path(source.place).parent) if gguf else source.place
    logger.info("loading the text model %s", source.name)
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(source.tokenizer, local_files_only=True, **gguf)
            config = AutoConfig.from_pretrained(place, local_files_only=True, **gguf)
            kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
            model, info = kind.from_pretrained(place, dtype=dtype, local_files_only=True, output_loading_info=True, **gguf)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, ImportError) as error:
        first = str(error).strip().split("\n")[0][:300]
        told = say(f"text model {source.name}", f"{type(error).__name__}: {first}", "files that load", "check them")
        raise EnvironmentFault(told) from error
    missing = sorted(map(str, info.get("missing_keys") or ()))
    if missing:
        shown = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
        raise EnvironmentFault(
            say(f"text model {source.name}", f"{len(missing)} tensors missing ({shown})", "every tensor", "check the files")
        )
    return TextModel(model.to(device).eval(), tokenizer)
