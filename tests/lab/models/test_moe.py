"""The mixture of experts: its formula, its balance, its size, and a training with experts in FP8."""

import copy

import pytest
import torch
import torch.nn.functional as F

import octavo
from octavo import optim
from octavo.errors import ConfigError
from octavo.lab.models import ModelConfig, build, count_parameters, flops_per_token
from octavo.lab.models.moe import Mixture, MoE
from octavo.nn.experts import Experts

SIZES = {"architecture": "moe", "vocab": 32, "dim": 32, "layers": 2, "heads": 2, "sequence": 16, "experts": 4}


def moe(**changes):
    return build(ModelConfig(**{**SIZES, **changes}), 0)


def batch(seed=0):
    tokens = torch.randint(32, (4, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def test_it_is_the_formula():
    torch.manual_seed(0)
    mixture = Mixture(ModelConfig(**SIZES, shared_experts=1))
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    mixture.bias[2] = 0.2
    x = torch.randn(3, 5, 32)
    y, balance = mixture(x)
    scores = (x @ mixture.router.weight.T).softmax(-1)
    chosen = (scores + mixture.bias).argsort(-1, descending=True)[..., :2]
    want = mixture.shared(x)
    for e in range(4):
        gate, up = (x @ mixture.experts.gate_up[e].T).chunk(2, -1)
        share = (scores * (chosen == e).any(-1, keepdim=True))[..., e] / scores.gather(-1, chosen).sum(-1)
        want = want + share[..., None] * ((F.silu(gate) * up) @ mixture.experts.down[e].T)
    torch.testing.assert_close(y, want)
    counts = torch.bincount(chosen.flatten(), minlength=4)
    torch.testing.assert_close(balance, 4 * (counts / 30 * scores.flatten(0, 1).mean(0)).sum())
    assert torch.equal(mixture.counts, counts.float())


def test_tokens_are_counted_in_training_steps_since_the_last_balance():
    model = moe()
    mixtures = [block.feed_forward for block in model.layers]
    model.eval()(*batch())
    with torch.no_grad():
        model.train()(*batch())
    assert all(torch.equal(mixture.counts, torch.zeros(4)) for mixture in mixtures)
    for _ in range(2):
        model(*batch())
    assert [mixture.counts.sum() for mixture in mixtures] == [2 * 4 * 16 * 2] * 2
    model.balance(lambda x: x)
    assert all(torch.equal(mixture.counts, torch.zeros(4)) for mixture in mixtures)


def test_it_gives_shapes_on_the_meta_device():
    model = moe().to("meta")
    octavo.convert(model, policy=octavo.Policy(min_features=16))
    loss = model(*(ids.to("meta") for ids in batch()))
    loss.backward()
    assert loss.is_meta and model.layers[0].feed_forward.router.weight.grad.is_meta


def test_biases_make_experts_equally_busy():
    model = moe(balance_rate=0.01, layers=1)
    model.layers[0].feed_forward.bias[1] = 0.5  # all tokens go to one expert

    def spread():
        mixture = model.layers[0].feed_forward
        return float(mixture.counts.max() / mixture.counts.mean())

    model(*batch())
    before = spread()
    for _ in range(60):
        model.balance(lambda x: x)
        model(*batch())
    assert before == 2.0 and spread() < 1.35


def test_the_balance_loss_is_of_training_alone():
    model, plain = moe(balance_loss=0.1), moe()
    difference = model(*batch()) - plain(*batch())
    assert 0.1 * 2 * 0.99 < difference < 0.1 * 2 * 1.5
    assert torch.equal(model.eval()(*batch()), plain.eval()(*batch()))


def test_sizes():
    config = ModelConfig(**SIZES, experts_per_token=2, shared_experts=1, ffn=48)
    model = build(config, 0)
    assert isinstance(model, MoE)
    expert = 3 * 32 * 48
    assert count_parameters(model) == 2 * 32 * 32 + 32 + 2 * (4 * 32 * 32 + 2 * 32 + 4 * 32 + 5 * expert)
    assert flops_per_token(config, 16) == 6 * (32 * 32 + 2 * (4 * 32 * 32 + 4 * 32 + 3 * expert)) + 6 * 2 * 32 * 16
    assert ModelConfig(**{**SIZES, "dim": 768}).ffn_dim == 1024  # half of a Llama's, by its two experts


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"experts_per_token": 5}, "5 experts per token of model.experts 4"), ({"balance_rate": -1.0}, "is negative")],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**{**SIZES, **changes})


def test_a_block_compiles_whole_before_it_is_converted():
    model, compiled = moe(layers=1), moe(layers=1)
    compiled.layers[0].compile(fullgraph=True, backend="aot_eager")
    loss, again = (m(*batch()) for m in (model, compiled))
    loss.backward()
    again.backward()
    assert torch.equal(loss, again)
    for own, other in zip(model.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_a_block_compiles_whole_after_it_is_converted():
    torch._dynamo.reset()
    model = moe()
    octavo.convert(model, "rotated", policy=octavo.Policy(min_gain=0))
    expected = model(*batch()).float().mean()
    for block in model.get_submodule("layers").children():
        block.compile(fullgraph=True, backend="aot_eager")
    assert torch.equal(model(*batch()).float().mean(), expected)


@pytest.mark.parametrize(("recipe", "states"), [("folded", "exact"), ("folded", "fp8-min"), ("rotated", "exact")])
def test_it_trains_in_fp8_as_in_bf16(recipe, states):
    wide = moe(shared_experts=1, layers=1).bfloat16()
    fp8 = copy.deepcopy(wide)
    octavo.convert(fp8, recipe)
    assert {
        product.recipe.name for each in fp8.modules() if isinstance(each, Experts) for product in each.products
    } == {recipe}
    losses = {}
    for name, model in (("bf16", wide), (states, fp8)):
        optimizer = optim.AdamW(model.parameters(), lr=3e-3, states=states)
        for step in range(12):
            loss = model(*batch(step % 2))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.balance(lambda x: x)
        losses[name] = loss.item()
    assert losses[states] < 3.0 and abs(losses[states] - losses["bf16"]) < 0.05
