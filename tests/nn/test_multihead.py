"""`nn.MultiheadAttention` with its projections in FP8."""

import copy
import itertools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import octavo
from octavo.conversion import Policy
from octavo.errors import NonFiniteError
from octavo.kernels import record
from octavo.kernels.sample import STATS
from octavo.nn import multihead, telemetry_rows
from octavo.nn.shared import SharedInput
from octavo.nn.telemetry import Telemetry
from octavo.recipes import load
from octavo.serving.layers import NOT_STORED, unserved_layers

RECIPE = "folded"
WIDTH, HEADS, BATCH, QUERIES, KEYS = 32, 4, 3, 7, 9


def attention(**options):
    torch.manual_seed(0)
    return nn.MultiheadAttention(WIDTH, HEADS, **options)


def converted(module, recipe=RECIPE, **policy):
    octavo.convert(nn.Sequential(module), recipe, policy=Policy(**policy))
    return module


def inputs(which, batch_first, is_batched, dtype=torch.float32):
    """Return query, key and value: `self`, `memory` (key is value), `position` (query is key), `three`."""

    def draw(length):
        shape = (BATCH, length) if batch_first else (length, BATCH)
        return torch.randn(*(shape if is_batched else (length,)), WIDTH, dtype=dtype)

    query, memory = draw(QUERIES), draw(KEYS)
    return {
        "self": (query, query, query),
        "memory": (query, memory, memory),
        "position": (query, query, draw(QUERIES)),
        "three": (query, memory, draw(KEYS)),
    }[which]


def masks(padding, mask, keys, is_batched, is_causal, dtype):
    """Return key_padding_mask and attn_mask of some kinds: None, `bool`, `float`, or `heads`, one per head."""
    ignored = torch.zeros(BATCH, keys, dtype=torch.bool)
    ignored[0, -2:] = True
    ignored = ignored if is_batched else ignored[0]
    later = torch.ones(QUERIES, keys, dtype=torch.bool).triu(1)
    added = torch.zeros(later.shape, dtype=dtype).masked_fill(later, -torch.inf)
    heads = torch.rand((BATCH if is_batched else 1) * HEADS, *later.shape) < 0.3
    heads[..., 0] = False  # a query that sees no key has NaN
    kinds = {
        "bool": later,
        "float": added if is_causal else torch.randn(later.shape, dtype=dtype),
        "heads": heads,
    }
    floats = torch.zeros(ignored.shape, dtype=dtype).masked_fill(ignored, -torch.inf)
    return {None: None, "bool": ignored, "float": floats}[padding], kinds.get(mask)


ARGUMENTS = [
    SimpleNamespace(which=which, padding=padding, mask=mask, is_causal=is_causal, weights=weights, is_batched=batched)
    for which, padding, mask, is_causal, (weights, batched) in itertools.product(
        ("self", "memory", "position", "three"), (None, "bool", "float"), (None, "bool", "float", "heads"),
        (False, True), ((None, True), ("mean", True), ("heads", False)),
    )
    if mask or not is_causal
]  # fmt: skip


OPTIONS = [{}, {"bias": False, "add_bias_kv": True}, {"add_zero_attn": True, "dropout": 0.2}]


def in_high_precision(module, x, weights, biases):
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize(("turn", "batch_first", "options"), [
    (turn, *each) for turn, each in enumerate(itertools.product([False, True], OPTIONS))
])  # fmt: skip
def test_its_steps_are_those_of_pytorch_bit_for_bit(monkeypatch, turn, batch_first, options):
    """In BF16, with the projections in high precision: masks, added keys, dropout, weights, sizes and layouts."""
    monkeypatch.setattr(multihead.MultiheadAttention, "_multiply", in_high_precision)
    theirs = attention(batch_first=batch_first, **options).bfloat16()
    ours = copy.deepcopy(theirs)
    multihead.adopt(ours, load(RECIPE))
    for case in ARGUMENTS[turn :: 2 * len(OPTIONS) - 1]:  # all of them over the options, and each value with each
        given = inputs(case.which, batch_first, case.is_batched, torch.bfloat16)
        keys = KEYS if case.which in ("memory", "three") else QUERIES
        padding, mask = masks(case.padding, case.mask, keys, case.is_batched, case.is_causal, torch.bfloat16)
        arguments = {
            "key_padding_mask": padding, "attn_mask": mask, "is_causal": case.is_causal,
            "need_weights": case.weights is not None, "average_attn_weights": case.weights == "mean",
        }  # fmt: skip
        results = []
        with record() as ledger:
            for module in (theirs, ours):
                torch.manual_seed(1)
                results.append(module(*given, **arguments))
        assert not ledger.fallbacks, case
        torch.testing.assert_close(
            results[1], results[0], rtol=0, atol=0, msg=lambda text, case=case: f"{case}: {text}"
        )


