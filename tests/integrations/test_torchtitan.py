"""The debug model of torchtitan, trained by its own Trainer, with Octavo's converter in its config."""

from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan", reason="needs torchtitan (octavo[titan])")

from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.models.llama3 import model_registry

import octavo
from octavo import kernels
from octavo.integrations.torchtitan import OctavoConverter
from octavo.nn import Linear


def built(*converters: Any) -> Any:
    spec = model_registry("debugmodel", converters=list(converters))
    torch.manual_seed(0)
    with torch.device("meta"):
        model = spec.model.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    return model


def test_layers_keep_their_class_their_sharding_and_their_initial_values():
    plain, model = built(), built(OctavoConverter.Config(device="cpu"))
    layers = {name: m for name, m in plain.named_modules() if isinstance(m, TitanLinear)}
    converted = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    assert converted.keys() == layers.keys() - {"lm_head", "output"} and len(converted) == 30
    for name, layer in converted.items():
        assert isinstance(layer, TitanLinear)
        assert layer._sharding_config == layers[name]._sharding_config
        assert layer._param_init.keys() == layers[name]._param_init.keys()
    model.verify_module_protocol()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_patterns_keep_layers():
    model = built(OctavoConverter.Config(device="cpu", filter_fqns=["*.w2"]))
    assert not any(isinstance(m, Linear) for name, m in model.named_modules() if name.endswith("w2"))


def test_its_blocks_compute_as_converted_ones_also_under_activation_checkpointing():
    """Attention of torchtitan is FlexAttention, which has no backward on a CPU: a block's MLP stands for it here."""
    expected, model = built().layers["0"].feed_forward, built(OctavoConverter.Config(device="cpu"))
    FullAC.Config().build(dump_folder="").apply(model)
    octavo.convert(expected)
    layer = model.layers["0"].feed_forward
    x = torch.randn(48, 256)
    with kernels.record() as ledger:
        y = layer(x)
        y.square().mean().backward()
    assert sum(ledger.gemms.values()) >= 6
    expected_y = expected(x)
    expected_y.square().mean().backward()
    assert torch.equal(y, expected_y)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(layer.parameters(), expected.parameters(), strict=True))
