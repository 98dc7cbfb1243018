"""On and off again: exact when off, equal to the weights with deltas when on, undone bit for bit."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora.adapter import Adapter, Factors, Patch
from lora.apply import Attachment, Use, attach, attached, attached_to, delta_norms, identity_of
from tests.lora.toys import Truth, fingerprint, forward, make_model, make_truth

MODES = pytest.mark.parametrize("fuse", [False, True], ids=["parallel", "fused"])
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def adapter_of(truth: Truth, scale: float = 1.0, name: str = "a", patches: dict[str, Patch] | None = None) -> Adapter:
    factors = {module: Factors(down, up, scale) for module, (down, up) in truth.items()}
    return Adapter(name, name, "toy", factors, patches or {})


def with_deltas(*uses: tuple[Truth, float]) -> torch.nn.Module:
    """The reference: an fp32 model whose weights were changed by hand."""
    model = make_model()
    with torch.no_grad():
        for truth, strength in uses:
            for name, (down, up) in truth.items():
                model.get_submodule(name).weight += strength * (up @ down)
    return model


@MODES
@TYPES
def test_off_is_bit_identical_and_detached_is_too(fuse: bool, dtype: torch.dtype) -> None:
    model, adapter = make_model(dtype), adapter_of(make_truth())
    before, plain = fingerprint(model), forward(model)
    with attached(model, [Use(adapter, 0.0)], fuse=fuse) as attachment:
        assert torch.equal(forward(model), plain) and fingerprint(model) == before and attachment.identity == ""
        assert not any(module._forward_hooks for module in model.modules())
    for strength in (1.0, 2.5):
        with attached(model, [Use(adapter, strength)], fuse=fuse):
            assert not torch.allclose(forward(model), plain, rtol=0.05)
            assert (fingerprint(model) != before) == fuse
        assert fingerprint(model) == before and torch.equal(forward(model), plain)
        assert not any(module._forward_hooks for module in model.modules())


@MODES
@pytest.mark.parametrize("strength", [1.0, 0.3, 4.0, -1.0])
def test_on_equals_the_weights_with_deltas(fuse: bool, strength: float) -> None:
    model, truth = make_model(), make_truth()
    with attached(model, [Use(adapter_of(truth, 0.5), strength)], fuse=fuse):
        found = forward(model)
    wanted = forward(with_deltas((truth, 0.5 * strength)))
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


@MODES
def test_in_bfloat16_it_is_as_near_as_bfloat16_is(fuse: bool) -> None:
    """The model computes in bfloat16 with parts in float32; the error is that of the base model, not a wrong scale."""
    truth = make_truth()
    wanted, base = forward(with_deltas((truth, 0.3))), forward(make_model())
    model = make_model(torch.bfloat16)
    own_error = float((forward(model) - base).norm() / base.norm())
    with attached(model, [Use(adapter_of(truth, 0.3))], fuse=fuse):
        found = forward(model)
    assert float((found - wanted).norm() / wanted.norm()) < 2 * own_error < 0.05


@MODES
def test_two_adapters_are_their_sum(fuse: bool) -> None:
    model, one, two = make_model(), make_truth(), make_truth(rank=7, adaln_rank=3, seed=4)
    uses = [Use(adapter_of(one)), Use(adapter_of(two, name="b"), 0.6)]
    with attached(model, uses, fuse=fuse) as attachment:
        found = forward(model)
        assert [entry["name"] for entry in attachment.record()] == ["a", "b"]
    wanted = forward(with_deltas((one, 1.0), (two, 0.6)))
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


def test_twenty_cycles_leave_no_trace_in_bfloat16() -> None:
    model = make_model(torch.bfloat16)
    before = fingerprint(model)
    for cycle in range(20):
        attach(model, [Use(adapter_of(make_truth(seed=cycle)), 1.0 + cycle)], fuse=True).detach()
    assert fingerprint(model) == before


@MODES
def test_an_error_inside_the_scope_restores_and_a_second_detach_does_nothing(fuse: bool) -> None:
    model, adapter = make_model(torch.bfloat16), adapter_of(make_truth())
    before = fingerprint(model)
    with pytest.raises(RuntimeError, match="in the middle"), attached(model, [Use(adapter)], fuse=fuse) as attachment:
        raise RuntimeError("in the middle")
    assert fingerprint(model) == before and attached_to(model) is None
    later = attach(model, [Use(adapter)], fuse=fuse)
    attachment.detach()
    assert attached_to(model) is later
    later.detach()
    later.detach()
    assert fingerprint(model) == before


def test_one_attachment_per_model_and_partitions_are_apart() -> None:
    base, ref, adapter = make_model(), make_model(), adapter_of(make_truth())
    before = fingerprint(base)
    first = attach(base, [Use(adapter)], fuse=True)
    with pytest.raises(ValueError, match="a model that has some already"):
        attach(base, [Use(adapter)])
    second = attach(ref, [Use(adapter)], fuse=True)
    first.detach()
    assert fingerprint(base) == before and fingerprint(ref) != before
    assert attached_to(base) is None and attached_to(ref) is second
    second.detach()
    assert fingerprint(ref) == before


@MODES
def test_payloads_are_added_or_put_in_place_and_taken_back(fuse: bool) -> None:
    model = make_model(torch.bfloat16)
    before, norm = fingerprint(model), model.transformer_blocks[0].norm1.weight.detach().clone()
    bias = model.proj_out.bias.detach().clone()
    new = torch.full_like(bias, 3.0)
    patches = {"transformer_blocks.0.norm1.weight": Patch(torch.full((64,), 0.5), False), "proj_out.bias": Patch(new, True)}
    adapter = adapter_of({}, patches=patches)
    with attached(model, [Use(adapter)], fuse=fuse) as attachment:
        assert torch.equal(model.transformer_blocks[0].norm1.weight, norm + 0.5) and torch.equal(model.proj_out.bias, new)
        assert attachment.record()[0]["patches"] == 2 and attachment.record()[0]["delta_norm"] == pytest.approx(4.0)
    with attached(model, [Use(adapter, 0.5)], fuse=fuse):
        assert torch.equal(model.proj_out.bias, bias + 0.5 * (new - bias))
    assert fingerprint(model) == before
    with pytest.raises(ValueError, match=r"which both replace proj_out\.bias"):
        attach(model, [Use(adapter), Use(replace(adapter, name="b"))])
    assert fingerprint(model) == before and attached_to(model) is None


def test_a_failure_half_way_undoes_what_was_written() -> None:
    model, truth = make_model(torch.bfloat16), make_truth()
    before = fingerprint(model)
    last = max(truth)
    truth[last] = (truth[last][0] * 1e30, truth[last][1] * 1e30)
    with pytest.raises(ValueError, match=f"NaN or infinity in {last}.weight"):
        attach(model, [Use(adapter_of(truth))], fuse=True)
    assert fingerprint(model) == before and attached_to(model) is None


def test_what_does_not_fit_is_refused() -> None:
    model, truth = make_model(), make_truth(("proj_in",))
    wrong = {"proj_in": (truth["proj_in"][0][:, :5], truth["proj_in"][1])}
    with pytest.raises(ValueError, match=r"proj_in.weight \(64, 5\) in a, \(64, 16\) in the model"):
        attach(model, [Use(adapter_of(wrong))])
    with pytest.raises(ValueError, match="absent in the model"):
        attach(model, [Use(adapter_of({"proj_on": truth["proj_in"]}))])
    for strength in (float("nan"), float("inf"), -1001.0):
        with pytest.raises(ValueError, match=f"adapter strength: got {strength}"):
            Use(adapter_of(truth), strength)
    with pytest.raises(ValueError, match="on meta, expected a loaded weight"):
        attach(make_model().to("meta"), [Use(adapter_of(truth))])
    small = make_model()
    small.proj_in.weight.data = small.proj_in.weight.data.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="at least 16 bits"):
        attach(small, [Use(adapter_of(truth))])
    fused = make_model()
    fused.transformer_blocks[0].attn.fuse_projections()
    payload = {"transformer_blocks.0.attn.to_q.weight": Patch(torch.ones(64, 64), False)}
    for adapter in (adapter_of(make_truth()), adapter_of({}, patches=payload)):
        with pytest.raises(ValueError, match="unfuse_qkv_projections"):
            attach(fused, [Use(adapter)])


def test_the_identity_names_file_strength_order_and_mode() -> None:
    one, two = adapter_of({}, name="a"), adapter_of({}, name="b")
    seen = {
        identity_of(uses, fuse=fuse)
        for uses in ([Use(one)], [Use(two)], [Use(one, 0.5)], [Use(one), Use(two)], [Use(two), Use(one)])
        for fuse in (False, True)
    }
    assert len(seen) == 10 and "" not in seen
    assert identity_of([Use(one), Use(two, 0.0)]) == identity_of([Use(one)]) and identity_of([Use(one, 0.0)]) == identity_of([]) == ""


def test_norms_are_those_of_the_full_deltas() -> None:
    truth = make_truth()
    found = delta_norms(Use(adapter_of(truth, 0.5), -2.0))
    for name, (down, up) in truth.items():
        assert found[name] == pytest.approx(float((up.double() @ down.double()).norm()), rel=1e-9)


def test_nothing_outlives_the_attachment() -> None:
    model, adapter = make_model(), adapter_of(make_truth())
    attachment = attach(model, [Use(adapter)])
    alive = weakref.ref(attachment.model.proj_in._forward_hooks[next(iter(model.proj_in._forward_hooks))])  # type: ignore[arg-type, union-attr]
    attachment.detach()
    del attachment
    gc.collect()
    assert alive() is None


def test_branches_follow_their_rows_to_another_device() -> None:
    """The meta device stands in for a GPU: what matters is that nothing stays behind."""
    model = make_model()
    with attached(model, [Use(adapter_of(make_truth()))]):
        model.to("meta")
        assert model.proj_in(torch.empty(2, 16, device="meta")).shape == (2, 64)


def test_weights_that_moved_to_another_type_are_still_restored(tmp_path: Path) -> None:
    model = make_model()
    attachment: Attachment = attach(model, [Use(adapter_of(make_truth()))], fuse=True)
    model.to(torch.bfloat16)
    attachment.detach()
    assert fingerprint(model) == fingerprint(make_model().to(torch.bfloat16))