def as_layers(module, recipe):
    """Return the projections of a module as two layers of Octavo's with copies of its weights."""
    like = {"device": module.in_proj_weight.device, "dtype": module.in_proj_weight.dtype, "recipe": recipe}
    packed = octavo.nn.Linear(module.embed_dim, 3 * module.embed_dim, **like)
    out = octavo.nn.Linear(module.embed_dim, module.embed_dim, **like)
    packed.load_state_dict({"weight": module.in_proj_weight, "bias": module.in_proj_bias})
    out.load_state_dict(module.out_proj.state_dict())
    return packed, out


def gradients_alike(module, packed, out):
    pairs = (
        (module.in_proj_weight, packed.weight), (module.in_proj_bias, packed.bias),
        (module.out_proj.weight, out.weight), (module.out_proj.bias, out.bias),
    )  # fmt: skip
    return all(torch.equal(one.grad, other.grad) for one, other in pairs)


@pytest.mark.parametrize("recipe", ["folded", "rotated", "rowwise", "current", "blockwise"])
def test_it_is_two_linear_layers_around_attention_bit_for_bit(recipe):
    module, x = attention(batch_first=True), torch.randn(BATCH, QUERIES, WIDTH)
    packed, out = as_layers(module, recipe)
    converted(module, recipe)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with record() as ledger:
        y = module(ours, ours, ours, need_weights=False)[0]
        y.square().sum().backward()
    assert sum(ledger.gemms.values()) == 6 and not ledger.fallbacks
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in packed(theirs).chunk(3, dim=-1))
    expected = out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    expected.square().sum().backward()
    assert torch.equal(y, expected) and torch.equal(ours.grad, theirs.grad) and gradients_alike(module, packed, out)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("recipe", ["folded", "rotated"])
def test_recorded_launches_have_the_same_bits_on_a_gpu(recipe):
    """From the third call on; keys and values of a memory read two thirds of the packed weight."""
    module = nn.MultiheadAttention(256, 4, batch_first=True, device="cuda", dtype=torch.bfloat16)
    packed, out = as_layers(module, recipe)
    converted(module, recipe, min_gain=0.0)
    for _ in range(4):
        x, memory = torch.randn(2, 8, 128, 256, device="cuda", dtype=torch.bfloat16).unbind()
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in packed(x).chunk(3, dim=-1))
        expected = out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = module(x, x, x, need_weights=False)[0]
        for each in (y, expected):
            each.square().sum().backward()
        assert torch.equal(y, expected) and gradients_alike(module, packed, out)
        y = module(x, memory, memory, need_weights=False)[0]
        with octavo.disabled(module):
            plain = module(x, memory, memory, need_weights=False)[0]
        assert (y - plain).norm() < 0.1 * plain.norm()


