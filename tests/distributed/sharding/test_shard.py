"""Sharded models against the run of one process: codes and losses, bytes on the wire, and every kind of weight."""

from functools import partial
from unittest.mock import patch

import pytest
import ranks
import torch
from sharded import FP32, batch, full_state, llama, loss_of, reshard, step_alone, step_sharded, unshard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

import octavo
from octavo import kernels
from octavo.conversion import Policy
from octavo.distributed import BF16_GRADIENTS_POLICY, BF16_POLICY, send_tokens, shard
from octavo.distributed.sharding import embedding
from octavo.errors import ConfigError, NonFiniteError, UnsupportedError
from octavo.kernels.quant_spec import spec_of
from octavo.nn.linear import LinearLayer
from octavo.nn.scaling_state import scales
from octavo.numerics import INT8, PER_ROW, block_for, dequantize, quantize, rotate
from octavo.tensor import FP8Tensor, local
from octavo_bench.traffic import Traffic

STEPS = 2
ROWS = "embedding by rows"


def train(rank, count, recipe="folded", mesh=None, policy=None, freeze=(), dtype=torch.float32, by_rows=False, **shape):
    """Return the losses of a sharded run, those of one process, the plan, and the codes that are unlike."""
    model, alone = (llama(recipe, policy, dtype, **shape) for _ in range(2))
    for net in (model, alone):
        for name in freeze:
            net.get_parameter(name).requires_grad_(False)
    before = {name: p.detach().clone() for name, p in alone.named_parameters()}
    plan = shard(model, mesh, mp_policy=FP32, by_rows=[model.tok_embeddings] if by_rows else [])
    unlike = unlike_codes(model, alone)
    optimizers = [torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5) for net in (model, alone)]
    pairs = [
        (step_sharded(model, optimizers[0], step, rank, count), step_alone(alone, optimizers[1], step, count))
        for step in range(STEPS)
    ]
    moved = [name for name, p in alone.named_parameters() if not torch.equal(p, before[name])]
    state, expected = full_state(model), alone.state_dict()
    return {
        "pairs": pairs,
        "unlike": unlike,
        "reasons": {p.name: p.reason for p in plan.parameters},
        "sent": {p.name: p.sent for p in plan.parameters},
        "moved": moved,
        "names": list(state) == list(expected),
        "plain": all(type(v) is torch.Tensor and v.dtype == expected[k].dtype for k, v in state.items()),
        "error": max((state[k].float() - v.float()).abs().max().item() for k, v in expected.items()),
    }


def unlike_codes(model, alone):
    """Return the names of FP8 weights whose gathered codes are not those that one process makes."""
    unshard(model)
    names = []
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, FP8Tensor):
            target = spec_of(layer.recipe.fprop.weight)
            expected = kernels.quantize(alone.get_parameter(f"{name}.weight").detach(), *target)
            same = torch.equal(weight.codes.view(torch.uint8), expected.codes.view(torch.uint8))
            if target.granularity != "tensor":  # there layers that are computed together have one scale
                same = same and torch.equal(weight.scale, expected.scale)
                names += [] if same else [name]
            else:
                names += [] if weight.scale.item() >= expected.scale.item() else [name]
    reshard(model)
    return names


def in_int8(rank, count, mesh=None):
    """Return this rank's loss and gradients, less those of one process whose weights are the values of INT8 codes."""
    model, alone = (llama("rotated") for _ in range(2))
    with torch.no_grad():
        for layer in alone.modules():
            if isinstance(layer, LinearLayer) and layer.recipe.has_integer_fprop:
                made = quantize(layer.weight, INT8, PER_ROW, "float32", rotation=256)
                layer.weight.copy_(rotate(dequantize(made), block_for(layer.in_features, 256)))
    plan = shard(model, mesh, mp_policy=FP32, gather_int8=True)
    tokens, targets = batch(0, count)
    for _ in range(2):  # the second gather writes to memory of the first
        model.zero_grad()
        loss = loss_of(model, tokens[rank : rank + 1], targets[rank : rank + 1])
        loss.backward()
    losses = [loss_of(alone, tokens[row : row + 1], targets[row : row + 1]) for row in range(count)]
    (sum(losses) / count).backward()
    wanted = {name: parameter.grad for name, parameter in alone.named_parameters()}
    apart = {n: (p.grad.full_tensor() - wanted[n]).norm() / wanted[n].norm() for n, p in model.named_parameters()}
    sent = {parameter.name: parameter.sent for parameter in plan.parameters}
    return {"loss": loss.item() - losses[rank].item(), "gradients": max(apart.values()).item(), "sent": sent}


