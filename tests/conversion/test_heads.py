"""Output heads are found by what a model says of them, whatever their names."""

import pytest
from torch import nn

from octavo.conversion import Policy, make_plan
from octavo.conversion.heads import find_heads

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