def test_keys_and_values_of_a_memory_are_one_product():
    """Their rows of the packed weight are a layer of their own, and the gradient reaches the packed weight."""
    module = converted(attention())
    query, memory, _ = inputs("memory", batch_first=False, is_batched=True)
    with record() as ledger:
        y = module(query, memory, memory, need_weights=False)[0]
        y.sum().backward()
    assert sum(ledger.gemms.values()) == 2 * 2 + 3, "fprop and wgrad of both parts of the packed weight, and out_proj"
    q, kv = (octavo.nn.Linear(WIDTH, rows, recipe=RECIPE) for rows in (WIDTH, 2 * WIDTH))
    weight, bias = module.in_proj_weight.detach(), module.in_proj_bias.detach()
    q.load_state_dict({"weight": weight[:WIDTH], "bias": bias[:WIDTH]})
    kv.load_state_dict({"weight": weight[WIDTH:], "bias": bias[WIDTH:]})
    heads = [t.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3) for t in (q(query), *kv(memory).chunk(2, dim=-1))]
    module.out_proj(F.scaled_dot_product_attention(*heads).permute(2, 0, 1, 3).flatten(2)).sum().backward()
    assert torch.equal(module.in_proj_weight.grad, torch.cat([q.weight.grad, kv.weight.grad]))


SEPARATE = {
    "a memory": {"kdim": 64, "vdim": 64},
    "query is key": {"vdim": 64, "bias": False, "add_bias_kv": True},
    "three": {"kdim": 64, "vdim": 96, "add_zero_attn": True},
}


def separate_inputs(which, dtype=torch.float32):
    """Return query, key and value for the options of that name in `SEPARATE`, batch first."""
    query = torch.randn(BATCH, QUERIES, WIDTH, dtype=dtype)
    key = query if which == "query is key" else torch.randn(BATCH, KEYS, 64, dtype=dtype)
    value = torch.randn(*key.shape[:2], SEPARATE[which]["vdim"], dtype=dtype)
    return query, key, key if which == "a memory" else value


@pytest.mark.parametrize("which", SEPARATE)
def test_steps_with_a_weight_each_are_those_of_pytorch_bit_for_bit(monkeypatch, which):
    monkeypatch.setattr(multihead.MultiheadAttention, "_multiply", in_high_precision)
    theirs = attention(batch_first=True, **SEPARATE[which]).bfloat16()
    ours, given = copy.deepcopy(theirs), separate_inputs(which, torch.bfloat16)
    multihead.adopt(ours, load(RECIPE))
    padding, mask = masks("float", "heads", given[1].shape[1], True, False, torch.bfloat16)
    padding = None if which == "query is key" else padding
    for arguments in ({}, {"need_weights": False}, {"key_padding_mask": padding}, {"attn_mask": mask}):
        for got, expected in zip(ours(*given, **arguments), theirs(*given, **arguments), strict=True):
            assert got is expected is None or torch.equal(got, expected), arguments


class Separate(nn.Module):
    """Attention of three layers of Octavo's with the weights of a module; layers of one input are computed together."""

    def __init__(self, module, recipe, shared):
        super().__init__()
        bias = module.in_proj_bias is not None
        weights = multihead.projection_weights(module)
        self.layers = nn.ModuleList(octavo.nn.Linear(*w.shape[::-1], bias=bias, recipe=recipe) for w in weights)
        self.out = octavo.nn.Linear(WIDTH, WIDTH, bias=bias, recipe=recipe)
        self.out.load_state_dict(module.out_proj.state_dict())
        for number, (layer, weight) in enumerate(zip(self.layers, weights, strict=True)):
            biases = {"bias": module.in_proj_bias.view(3, -1)[number]} if bias else {}
            layer.load_state_dict({"weight": weight, **biases})
        group = SharedInput([self.layers[number] for number in shared])
        for number in shared:
            self.layers[number].shared = group

    def forward(self, inputs, extend):
        projected = [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in projected)
        k, v, _ = extend(k, v, None)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("which", "shared"), [("a memory", (1, 2)), ("query is key", (0, 1)), ("three", ())])
@pytest.mark.parametrize("recipe", ["folded", "rotated"])
def test_a_weight_each_is_a_layer_each_bit_for_bit(recipe, which, shared):
    """The input of neighbours is quantised once."""
    module, given = attention(batch_first=True, **SEPARATE[which]), separate_inputs(which)
    expected = Separate(module, recipe, shared)
    converted(module, recipe)
    results = []
    for run in (lambda: module(*given, need_weights=False)[0], lambda: expected(given, module._extend)):
        for x in given:
            x.requires_grad_().grad = None
        with record() as ledger:
            y = run()
            y.square().sum().backward()
        results.append((y, *(x.grad for x in given), ledger.gemms.total()))
        assert not ledger.fallbacks
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(wanted))
    weights = zip(multihead.projection_weights(module), expected.layers, strict=True)
    assert all(torch.equal(weight.grad, layer.weight.grad) for weight, layer in weights)
    if module.in_proj_bias is not None:
        assert torch.equal(module.in_proj_bias.grad, torch.cat([layer.bias.grad for layer in expected.layers]))