def two_ranks(rank, count):
    tied = {"tie_embeddings": True, "policy": Policy(keep_defaults=False)}
    return {
        "folded": train(rank, count),
        "bf16 weights": train(rank, count, dtype=torch.bfloat16),
        "tensorwise": train(rank, count, "tensorwise"),
        "block": train(rank, count, "block", dim=256, ffn=256, heads=1),
        "rowwise": train(rank, count, "rowwise"),
        "rotated": train(rank, count, "rotated"),
        "int8": in_int8(rank, count),
        "tied": train(rank, count, **tied),
        "embedding by rows": train(rank, count, by_rows=True, vocab=97),  # the first rank has 49 of them
        "frozen": train(rank, count, freeze=["layers.0.attention.wq.weight", "layers.1.feed_forward.w2.weight"]),
        "wire": wire(rank, count),
        "once": quantised_once(rank, count),
        "loaded": load_again(rank, count),
        "reduced": reduced(rank, count),
        "written": written(rank, count),
        "refused": refusals(),
        "left whole": left_whole(rank, count),
        "converted again": converted_again(rank, count),
        "books": books(rank, count),
        "rows": rows_only(rank, count),
        "told": told(rank),
        "lossless": [lossless(rank, count, weights) for weights in ("unchanged", "fp8")],
    }


def four_ranks(rank, count):
    return {
        "folded": train(rank, count),
        "hsdp": train(rank, count, mesh=hsdp()),
        "hsdp, rotated": train(rank, count, "rotated", mesh=hsdp()),
        "hsdp, int8": in_int8(rank, count, hsdp()),
        "embedding by rows": train(rank, count, by_rows=True),
        "hsdp, embedding by rows": train(rank, count, mesh=hsdp(), by_rows=True),
        "uneven": uneven(rank, count),
    }


def hsdp():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def books(rank, count):
    """Return of two sharded models with kept scales, of which one is stepped, whether each book has rolled."""
    models = [llama("delayed") for _ in range(2)]
    tokens, targets = batch(0, count)
    for model in models:
        shard(model, mp_policy=FP32)
        loss_of(model, tokens[rank : rank + 1], targets[rank : rank + 1]).backward()
    kept = [scales(model) for model in models]
    before = [book.scale_and_amax.clone() for book in kept]
    torch.optim.SGD(models[0].parameters(), lr=0.1).step()
    found = {
        "seen": [bool((stored[:, 1] > 0).any()) for stored in before],
        "rolled": [bool((book.history[0] > 0).any()) for book in kept],
        "as before": [torch.equal(book.scale_and_amax, stored) for book, stored in zip(kept, before, strict=True)],
        "scales": kept[0].scale_and_amax.clone(),
    }
    torch.optim.SGD(models[1].parameters(), lr=0.1).step()
    if rank == 0:  # of no model: nothing is asked of the other ranks, which would wait for ever
        torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1).step()
    return found


def wire(rank, count):
    """Return the bytes of a forward and backward pass, by FSDP2 in BF16, and by `shard`; and what the plan says."""
    found = {}
    for name, recipe in (("bf16", "bf16"), ("fp8", "folded"), ("int8", "rotated")):
        model = llama(recipe)
        plan = shard(model, gather_int8=name == "int8")
        tokens, targets = batch(0, count)
        with Traffic() as traffic:
            model(tokens[rank : rank + 1], targets[rank : rank + 1]).backward()
        layers = sum(p.bytes for p in plan.parameters if p.name.startswith("layers."))
        found[name] = {**traffic.bytes, "plan": plan.bytes + layers}
    return found


