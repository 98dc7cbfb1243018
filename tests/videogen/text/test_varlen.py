"""Attention of the batching loop without masks: the definition against a masked product, and that the loop runs it."""

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.videogen.text.models import text_model
from videogen.errors import RequestError
from videogen.text import varlen
from videogen.text.asks import Ask
from videogen.text.batching import BatchingEngine
from videogen.text.loop import Paging

QUERIES, KEYS = [3, 1, 5, 1], [3, 9, 8, 1]


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def drawn(lengths: list[int], heads: int, seed: int) -> torch.Tensor:
    return torch.randn(1, heads, sum(lengths), 8, generator=torch.Generator().manual_seed(seed))


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Every query over all keys, those of other requests and later ones masked away; (1, T, H, D)."""
    mask = torch.zeros(sum(QUERIES), sum(KEYS), dtype=torch.bool)
    rows, columns = starts(QUERIES).tolist(), starts(KEYS).tolist()
    for q0, q1, k0, k1 in zip(rows, rows[1:], columns, columns[1:]):
        mask[q0:q1, k0:k1] = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("keys_from", [starts(KEYS), {varlen.FULL: starts(KEYS)}])
def test_every_request_attends_to_its_own_keys_alone(keys_from: object) -> None:
    query, key, value = drawn(QUERIES, 4, 0), drawn(KEYS, 2, 1), drawn(KEYS, 2, 2)
    found, _ = varlen.attend(None, query, key, value, cu_seq_lens_q=starts(QUERIES), cu_seq_lens_k=keys_from)
    torch.testing.assert_close(found, masked(query, key, value))


def test_without_lengths_it_is_one_sequence_that_ends_where_its_keys_end() -> None:
    query, key, value = drawn([4], 4, 0), drawn([7], 2, 1), drawn([7], 2, 2)
    found, _ = varlen.attend(None, query, key, value)
    mask = torch.ones(4, 7, dtype=torch.bool).tril(3)
    torch.testing.assert_close(found, scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2))


def test_the_loop_attends_so_and_the_model_has_its_own_attention_back(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_model("qwen3")
    lengths: list[list[int]] = []
    whole = varlen.one_by_one

    def counted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object) -> torch.Tensor:
        lengths.append(list(rest[0]))  # type: ignore[call-overload]
        return whole(query, key, value, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(varlen, "one_by_one", counted)
    engine = BatchingEngine(text, "weights", paging=Paging(16, 64, 64))
    try:
        tickets = [engine.submit(Ask(tuple(range(8, 8 + count)), 3)) for count in (20, 30)]
        assert all(len(ticket.result(30).tokens) == 3 for ticket in tickets)
    finally:
        engine.close()
    assert any(len(each) > 2 for each in lengths) and text.model.config._attn_implementation == "sdpa"


def test_what_needs_a_mask_is_refused_while_requests_are_batched() -> None:
    query, key = drawn([4], 4, 0), drawn([4], 2, 1)
    varlen.attend(None, query, key, key, torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(RequestError, match="padded"):
        varlen.attend(None, query, key, key, torch.tensor([[0, 1, 1, 1]]))
    with pytest.raises(RequestError, match="2 sequences"):
        varlen.attend(None, query.repeat(2, 1, 1, 1), key.repeat(2, 1, 1, 1), key.repeat(2, 1, 1, 1))


def test_layers_with_a_window_keep_transformers_own() -> None:
    text = text_model("qwen3")
    assert varlen.suits(text.model)
    text.model.config.layer_types = ["sliding_attention", *text.model.config.layer_types[1:]]
    assert not varlen.suits(text.model)


def right(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, scale: float | None, **_how: Any) -> torch.Tensor:
    return varlen.one_by_one(query, key, value, rest[0].tolist(), rest[1].tolist(), scale)


def top_left(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **_how: Any) -> torch.Tensor:
    """Causal from the first key on, as attention of whole prompts is: wrong where something is cached."""
    out = torch.empty_like(query)
    for q0, q1, k0 in zip(rest[0].tolist(), rest[0].tolist()[1:], rest[1].tolist()):
        rows = (query[q0:q1], key[k0 : k0 + q1 - q0], value[k0 : k0 + q1 - q0])
        q, k, v = (each.transpose(0, 1)[None] for each in rows)
        out[q0:q1] = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    return out


def broken(*_: Any, **_how: Any) -> torch.Tensor:
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize(("kernel", "told"), [(right, ""), (top_left, "from its definition"), (broken, "no kernel image")])
def test_a_kernel_that_is_not_its_definition_is_not_used(kernel: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    found = varlen.kernel_fault.__wrapped__(torch.device("cpu"), torch.bfloat16, 4, 2, 16)
    assert told in found and bool(found) is bool(told)
    assert "takes no" in varlen.kernel_fault.__wrapped__(torch.device("cpu"), torch.float32, 4, 2, 16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_torchs_kernel_is_the_definition_on_a_gpu() -> None:
    queries, keys = [1, 300, 17, 64], [700, 300, 500, 64]
    rows = [drawn(lengths, heads, seed).repeat(1, 1, 1, 16) for seed, (lengths, heads) in enumerate(((queries, 8), (keys, 2), (keys, 2)))]
    told: dict[str, Any] = {
        "cu_seq_lens_q": starts(queries),
        "cu_seq_lens_k": starts(keys),
        "max_length_q": max(queries),
        "max_length_k": max(keys),
    }
    wanted, _ = varlen.attend(None, *rows, **told)
    there: dict[str, Any] = {name: each.cuda() if isinstance(each, torch.Tensor) else each for name, each in told.items()}
    found, _ = varlen.attend(None, *(each.cuda().bfloat16() for each in rows), **there)
    assert (found.cpu().float() - wanted).norm() < 1e-2 * wanted.norm()