def test_a_weight_each_is_one_row_of_the_plan_and_pytorchs_again_after_revert():
    plain = attention(**SEPARATE["three"])
    module = copy.deepcopy(plain)
    plan = octavo.convert(module, RECIPE)
    row = plan.layers[0]
    assert (row.name, row.shape, row.is_fp8) == ("in_proj", (WIDTH, WIDTH + 64 + 96), True)
    assert row.reason == "three weights: 32 x 32, 32 x 64, 32 x 96" and not plan.unconverted
    assert list(module.state_dict()) == list(plain.state_dict())
    assert telemetry_rows.find(module)[1] == {"in_proj": "q, k and v have a weight each (kdim, vdim)"}
    given = [x.transpose(0, 1) for x in separate_inputs("three")]
    copied = pickle.loads(pickle.dumps(module))
    assert torch.equal(copied(*given)[0], module(*given)[0])
    with octavo.disabled(module):
        assert torch.equal(module(*given)[0], plain(*given)[0])
    assert octavo.revert(module) == 2 and type(module) is nn.MultiheadAttention
    assert torch.equal(module(*given)[0], plain(*given)[0])


def test_a_weight_each_is_converted_as_a_whole():
    """One projection that does not fit keeps all three, and one recipe computes them."""
    narrow = octavo.plan(nn.MultiheadAttention(64, 4, kdim=8, vdim=64), RECIPE).layers[0]
    assert not narrow.is_fp8 and narrow.reason == "fewer than 32 features"
    odd = octavo.plan(nn.MultiheadAttention(64, 4, kdim=64, vdim=40), "rotated").layers[0]
    assert odd.recipe != "rotated" and "divides 40 features" in odd.reason


@pytest.mark.parametrize("batch_first", [False, True])
def test_the_output_of_attention_is_saved_once(batch_first):
    """PyTorch's attention saves it; `out_proj` quantises that tensor again in backward, if it reads its memory."""
    module = attention(batch_first=batch_first)
    plan = octavo.convert(module, RECIPE)
    assert [row.keeps_input for row in plan.layers] == [False, batch_first]
    x = torch.randn(BATCH, QUERIES, WIDTH)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        module(x, x, x, need_weights=False)
    floats = [t for t in saved if t.is_floating_point() and t.element_size() == 4]
    outputs = {t.untyped_storage().data_ptr() for t in floats if t.numel() == x.numel() and t.dim() == 4}
    again = {t.untyped_storage().data_ptr() for t in floats if t.shape == (BATCH * QUERIES, WIDTH)}
    assert (len(again) == 1 and again <= outputs) if batch_first else not again


def test_without_fp8_it_is_pytorchs():
    plain = attention(batch_first=True)
    module = converted(copy.deepcopy(plain))
    x = torch.randn(BATCH, QUERIES, WIDTH)
    with octavo.disabled(module):
        for got, expected in zip(module(x, x, x), plain(x, x, x), strict=True):
            assert torch.equal(got, expected)
    with torch.no_grad():
        assert not torch.equal(module.eval()(x, x, x)[0], plain.eval()(x, x, x)[0]), "FP8 in evaluation too"


def test_names_files_and_classes_are_pytorchs():
    plain = attention()
    module, x = converted(copy.deepcopy(plain)), torch.randn(QUERIES, BATCH, WIDTH)
    assert list(module.state_dict()) == list(plain.state_dict()) and isinstance(module, nn.MultiheadAttention)
    module.load_state_dict(plain.state_dict())
    y = module(x, x, x)[0]
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(x, x, x)[0], y)
    assert octavo.revert(module) == 2
    assert type(module) is nn.MultiheadAttention and vars(module).keys() == vars(plain).keys()
    assert type(module.out_proj) is type(plain.out_proj) and torch.equal(module(x, x, x)[0], plain(x, x, x)[0])