def rows_only(rank, count):
    """Return the bytes of an embedding's forward and backward pass, in BF16, and how often others were waited for."""
    net = nn.Sequential(nn.Embedding(1000, 64))
    shard(net, blocks=[], by_rows=[net[0]])
    with Traffic() as traffic:
        out = net(torch.tensor([[0, 999, 5, 0], [999, 7, 0, 0]]))
        out.sum().backward()
    said = ranks.refusal(ConfigError, lambda: net(torch.tensor([3, 1000])))
    none = net(torch.zeros(0, dtype=torch.int32))
    none.sum().backward()
    shapes = [*none.shape, *out.shape]
    bytes = traffic.bytes["all_to_all"]
    return {"bytes": bytes, "dtype": str(out.dtype), "kinds": sorted(traffic.calls), "said": said, "shapes": shapes}


def told(rank):
    """Return how often an embedding requests rows in forward passes with announced tokens; and if results agree."""
    net = nn.Sequential(nn.Embedding(1000, 64))
    shard(net, blocks=[], by_rows=[net[0]])
    tokens = torch.randint(0, 1000, (4, 9), generator=torch.Generator().manual_seed(rank))
    expected = [net(part) for part in tokens.chunk(2)]
    asked, look_up = [0], embedding._look_up

    def counting(*arguments):
        asked[-1] += 1
        return look_up(*arguments)

    sent = send_tokens(tokens, tokens.device, net, parts=2)
    with patch.object(embedding, "_look_up", counting):
        found = [net(part) for part in reversed(sent.chunk(2))][::-1]
        kept = len(net[0].ahead)
        asked.append(0)
        again = net(sent[:2])  # each is told of once
        asked.append(0)
        sent = send_tokens(tokens, tokens.device, net, parts=2)  # asks for two parts
        sent.remainder_(500)
        other = net(sent[:2])  # no longer what was told
    same = [*map(torch.equal, found, expected), torch.equal(again, expected[0])]
    rows = net[0].weight.full_tensor().detach()
    same.append(torch.equal(other, rows[tokens[:2]].bfloat16()))
    return {"asked": asked, "kept": kept, "same": same}


