"""The debug model of torchtitan, trained by its own Trainer, with Octavo's converter in its config."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan", reason="needs torchtitan (octavo[titan])")

from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols import model as model_protocols

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


def test_the_base_class_is_found_where_newer_versions_have_it(monkeypatch):
    """Since September 2026 it is in `torchtitan.config.transform`, with the same interface."""

    class Moved(model_protocols.ModelConfigConverter):
        pass

    moved = ModuleType("torchtitan.config.transform")
    moved.ModelConfigConverter = Moved
    monkeypatch.setitem(sys.modules, "torchtitan.config.transform", moved)
    monkeypatch.delattr(model_protocols, "ModelConfigConverter")
    spec = importlib.util.find_spec("octavo.integrations.torchtitan")
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "octavo_integrations_torchtitan_again", again)
    spec.loader.exec_module(again)
    assert issubclass(again.OctavoConverter, Moved)
    config = again.OctavoConverter.Config(recipe="rowwise", filter_fqns=["*.w2"])
    assert isinstance(config, Moved.Config) and config.recipe == "rowwise"


class CPU:
    """A module of a device as torchtitan's Trainer asks for it, which takes CUDA's where there is no other device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(total_memory=2**34)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}

    def current_device(self) -> int:
        return 0

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo_bench import titan  # loads the Trainer

    assert titan.Trainer
    for module in [module for name, module in sys.modules.items() if name.startswith("torchtitan.")]:
        for name, value in {"device_type": "cpu", "device_module": CPU()}.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    # A name that torchtitan 0.3 takes from a PyTorch that is not released.
    monkeypatch.setattr(torch.distributed, "set_timeout", lambda *given: None, raising=False)


def test_its_own_trainer_with_fsdp_full_activation_checkpointing_and_compile(on_a_cpu: None, tmp_path: Path) -> None:
    from octavo_bench import clients

    size = clients.Size(dim=256, layers=2, length=32, batch=2, lr=1e-3)
    row = clients.measure(clients.CLIENTS["torchtitan"], size, "cpu", 8)
    assert row["fp8_layers"] == 10 and row["graphs"] == 1 and row["graph_breaks"] == 0
    assert row["loss"] < row["first_loss"] and abs(row["gap_percent"]) < 0.5
    assert row["resumes"]
