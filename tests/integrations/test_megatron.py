"""Megatron-Core's GPT from a layer spec in FP8: its losses and gradients, on one rank and cut over two."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core (octavo[megatron])")

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from octavo import kernels
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.megatron import ColumnParallelLinear, RowParallelLinear, fp8_spec

SEQUENCE, BATCH, VOCAB, STEPS = 32, 4, 96, 6


class Attention(torch.nn.Module):
    """Causal attention in place of Megatron's, whose buffers want a GPU. Shapes: sequence, batch, heads, features."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return found.permute(2, 0, 1, 3).flatten(2)


def gpt(recipe: str | None, size: int) -> Any:
    """Return a model whose parameters do not depend on how it is cut."""
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128, gated_linear_unit=True,
        add_bias_linear=False, add_qkv_bias=True, hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=True, tensor_model_parallel_size=size,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = Attention
    torch.manual_seed(0)
    return GPTModel(
        config,
        spec if recipe is None else fp8_spec(spec, recipe),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        position_embedding_type="learned_absolute",  # its rotary tables want a GPU
    )


def train(model: Any) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0), []
    tokens = (torch.arange(SEQUENCE) * torch.arange(1, BATCH + 1)[:, None]) % VOCAB
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    for _ in range(STEPS):
        loss = model(tokens, positions, mask, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check(rank: int, size: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    found: dict[str, Any] = {"plain": train(gpt(None, size))}
    model = gpt("folded", size)
    with kernels.record() as ledger:
        found["fp8"] = train(model)
    layers = [m for m in model.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear)]
    found |= {"layers": len(layers), "gemms": sum(ledger.gemms.values())}
    found["names"] = [*gpt(None, size).state_dict()] == [*model.state_dict()]
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_learns_as_without_it(size: int) -> None:
    for found in ranks.run(check, size):
        assert found["layers"] == 8 and found["gemms"] == 3 * 8 * STEPS and found["names"]
        assert found["plain"][-1] < 0.9 * found["plain"][0] and found["fp8"] != found["plain"]
        torch.testing.assert_close(torch.tensor(found["fp8"]), torch.tensor(found["plain"]), rtol=1e-2, atol=0)


def test_the_layers_of_a_block_are_those_of_their_specs() -> None:
    """`get_gpt_decoder_block_spec`, as of a model with experts in some layers, returns the specs of all layers."""
    block = TransformerBlockSubmodules(layer_specs=[get_gpt_layer_local_spec() for _ in range(2)])
    found = fp8_spec(block, "block")
    for given, layer in zip(block.layer_specs, found.layer_specs, strict=True):
        assert layer.submodules.mlp.submodules.linear_fc1.module is ColumnParallelLinear
        assert layer.submodules.mlp.submodules.linear_fc2.params["recipe"].name == "block"
        assert given.submodules.mlp.submodules.linear_fc1 is tensor_parallel.ColumnParallelLinear


def sequence_parallel(rank: int, size: int) -> list[float]:
    """Return the relative errors of a pair of layers: of the output and of the gradients."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment] # Megatron's buffers ask it
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True, sequence_parallel=True,
        tensor_model_parallel_size=size,
    )  # fmt: skip
    given: Any = {"config": config, "init_method": torch.nn.init.xavier_normal_, "bias": False, "skip_bias_add": False}
    up = ColumnParallelLinear(64, 128, gather_output=False, **given)
    down = RowParallelLinear(128, 64, input_is_parallel=True, **given)
    x = torch.randn(SEQUENCE, BATCH, 64, generator=torch.Generator().manual_seed(1))
    own = x.chunk(size)[rank].clone().requires_grad_()
    y = down(up(own)[0])[0]
    found = [y.detach(), *torch.autograd.grad(y.square().sum(), [own, up.weight, down.weight])]

    def whole(shard: torch.Tensor, dim: int) -> torch.Tensor:
        shards = [torch.empty_like(shard) for _ in range(size)]
        torch.distributed.all_gather(shards, shard.detach().contiguous())
        return torch.cat(shards, dim).requires_grad_()

    w_up, w_down, x = whole(up.weight, 0), whole(down.weight, 1), x.requires_grad_()
    y = x @ w_up.t() @ w_down.t()
    exact = [y.detach(), *torch.autograd.grad(y.square().sum(), [x, w_up, w_down])]
    cut = [tensor.chunk(size, dim)[rank] for tensor, dim in zip(exact, (0, 0, 0, 1), strict=True)]
    return [float((one - other).norm() / other.norm()) for one, other in zip(found, cut, strict=True)]


def test_sequence_parallelism_is_megatrons() -> None:
    for errors in ranks.run(sequence_parallel, 2):
        assert all(0.005 < error < 0.1 for error in errors)


def refusals(rank: int, size: int) -> list[str]:
    parallel_state.initialize_model_parallel()
    stored = ranks.refusal(UnsupportedError, lambda: gpt("delayed", 1))
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True,
        gradient_accumulation_fusion=True,
    )  # fmt: skip
    given: Any = {"config": config, "init_method": torch.nn.init.zeros_}
    fused = ranks.refusal(UnsupportedError, lambda: ColumnParallelLinear(64, 64, **given))
    return [stored, fused]


def test_what_it_does_not_do_is_refused() -> None:
    stored, fused = ranks.run(refusals, 1)[0]
    assert "delayed" in stored and "gradient_accumulation_fusion" in fused
    spec = fp8_spec(get_gpt_layer_local_spec())
    with pytest.raises(ConfigError, match="no layer of Megatron's own"):
        fp8_spec(spec)
    assert get_gpt_layer_local_spec().submodules.mlp.submodules.linear_fc1 is tensor_parallel.ColumnParallelLinear