def quantised_once(rank, count):
    """Return how often weights are quantised in each step, of two passes that gather twice."""
    model = llama()
    shard(model, mp_policy=FP32)
    values = {id(local(parameter)) for parameter in model.parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # it moves no version
    calls, quantize = [0], kernels.quantize

    def counting(x, *arguments):
        calls[-1] += id(x) in values
        return quantize(x, *arguments)

    kernels.quantize = counting
    tokens, targets = batch(0, count)
    for _ in range(2):
        for _ in range(2):
            loss_of(model, tokens[rank : rank + 1], targets[rank : rank + 1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        calls.append(0)
    kernels.quantize = quantize
    return calls


def reduced(rank, count):
    """Return the collectives used with another reduction, and the error of its gradients."""
    gradients = []
    for scheme in (None, "bf16"):
        model = llama()
        shard(model, mp_policy=FP32, reduce=scheme)
        tokens, targets = batch(0, count)
        with Traffic() as traffic:
            loss_of(model, tokens[rank : rank + 1], targets[rank : rank + 1]).backward()
        gradients.append(torch.cat([local(p.grad).flatten() for p in model.parameters()]))
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    return {"kinds": sorted(traffic.bytes), "error": error.item()}


def lossless(rank, count, weights):
    """Return whether gradients that travel in BF16 have the sums of those in FP32: of two, no order can tell."""
    gradients = []
    for how in ({"mp_policy": BF16_POLICY}, {"mp_policy": BF16_GRADIENTS_POLICY, "reduce": "bf16"}):
        model = llama(policy=Policy(min_gain=0, weights=weights))
        shard(model, **how)
        tokens, targets = batch(0, count)
        loss_of(model, tokens[rank : rank + 1], targets[rank : rank + 1]).backward()
        gradients.append({name: local(p.grad) for name, p in model.named_parameters()})
    return all(torch.equal(gradients[1][name], gradient) for name, gradient in gradients[0].items())


def written(rank, count):
    """Return whether weights that are written in place, by no optimizer, are gathered as they are then."""
    model, other = llama(), llama()
    shard(model, mp_policy=FP32)
    tokens, targets = batch(0, count)
    before = loss_of(model, tokens, targets).item()
    with torch.no_grad():
        for parameter in (*model.parameters(), *other.parameters()):
            parameter.mul_(1.7)
    after = loss_of(model, tokens, targets).item()
    return before != after and after == loss_of(other, tokens, targets).item()


def load_again(rank, count):
    """Return whether weights loaded by copying and by assignment are gathered afterwards."""
    found = {}
    for assign in (False, True):
        model, other = llama(), llama()
        shard(model, mp_policy=FP32)
        tokens, targets = batch(0, count)
        loss_of(model, tokens, targets)
        state = {k: v.detach().clone().mul_(1.7) for k, v in model.state_dict().items()}
        model.load_state_dict(state, assign=assign)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(1.7)
        with Traffic() as traffic:
            loss = loss_of(model, tokens, targets)
        found[assign] = loss.item() == loss_of(other, tokens, targets).item(), traffic.bytes["all_gather"]
    return found


def converted_again(rank, count):
    """Return losses of FSDP2 with a change of recipe, each before that of one process; and the message for a NaN."""
    model, alone = llama(), llama()
    for module in (*model.layers, model):
        fully_shard(module, mp_policy=FP32)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5) for net in (model, alone)]
    pairs = []
    for step in range(2 * STEPS):
        for net in (model, alone) if step == STEPS else ():
            octavo.convert(net, "rowwise_bf16_fprop")
        pairs += [step_sharded(model, optimizers[0], step, rank, count), step_alone(alone, optimizers[1], step, count)]
    with torch.no_grad():
        local(model.layers[1].attention.wo.weight)[1, 2] = torch.nan  # a row of each rank
    return pairs, ranks.refusal(NonFiniteError, lambda: octavo.convert(model))


def left_whole(rank, count):
    """Return what is said of models of which a later module or an option is refused, and whether anything changed."""
    codes = nn.Linear(64, 64)
    codes.weight = llama(policy=Policy(weights="fp8")).layers[0].attention.wo.weight
    lasts = (codes, *(nn.Linear(8, 8) for _ in range(3)))
    late, scalar, strided, plain = (nn.Sequential(llama(), last) for last in lasts)
    scalar[1].gain = nn.Parameter(torch.ones(()))
    strided[1].weight = nn.Parameter(torch.ones(8, 8)[:, ::2])
    pair = nn.Sequential(nn.Embedding(4, 4), nn.Embedding(4, 4, 0))
    cube = init_device_mesh("cpu", (count, 1, 1), mesh_dim_names=("a", "b", "c"))
    attempts = [
        (late, {}),
        (scalar, {}),
        (strided, {}),
        (pair, {"by_rows": [*pair], "blocks": []}),
        (plain, {"reduce": "fp8-blocks"}),
        (plain, {"mesh": cube}),
        (plain, {"mesh": init_device_mesh("cpu", (1, count))}),
        (plain, {"blocks": [plain[0].layers]}),
    ]
    found = []
    for model, options in attempts:
        before = looks(model)
        said = ranks.refusal((ConfigError, UnsupportedError), partial(shard, model, **options))
        found.append((said, looks(model) == before))
    return found


def looks(model):
    hooks = [(len(m._state_dict_hooks), len(m._forward_pre_hooks), type(m).__name__) for m in model.modules()]
    return [(name, id(parameter)) for name, parameter in model.named_parameters()], hooks


def refusals():
    """Return the messages for models that cannot be sharded."""
    model, tied, padded = llama(), llama(tie_embeddings=True, policy=Policy(keep_defaults=False)), nn.Embedding(4, 4, 0)
    attempts = [
        lambda: shard(model, reshard_after_forward=2),
        lambda: shard(model, blocks=[nn.Linear(2, 2)]),
        lambda: shard(model, blocks=[model.layers[0].attention.wq]),
        lambda: shard(model, blocks=[model.layers[0].feed_forward.w1]),
        lambda: shard(model, by_rows=[nn.Embedding(2, 2)]),
        lambda: shard(tied, by_rows=[tied.tok_embeddings]),
        lambda: shard(nn.Sequential(padded), blocks=[], by_rows=[padded]),
        lambda: shard(model, by_rows=[model.tok_embeddings], offload_policy=CPUOffloadPolicy()),
        lambda: (shard(model), shard(model)),
        lambda: octavo.convert(model, "rowwise_bf16_fprop"),
        lambda: octavo.convert(FSDP1(nn.Linear(64, 64), device_id=torch.device("cpu"))),
    ]
    return [ranks.refusal((ConfigError, UnsupportedError), attempt) for attempt in attempts]


def uneven(rank, count):
    """Return outputs and gradients of layers whose rows do not divide, some of them fewer than ranks."""

    def build():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(64, 70), nn.GELU(), nn.Linear(70, 5), nn.Linear(5, 3, bias=False))
        octavo.convert(net, "folded", policy=Policy(min_features=1, fuse=False, keep_defaults=False))
        return net

    net, alone = build(), build()
    shard(net, mp_policy=FP32)
    optimizers = [octavo.optim.AdamW(n.parameters(), lr=1e-2, clip=0.1, states="fp32") for n in (net, alone)]
    pairs = []
    for step in range(STEPS):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        for n, optimizer in zip((net, alone), optimizers, strict=True):
            loss = n(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            pairs.append(loss.item())
    state = full_state(net)
    error = max((state[k] - v).abs().max().item() for k, v in alone.state_dict().items())
    return {"losses": pairs, "error": error, "norms": [o.grad_norm.item() for o in optimizers]}


@pytest.fixture(scope="module")
def two():
    return ranks.run(two_ranks, 2)


@pytest.fixture(scope="module")
def four():
    return ranks.run(four_ranks, 4)


@pytest.mark.parametrize(
    "case", ["folded", "bf16 weights", "tensorwise", "block", "rowwise", "rotated", "tied", "frozen", ROWS]
)
def test_two_ranks_are_one_process_to_the_bit(two, case):
    found = two[0][case]
    assert not found["unlike"]
    assert all(sharded == alone for sharded, alone in found["pairs"]) and found["error"] == 0


@pytest.mark.parametrize("case", ["folded", "hsdp", "hsdp, rotated", ROWS, f"hsdp, {ROWS}"])
def test_four_ranks_sum_in_another_order(four, case):
    found = four[0][case]
    assert not found["unlike"]
    assert found["pairs"][0][0] == found["pairs"][0][1]  # before the first sum
    assert all(sharded == pytest.approx(alone, rel=2e-5) for sharded, alone in found["pairs"])


def test_weights_gathered_in_int8_are_the_values_of_their_codes(two, four):
    for found, error in [(each["int8"], 1e-6) for each in two] + [(each["hsdp, int8"], 1e-5) for each in four]:
        assert found["loss"] == 0 and found["gradients"] < error
        assert found["sent"]["layers.0.feed_forward.w1.weight"] == "int8 row"
        assert found["sent"]["tok_embeddings.weight"] == "float32"


def test_rows_that_do_not_divide(four):
    found = four[0]["uneven"]
    assert found["losses"][0::2] == pytest.approx(found["losses"][1::2], rel=1e-6)
    assert found["error"] < 1e-6 and found["norms"][0] == pytest.approx(found["norms"][1], rel=1e-6)


def test_a_state_dict_is_plain(two):
    for case in ("folded", "bf16 weights", "tied"):
        assert two[0][case]["names"] and two[0][case]["plain"]


def test_one_byte_a_weight_is_sent(two):
    wire = two[0]["wire"]
    assert wire["int8"]["all_gather"] == wire["int8"]["plan"] == wire["fp8"]["all_gather"] == wire["fp8"]["plan"]
    assert wire["bf16"]["all_gather"] == wire["bf16"]["plan"]
    assert wire["fp8"]["reduce_scatter"] == wire["bf16"]["reduce_scatter"]


def test_a_weight_is_quantised_once_a_gather(two):
    assert two[0]["once"] == [14 * 4, 14 * 4, 0]


def test_what_is_sent(two):
    weight = "layers.0.feed_forward.w1.weight"
    sent = {case: two[0][case]["sent"][weight] for case in ("folded", "tensorwise", "block", "rowwise")}
    assert sent == {"folded": "e4m3 row", "tensorwise": "e4m3 tensor", "block": "e4m3 128x128", "rowwise": "float32"}
    for case in ("rowwise", "rotated"):
        assert "fprop and dgrad read different codes" in two[0][case]["reasons"][weight]
    assert "lm_head" not in two[0]["tied"]["reasons"]
    assert "reads its values" in two[0]["tied"]["reasons"]["tok_embeddings.weight"]


def test_an_embedding_sends_the_rows_that_are_looked_up_and_no_others(two):
    # Both look up rows 0, 5 and 7 of the first rank, and 999 of the second: the larger of what each sends and receives.
    assert "from 3 to 1000" in two[0]["rows"]["said"] and two[0]["rows"]["shapes"] == [0, 64, 2, 4, 64]
    rows, numbers, counts = (6 + 4) * 64 * 2, (6 + 4) * 8, (2 + 2) * 8
    assert two[0]["rows"]["kinds"] == ["all_to_all"] and two[0]["rows"]["dtype"] == "torch.bfloat16"
    assert sum(found["rows"]["bytes"] for found in two) == 2 * rows + numbers + counts


def test_an_embedding_that_was_told_of_tokens_asks_for_nothing_more(two):
    for found in two:
        told = found["told"]
        assert told["asked"] == [0, 1, 3] and told["kept"] == 0 and told["same"] == [True] * 4


def test_books_roll_with_their_own_model(two):
    found = two[0]["books"]
    assert found["seen"] == [True, True] and found["rolled"] == [True, False] and found["as before"] == [False, True]
    assert torch.equal(found["scales"], two[1]["books"]["scales"])


def test_frozen_weights_stay(two):
    assert not {"layers.0.attention.wq.weight", "layers.1.feed_forward.w2.weight"} & set(two[0]["frozen"]["moved"])
    assert "layers.0.attention.wo.weight" in two[0]["frozen"]["moved"]


def test_what_is_loaded_is_gathered(two):
    (copied, copied_bytes), (assigned, assigned_bytes) = two[0]["loaded"][False], two[0]["loaded"][True]
    assert copied and assigned and copied_bytes == assigned_bytes


def test_a_write_is_seen(two):
    assert two[0]["written"]


def test_gradients_in_bf16_lose_nothing_on_their_way(two):
    assert [found["lossless"] for found in two] == [[True, True]] * 2


def test_gradients_are_reduced_by_a_scheme(two):
    assert two[0]["reduced"]["kinds"] == ["all_gather", "all_to_all"]
    assert 0 < two[0]["reduced"]["error"] < 2**-8


def test_a_model_sharded_by_pytorch_is_converted_again(two):
    for pairs, message in (found["converted again"] for found in two):
        assert pairs[::2] == pairs[1::2]
        assert "layers.1.attention.wo.weight holds 2 value(s)" in message and "row 1, column 2" in message


def test_what_cannot_be_sharded_is_refused(two):
    words = ["reshard_after_forward = 2", "not a submodule", "is fused with layers", "is fused with layers"]
    words += [
        "not an embedding of the model",
        "lm_head.weight share one parameter",
        "padding_idx",
        "on the device",
        "already",
        "layers.0.attention.wq.weight is gathered as FP8 codes",
        "(FSDP1) has taken the weights",
    ]
    assert len(two[0]["refused"]) == len(words)
    assert all(word in said for word, said in zip(words, two[0]["refused"], strict=True))


def test_a_model_that_is_refused_stays_as_it_was(two):
    words = ["needs row-wise scales", "1.gain is a scalar", "1.weight is not contiguous", "with padding_idx"]
    words += ["unknown reduction 'fp8-blocks'", "3 dimensions", "without names", "ModuleList has no forward"]
    for result in two:
        assert [(word, True) for word in words] == [
            (word if word in said else said, unchanged)
            for word, (said, unchanged) in zip(words, result["left whole"], strict=True)
        ]


def test_without_a_process_group():
    with pytest.raises(ConfigError, match="torchrun"):
        shard(llama())


def train_attention(rank, count):
    """Return the gradients of a sharded `nn.TransformerEncoderLayer`, those of one process, and what was sent."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True))
        octavo.convert(nets[-1], "folded")
    model, alone = nets
    plan = shard(model, mp_policy=FP32)
    x = torch.randn(count, 2, 6, 32)
    model(x[rank]).square().mean().backward()
    for rows in x:
        (alone(rows).square().mean() / count).backward()
    found = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    return found, expected, {p.name: p.sent for p in plan.parameters}


def test_attention_of_pytorch_is_sharded_with_its_packed_weight_as_values():
    for found, expected, sent in ranks.run(train_attention, 2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
        assert (sent["self_attn.in_proj_weight"], sent["self_attn.out_proj.weight"]) == ("float32", "e4m3 row")
