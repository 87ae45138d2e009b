"""Pushed weights: all that an export has, then the changed ones alone; the mismatch against exact KL."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

from octavo.errors import ConfigError, UnsupportedError
from octavo.serving import WeightPush, export, mismatch


class Engine:
    """A `vllm.LLM`, as far as a push knows it."""

    def __init__(self):
        self.loaded, self.resets = [], 0

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        self.loaded.append(dict(kwargs["weights_iterator"]))

    def reset_prefix_cache(self):
        self.resets += 1


def same_bits(one, other):
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_the_first_push_is_the_export(make_llama, tmp_path):
    model, engine = make_llama("served"), Engine()
    export(model, tmp_path / "out")
    files = load_file(tmp_path / "out" / "model.safetensors")
    assert WeightPush(model).to_vllm(engine) == len(files)
    (pushed,) = engine.loaded
    assert pushed.keys() == files.keys()
    assert all(same_bits(pushed[name], files[name]) for name in files)


def test_later_pushes_have_changed_modules_alone(make_llama):
    model, engine = make_llama("served"), Engine()
    push = WeightPush(model)
    push.to_vllm(engine)
    assert push.to_vllm(engine) == 0 and len(engine.loaded) == engine.resets == 1
    attention = model.layers[1].attention
    attention.wk.weight.data[3, 5] += 1  # unseen by version counters
    assert push.to_vllm(engine) == 8
    modules = {name.rsplit(".", 2)[0] for name in engine.loaded[1]}
    assert modules == {"model.layers.1.self_attn"}, "q, k, v and o: an engine fuses three of them"
    model.layers[0].feed_forward.w2.weight.data *= 1 + 1e-6
    changed = push.to_vllm(engine)
    assert changed in (0, 6), "no code need change"


def test_weights_whose_load_failed_are_pushed_again(make_llama):
    class Failing(Engine):
        def collective_rpc(self, method, kwargs):
            raise RuntimeError("out of memory")

    model, engine = make_llama("served"), Engine()
    push = WeightPush(model)
    with pytest.raises(RuntimeError, match="out of memory"):
        push.to_vllm(Failing())
    assert push.to_vllm(engine) == len(dict(push))
    weight = model.layers[1].attention.wk.weight.data
    weight[3, 5] += 1
    with pytest.raises(RuntimeError, match="out of memory"):
        push.to_vllm(Failing())
    weight[3, 5] -= 1  # part of the changed weights may have been loaded
    assert push.to_vllm(engine) == 8 and push.to_vllm(engine) == 0


def test_another_engine_is_refused(make_llama):
    with pytest.raises(UnsupportedError, match=r"object has no collective_rpc.*octavo\.export"):
        WeightPush(make_llama("served")).to_vllm(object())


@pytest.mark.parametrize("byte", [0, 100, 1023])
def test_any_bit_changes_a_digest(byte):
    from octavo.serving.pushing import _digest

    x = torch.randint(256, (1024 + byte % 7,), dtype=torch.uint8)
    before = _digest(x)
    for bit in range(8):
        x[byte] ^= 1 << bit
        assert _digest(x) != before
        x[byte] ^= 1 << bit
    assert _digest(x) == before


def test_mismatch_estimates_kl():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(32, generator=generator)
    engine, trainer = logits.log_softmax(0), (logits + 0.1 * torch.randn(32, generator=generator)).log_softmax(0)
    exact = float((engine.exp() * (engine - trainer)).sum())
    tokens = torch.multinomial(engine.exp(), 200_000, replacement=True, generator=generator)
    found = mismatch(trainer[tokens], engine[tokens])
    assert found.tokens == 200_000 and abs(found.kl - exact) < 4 * found.error < 0.1 * exact
    assert found.largest == pytest.approx(float((engine - trainer).abs().max()))


def test_mismatch_of_the_same_policy_is_zero_and_masks_count():
    x = -torch.rand(4, 8)
    assert mismatch(x, x)[:3] == (0.0, 0.0, 0.0)
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[1, 2] = True
    one = mismatch(x + math.log(2), x, mask)
    assert one.tokens == 1 and one.kl == pytest.approx(1 - math.log(2), rel=1e-5) and one.error == math.inf
    for trainer, engine, wrong in [(x, x[:2], None), (x, x, mask[:1]), (x, x, ~mask & mask)]:
        with pytest.raises(ConfigError, match="mismatch: "):
            mismatch(trainer, engine, wrong)