def test_weights_in_fp8_are_those_of_out_proj():
    module = attention()
    plan = octavo.convert(module, RECIPE, policy=Policy(weights="fp8"))
    assert [(row.name, row.weight) for row in plan.layers] == [("in_proj", "unchanged"), ("out_proj", "fp8")]
    assert plan.layers[0].reason == "its weights stay as they are"
    x = torch.randn(QUERIES, BATCH, WIDTH)
    with octavo.disabled(module), record() as ledger:
        y = module(x, x, x, need_weights=False)[0]
    plain = attention()
    with torch.no_grad():
        plain.out_proj.weight.copy_(module.out_proj.weight.dequantize())
    assert not ledger.gemms
    torch.testing.assert_close(y, plain(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"attn_mask": torch.zeros(1, QUERIES)}, "its shapes or its masks do not fit"),
        ({"key_padding_mask": torch.zeros(BATCH, 1)}, "its shapes or its masks do not fit"),
        ({"is_causal": True}, "its shapes or its masks do not fit"),
        ({"attn_mask": torch.zeros(QUERIES, QUERIES, dtype=torch.int32)}, "a mask is"),
    ],
)
def test_arguments_that_pytorch_refuses_have_its_error(arguments, why):
    plain = attention()
    module, x = converted(copy.deepcopy(plain)), torch.randn(QUERIES, BATCH, WIDTH)
    with pytest.raises((RuntimeError, AssertionError)) as theirs:
        plain(x, x, x, need_weights=False, **arguments)
    with record() as ledger, pytest.raises((RuntimeError, AssertionError)) as ours:
        module(x, x, x, need_weights=False, **arguments)
    assert str(ours.value) == str(theirs.value) and why in ledger.fallbacks[0]


def test_nested_tensors_are_computed_by_pytorch_and_said():
    module = converted(attention(batch_first=True)).eval()
    x = torch.nested.nested_tensor([torch.randn(5, WIDTH), torch.randn(7, WIDTH)])
    with torch.no_grad(), record() as ledger:
        y = module(x, x, x, need_weights=False)[0]
    assert y.is_nested and "nested tensors" in ledger.fallbacks[0] and not ledger.gemms


def test_a_weight_that_is_not_finite_is_refused():
    module = attention()
    with torch.no_grad():
        module.in_proj_weight[1, 2] = torch.nan
    with pytest.raises(NonFiniteError, match="in_proj_weight holds 1 value"):
        converted(module)


def test_autocast_decides_the_dtype():
    module, x = converted(attention(batch_first=True)), torch.randn(BATCH, QUERIES, WIDTH)
    padding, _ = masks("bool", None, QUERIES, True, False, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x, x, x, key_padding_mask=padding, need_weights=False)[0].dtype == torch.bfloat16
        y, weights = module(x, x, x, key_padding_mask=padding)
    assert y.dtype == torch.bfloat16 and not y.isnan().any() and weights.shape == (BATCH, QUERIES, QUERIES)


@pytest.mark.parametrize("which", ["self", *SEPARATE])
def test_compiled_code_is_one_graph_with_the_same_bits(which):
    module = converted(attention(batch_first=True, **SEPARATE.get(which, {})))
    given = inputs("self", True, True) if which == "self" else separate_inputs(which)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = module(*given, need_weights=False)[0]
        assert torch.equal(compiled(*given, need_weights=False)[0], expected)


def measured(model, x, *others):
    """Return the output for inputs, and the telemetry of its step by layer and role."""
    with Telemetry(model) as telemetry:
        y = model(x, *others)
        y = y[0] if isinstance(y, tuple) else y
        y.square().sum().backward()
        telemetry.step()
        _, values = telemetry.snapshot()
        return y, {(row.layer, row.role): found for row, found in zip(telemetry.rows, values, strict=True)}


