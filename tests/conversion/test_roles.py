"""Output heads and routers, by their place in a model."""

import pytest
import torch
from torch import nn

from octavo.conversion import Policy, make_plan
from octavo.conversion.roles import find_heads

HEAD = "output head: its error goes straight into the loss"
ROUTER = "router: a small error sends a token to another expert"

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 96,
}  # fmt: skip
WHISPER = {
    "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 96,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_source_positions": 16,
    "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
MODELS = {
    "BertForMaskedLM": ("BertConfig", SIZES, {"cls.predictions.transform.dense", "cls.predictions.decoder"}),
    "RobertaForMaskedLM": ("RobertaConfig", SIZES, {"lm_head.dense", "lm_head.decoder"}),
    "LlamaForSequenceClassification": (
        "LlamaConfig", {**SIZES, "num_key_value_heads": 2, "num_labels": 40}, {"score"}
    ),
    "WhisperForConditionalGeneration": ("WhisperConfig", WHISPER, {"proj_out"}),
    "BertForQuestionAnswering": ("BertConfig", SIZES, {"qa_outputs"}),
    "BertModel": ("BertConfig", SIZES, set()),
    "FSMTForConditionalGeneration": (  # names the table of its decoder, not the layer behind that
        "FSMTConfig", {**WHISPER, "langs": ["en", "de"], "src_vocab_size": 96, "tgt_vocab_size": 96},
        {"model.decoder.output_projection"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_heads_of_transformers(name):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config, settings, heads = MODELS[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**settings))
    plan = make_plan(model, policy=Policy(min_features=1))
    assert {layer.name for layer in plan.layers if not layer.is_fp8} == heads
    assert all("output head" in layer.reason for layer in plan.layers if layer.name in heads)
    everything = make_plan(model, policy=Policy(min_features=1, keep_defaults=False))
    assert everything.fp8_layers == len(everything.layers)


class WithClassifier(nn.Module):
    """A model in the manner of timm."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.top = nn.Linear(64, 64), nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))

    def get_classifier(self) -> nn.Module:
        return self.top


def test_a_classifier_that_the_model_names():
    model = WithClassifier()
    assert id(model.top[1]) in find_heads(model) and id(model.trunk) not in find_heads(model)
    assert [layer.is_fp8 for layer in make_plan(nn.Sequential(model)).layers] == [True, False]


def test_a_weight_that_is_an_embedding_too():
    model = nn.ModuleDict({"table": nn.Embedding(64, 64), "project": nn.Linear(64, 64), "inner": nn.Linear(64, 64)})
    assert make_plan(model).fp8_layers == 2
    model["project"].weight = model["table"].weight
    assert [layer.name for layer in make_plan(model).layers if layer.is_fp8] == ["inner"]


def test_a_method_of_that_name_that_wants_arguments_says_nothing():
    class Other(nn.Linear):
        def get_classifier(self, which):
            return which

    assert find_heads(nn.Sequential(Other(8, 8))) == set()


class WithLogits(nn.Module):
    """A language model whose head has a name of its own; positions have the shape of the layer `up` in its block."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(96, 32), nn.Embedding(64, 32)
        self.block = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)})])
        self.to_logits = nn.Linear(32, 96, bias=False)


def test_a_layer_with_the_shape_of_an_embedding_is_a_head_outside_of_the_blocks():
    plan = make_plan(WithLogits(), policy=Policy(min_features=16))
    assert [(layer.name, layer.reason) for layer in plan.layers if not layer.is_fp8] == [("to_logits", HEAD)]


def test_a_head_whose_weight_is_partitioned():
    """As by DeepSpeed's ZeRO-3: weights have no elements before they are gathered."""
    model = WithLogits()
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    assert find_heads(model) == {id(model.to_logits)}


class Block(nn.Module):
    def __init__(self, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)


