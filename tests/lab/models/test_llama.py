from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.errors import ConfigError
from octavo.lab.models import Llama, ModelConfig, build
from octavo.lab.models.language_model import separate_documents
from octavo.lab.models.llama import rotary_tables
from octavo.nn.rotary import rotate

SMALL: dict[str, Any] = {"vocab": 48, "dim": 32, "layers": 2, "heads": 4, "sequence": 16}


def model_of(**change: Any) -> Llama:
    model = build(ModelConfig(**{**SMALL, **change}), seed=1)
    assert isinstance(model, Llama)
    return model


def tokens_of(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(0, SMALL["vocab"], (batch, length))


def independent_logits(model: Llama, tokens_T: Tensor) -> Tensor:
    """The published equations, one sequence, one head and one position at a time, in float64."""
    config, w = model.config, {name: p.double() for name, p in model.state_dict().items()}
    E, share = config.head_dim, config.heads // config.key_value_heads

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * w[name]

    def turned(vector: Tensor, position: int) -> Tensor:
        pairs = torch.complex(vector[: E // 2], vector[E // 2 :])
        steps = torch.tensor([position * config.rope_theta ** (-2 * i / E) for i in range(E // 2)])
        pairs = pairs * torch.polar(torch.ones(E // 2).double(), steps.double())
        return torch.cat((pairs.real, pairs.imag))

    x = w["tok_embeddings.weight"][tokens_T]
    for i in range(config.layers):
        at = f"layers.{i}."
        h = norm(x, at + "attention_norm.weight")
        q, k, v = (h @ w[f"{at}attention.w{letter}.weight"].T for letter in "qkv")
        y = torch.zeros(len(tokens_T), config.dim).double()
        for head in range(config.heads):
            here, there = slice(head * E, (head + 1) * E), slice(head // share * E, (head // share + 1) * E)
            for t in range(len(tokens_T)):
                query = turned(q[t, here], t)
                scores = torch.stack([query @ turned(k[s, there], s) for s in range(t + 1)])
                y[t, here] = (scores / math.sqrt(E)).softmax(0) @ v[: t + 1, there]
        x = x + y @ w[at + "attention.wo.weight"].T
        h = norm(x, at + "ffn_norm.weight")
        gate, up = (h @ w[f"{at}feed_forward.{name}.weight"].T for name in ("w1", "w3"))
        x = x + (gate * gate.sigmoid() * up) @ w[at + "feed_forward.w2.weight"].T
    return norm(x, "norm.weight") @ w["lm_head.weight"].T


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_logits_equal_the_published_equations(kv_heads: int | None) -> None:
    model, tokens_BT = model_of(kv_heads=kv_heads), tokens_of()
    with torch.no_grad():
        for parameter in model.parameters():  # the initial 0.02 would leave attention all but flat
            parameter.add_(0.2 * torch.randn_like(parameter))
        logits_BTV = model(tokens_BT)
        expected_TV = independent_logits(model, tokens_BT[1])
    torch.testing.assert_close(logits_BTV[1].double(), expected_TV, rtol=1e-4, atol=1e-4)


def test_a_token_changes_nothing_before_it() -> None:
    model, tokens_BT = model_of(), tokens_of()
    changed_BT = tokens_BT.clone()
    changed_BT[:, 7] = (changed_BT[:, 7] + 1) % SMALL["vocab"]
    before, after = model(tokens_BT), model(changed_BT)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


def test_rotation_depends_on_distance_alone() -> None:
    cos_TE, sin_TE = rotary_tables(8, 64, 10000.0)
    q, k = torch.randn(8), torch.randn(8)
    q_TE, k_TE = (rotate(x.expand(1, 64, 1, 8), cos_TE, sin_TE)[0, :, 0] for x in (q, k))
    near = torch.stack([q_TE[t + 5] @ k_TE[t] for t in range(59)])
    torch.testing.assert_close(near, near[:1].expand(59), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(q_TE.norm(dim=-1), q.norm().expand(64))
    assert not torch.allclose(q_TE[9] @ k_TE[0], near[0], atol=1e-2)


def test_rotation_keeps_the_dtype() -> None:
    x = torch.randn(1, 4, 2, 8, dtype=torch.bfloat16)
    assert rotate(x, *rotary_tables(8, 4, 10000.0)).dtype == torch.bfloat16


def test_grouped_queries_equal_repeated_heads() -> None:
    grouped, full = model_of(kv_heads=2), model_of()
    state = grouped.state_dict()
    for name in [n for n in state if n.endswith(("wk.weight", "wv.weight"))]:
        state[name] = state[name].view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(state)
    tokens_BT = tokens_of()
    torch.testing.assert_close(grouped(tokens_BT), full(tokens_BT))


def test_the_loss_is_the_mean_negative_log_likelihood() -> None:
    model, tokens_BT, targets_BT = model_of(), tokens_of(), tokens_of()
    loss = model(tokens_BT, targets_BT)
    likelihood = model(tokens_BT).double().softmax(-1).gather(-1, targets_BT[..., None])
    assert loss.dtype == torch.float32 and loss.shape == ()
    torch.testing.assert_close(loss.double(), -likelihood.log().mean(), rtol=1e-5, atol=1e-6)


def test_a_new_model_knows_nothing() -> None:
    loss = model_of()(tokens_of(8), tokens_of(8))
    assert abs(loss.item() - math.log(SMALL["vocab"])) < 0.1


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"17 tokens.*16"):
        model_of()(tokens_of(1, 17))


def test_the_rotary_tables_are_not_saved() -> None:
    assert set(model_of().state_dict()) == {name for name, _ in model_of().named_parameters()}


def test_a_tied_head_is_one_parameter() -> None:
    model = model_of(tie_embeddings=True)
    assert model.lm_head.weight is model.tok_embeddings.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_autocast_keeps_the_residual_stream_in_fp32() -> None:
    model, seen = model_of(kv_heads=2), []
    for block in model.layers:
        block.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    model.layers[0].attention.wq.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens_of(), tokens_of())
    loss.backward()
    assert seen == [torch.bfloat16, torch.float32, torch.float32]
    assert loss.dtype == torch.float32
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("autocast", [False, True])
def test_every_block_compiles_as_one_graph(autocast: bool) -> None:
    model, tokens_BT = model_of(kv_heads=2), tokens_of()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        eager = model(tokens_BT, tokens_BT)
        for block in model.layers:
            block.compile(fullgraph=True, backend="eager")
        compiled = model(tokens_BT, tokens_BT)
    compiled.backward()
    torch.testing.assert_close(compiled, eager)


def test_it_learns() -> None:
    model, tokens_BT = model_of(), tokens_of(4, 16)
    inputs_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(inputs_BT, targets_BT)
        loss.backward()
        optimizer.step()
    assert F.cross_entropy(model(inputs_BT).flatten(0, 1), targets_BT.flatten()) < 0.5


def documents_of(lengths: list[int]) -> list[Tensor]:
    return [torch.randint(0, SMALL["vocab"], (length + 1,)) for length in lengths]


def packed(documents: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return a row of documents: inputs, the first of each flagged, and targets."""
    inputs = [torch.cat([~ids[:1], ids[1:-1]]) for ids in documents]
    return torch.cat(inputs)[None], torch.cat([ids[1:] for ids in documents])[None]


@pytest.mark.parametrize("architecture", ["llama", "moe"])
def test_packed_documents_lose_what_each_loses_alone(architecture: str) -> None:
    model = build(ModelConfig(**{**SMALL, "sequence": 64}, documents="separate", architecture=architecture), seed=1)
    documents = documents_of([1, 7, 20, 3, 33])
    inputs_1T, targets_1T = packed(documents)
    losses_T = F.cross_entropy(model(inputs_1T)[0], targets_1T[0], reduction="none")
    for ids, losses in zip(documents, losses_T.split([len(ids) - 1 for ids in documents]), strict=True):
        alone = F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="none")
        torch.testing.assert_close(losses, alone, rtol=2e-5, atol=2e-6)


def test_packed_documents_have_the_gradients_of_each_alone() -> None:
    model = model_of(sequence=64, documents="separate", kv_heads=2)
    documents = documents_of([1, 7, 20, 3, 33])
    model(*packed(documents)).backward()
    together = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for ids in documents:
        (model(ids[None, :-1], ids[None, 1:]) * (len(ids) - 1) / 64).backward()
    for parameter, gradient in zip(model.parameters(), together, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-7)


def test_nothing_of_another_document_is_seen() -> None:
    model = model_of(sequence=64, documents="separate")
    documents = documents_of([9, 14, 9])
    before = model(packed(documents)[0])
    documents[1] = (documents[1] + 1) % SMALL["vocab"]
    after = model(packed(documents)[0])
    assert torch.equal(before[0, :9], after[0, :9]) and torch.equal(before[0, 23:], after[0, 23:])
    assert not torch.equal(before, after)


def test_a_rows_positions_start_anew_in_each_document() -> None:
    """As ids of one row, bit for bit: what a position rotates by is that of the document's own start."""
    ids, positions, numbers = separate_documents(torch.tensor([[~5, 6, ~7, ~8, 9], [1, 2, ~3, 4, 5]]))
    assert ids.tolist() == [[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]]
    assert positions.tolist() == [[0, 1, 0, 0, 1], [0, 1, 0, 1, 2]]
    assert numbers.tolist() == [[1, 1, 2, 3, 3], [0, 0, 1, 1, 1]]