@pytest.mark.parametrize("recipe", ["folded", "rotated", "current"])
def test_telemetry_of_its_in_projection_is_that_of_a_linear_layer(recipe):
    module, x = attention(batch_first=True), torch.randn(BATCH, QUERIES, WIDTH)
    packed, out = as_layers(module, recipe)
    converted(module, recipe)
    expected = module(x, x, x)[0]
    y, values = measured(module, x, x, x)
    assert torch.equal(y, expected) and module.stats_slot is None

    class Around(nn.Module):
        """The same attention around two layers of Octavo's."""

        def __init__(self):
            super().__init__()
            self.in_proj, self.out_proj = packed, out

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.in_proj(x).chunk(3, dim=-1))
            return self.out_proj(multihead._attend(q, k, v, None, 0.0)[0].transpose(1, 2).flatten(2))

    _, theirs = measured(Around(), x)
    assert values.keys() == theirs.keys() and len(values) == 8
    for key, found in values.items():
        assert np.array_equal(found, theirs[key], equal_nan=True), key


def test_telemetry_of_several_inputs_is_of_the_last_product_and_sees_a_nan_in_any():
    module = converted(attention(batch_first=True))
    query, memory = torch.randn(BATCH, QUERIES, WIDTH), 3 * torch.randn(BATCH, KEYS, WIDTH)
    _, values = measured(module, query, memory, memory)
    kv = octavo.nn.Linear(WIDTH, 2 * WIDTH, recipe=RECIPE)
    kv.load_state_dict({"weight": module.in_proj_weight[WIDTH:], "bias": module.in_proj_bias[WIDTH:]})
    _, theirs = measured(kv, memory)
    for role, found in (("input", theirs["", "input"]), ("weight", theirs["", "weight"])):
        of_sample = [STATS.index(name) for name in ("flushed", "mean", "variance", "kurtosis")]
        assert np.array_equal(values["in_proj", role][of_sample], found[of_sample]), role
    assert values["in_proj", "grad_weight"][STATS.index("amax")] == module.in_proj_weight.grad.abs().max()
    query[1, 2, 3] = torch.nan
    _, values = measured(module, query, memory, memory)
    assert values["in_proj", "input"][STATS.index("nonfinite")] > 0


def test_compiled_code_has_the_same_telemetry():
    x, found = torch.randn(BATCH, QUERIES, WIDTH), []
    for is_compiled in (False, True):
        module = converted(attention(batch_first=True))
        if is_compiled:
            module.compile(backend="aot_eager", fullgraph=True)
        found.append(measured(module, x, x, x)[1])
    for key, values in found[0].items():
        np.testing.assert_allclose(values, found[1][key], rtol=1e-5, atol=1e-7, err_msg=str(key))


def test_the_module_of_a_measured_layer():
    model = nn.ModuleDict({"attn": attention()})
    octavo.convert(model, RECIPE)
    layers, left = telemetry_rows.find(model)
    assert not left
    assert [telemetry_rows.module_of(model, name) for name in layers] == [*layers.values()]
    assert layers["attn.in_proj"] is model["attn"]


def test_what_it_cannot_report_is_named():
    """Counts of errors and an export list the in-projection, which no layer has."""
    model = nn.ModuleDict({"attn": attention()})
    octavo.convert(model, RECIPE)
    with octavo.observed(model) as report:
        model["attn"](*inputs("self", False, True))
    assert report.not_counted == ("attn",)
    assert unserved_layers(model, [])["attn"] == NOT_STORED


class RelistedEachTime(nn.Module):
    """Makes new parameters whenever modules are listed, as PEFT's wrapper of `nn.MultiheadAttention` does."""

    def __init__(self):
        super().__init__()
        self.base = attention()

    def named_modules(self, *arguments, **options):
        self.base.in_proj_weight = nn.Parameter(self.base.in_proj_weight.detach())
        self.base.out_proj.weight = nn.Parameter(self.base.out_proj.weight.detach())
        return super().named_modules(*arguments, **options)


def test_a_weight_that_another_library_replaces_is_still_that_of_its_row():
    plan = octavo.plan(RelistedEachTime(), RECIPE)
    assert [row.name for row in plan.layers] == ["base.in_proj", "base.out_proj"] and not plan.unconverted