class Positions(nn.Module):
    """BigBird-Pegasus: as many positions as the MLPs of its encoder have features, and the decoder has more blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(96, 32), nn.Embedding(64, 32)
        self.encoder, self.decoder = nn.ModuleList([Block()]), nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(32, 96)


def test_the_shape_of_an_embedding_makes_no_head():
    assert kept(Positions()) == {"lm_head": HEAD}


class Autoencoder(nn.Module):
    """A decoder with blocks outside of the base model, as that of ViTMAEForPreTraining."""

    base_model_prefix = "vit"

    def __init__(self) -> None:
        super().__init__()
        self.vit = nn.ModuleList([Block()])
        self.decoder = nn.ModuleDict({"into": nn.Linear(32, 32), "blocks": nn.ModuleList([Block()])})
        self.decoder["pixels"] = nn.Linear(32, 48)


def test_of_a_decoder_outside_of_the_base_model_the_last_layer_is_a_head():
    assert kept(Autoencoder()) == {"decoder.pixels": HEAD}


def test_what_is_called_embedder_is_judged_layer_by_layer():
    model = nn.ModuleDict({"embedder": nn.Sequential(Block(), Block()), "score": nn.Linear(32, 32)})
    assert kept(model) == {"score": HEAD}


class Mixture(nn.Module):
    """A mixture whose router has the name `gate`."""

    def __init__(self, gate: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts, self.shared = gate, experts, Block()


class Stacks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.zeros(count, 64, 32)), nn.Parameter(torch.zeros(count, 32, 64))


class TopK(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, 32))


@pytest.mark.parametrize("experts", [Stacks(40), nn.ModuleList(Block() for _ in range(40))], ids=["stacks", "list"])
@pytest.mark.parametrize(
    ("gate", "name"),
    [
        (nn.Linear(32, 40), "gate"),
        (nn.ModuleDict({"wg": nn.Linear(32, 40)}), "gate.wg"),  # DeepSpeed, Tutel
        (TopK(40), "gate.weight"),  # transformers, whose router has a weight of its own
        (nn.Linear(32, 48), None),  # its outputs are not as many as there are experts
    ],
)
def test_a_router_has_an_output_per_expert_beside_it(experts, gate, name):
    plan = make_plan(nn.Sequential(Mixture(gate, experts), nn.Linear(32, 32)))
    reasons = {row.name: row.reason for row in plan.layers} | {w.name: w.reason for w in plan.unconverted}
    assert [where for where, why in reasons.items() if why == ROUTER] == ([f"0.{name}"] if name else [])
    everything = make_plan(Mixture(gate, experts), policy=Policy(keep_defaults=False))
    assert all(row.is_fp8 for row in everything.layers if row.kind == "linear")


class Gated(nn.Module):
    """Attention with an output gate."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate = nn.Linear(64, 192), nn.Linear(64, 64)


def test_the_last_layer_beside_the_blocks_is_a_head_whatever_was_made_after_it():
    """PixArt's head comes before the module that projects its captions."""
    captions = nn.ModuleDict({"up": nn.Linear(64, 64), "down": nn.Linear(64, 64)})
    blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(64, 64)}) for _ in range(2))
    model = nn.ModuleDict({"blocks": blocks, "early": nn.Linear(64, 64), "out": nn.Linear(64, 64)})
    model["captions"] = captions
    assert kept(nn.Sequential(model)) == {"0.out": HEAD, "0.captions.down": HEAD}
    del model["captions"]
    assert kept(model) == {"out": HEAD}


def test_projections_by_heads_are_no_experts():
    """XLNet's, (D, H, d), beside a layer with D outputs."""
    attention = nn.ParameterDict({name: torch.zeros(64, 4, 16) for name in "qkvo"})
    ff = nn.ModuleDict({"up": nn.Linear(64, 128), "down": nn.Linear(128, 64)})
    block = nn.ModuleDict({"attention": attention, "ff": ff})
    assert kept(nn.Sequential(block, nn.Linear(64, 64))) == {}


def test_a_gate_without_experts_routes_nothing():
    assert kept(nn.Sequential(Gated(), Gated(), nn.Linear(64, 64))) == {"2": HEAD}


def kept(model: nn.Module) -> dict[str, str]:
    rows = make_plan(model, policy=Policy(min_features=16)).layers
    return {row.name: row.reason for row in rows if not row.is_fp8}
