"""A text model behind an OpenAI-compatible address (vLLM, SGLang, `transformers serve`, `videogen text serve`)."""

import http.client
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from videogen.errors import EnvironmentFault, say
from videogen.text.source import TextSource

TIMEOUT_S = 120.0
MAX_BYTES = 4_000_000


def ask(url: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = TIMEOUT_S) -> Any:
    """The JSON answer to a GET, or to a POST of `body`. Raises EnvironmentFault when there is none."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=timeout_s) as reply:
            return json.loads(reply.read(MAX_BYTES))
    except HTTPError as error:
        got = f"HTTP {error.code}: {error.read(300).decode(errors='replace')}"
    except (URLError, OSError, http.client.HTTPException, json.JSONDecodeError, UnicodeDecodeError) as error:
        got = f"{type(error).__name__}: {error}"
    raise EnvironmentFault(say(f"text server {url}", got, "an OpenAI-compatible answer", "start the server, or use --expand=template"))


@dataclass(slots=True)
class RemoteModel:
    """Answers over the network; what it sends is text, never weights or pictures."""

    source: TextSource
    model: str = ""
    sees = False

    def open(self) -> "RemoteModel":
        """Find the model's name. Raises EnvironmentFault when the server cannot be asked or serves several."""
        self.model = self.source.model
        if not self.model:
            listed = ask(f"{self.source.place}/models", timeout_s=10.0)
            names = [str(each.get("id")) for each in listed.get("data", [])] if isinstance(listed, dict) else []
            if len(names) != 1:
                told = ", ".join(names[:5]) or "no model"
                raise EnvironmentFault(say(f"text server {self.source.place}", told, "one model", "name it: ADDRESS#MODEL"))
            self.model = names[0]
        return self

    def write(self, messages: Sequence[dict[str, Any]], seed: int, *, limit: int, pictures: Sequence[Any] = ()) -> str:
        """The answer, of at most `limit` tokens; how far the seed decides it is the server's affair."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": limit,
            "seed": seed % 2**31,
            "temperature": 0.8,
            "top_p": 0.95,
        }
        reply = ask(f"{self.source.place}/chat/completions", body)
        try:
            return str(reply["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError):
            told = say(f"text server {self.source.place}", "an answer without choices", "an OpenAI-compatible answer", "check the server")
            raise EnvironmentFault(told) from None

    def likelihood(self, messages: Sequence[dict[str, Any]], answer: str) -> float | None:
        """Not asked of a server: log probabilities are optional in its interface."""
        return None
