"""Export of trained models for inference engines: the codes and scales of the last forward, byte for byte.

exporting      `octavo.export`; `run` exports a run of `octavo train`
layers         the FP8 layers of a model: codes, scales, input quantisation
formats        how layers in eight bits are stored: compressed-tensors, and the blocks of DeepSeek-V3
engine_models  exported names of modules, and config.json
files          safetensors and JSON, written atomically
notes          differences between engines and Octavo
rotations      rotation of inputs in a model that transformers has loaded
pushing        changed weights, as codes, into a running engine; the mismatch of trainer and engine
"""

from octavo.serving.exporting import Exported, export, served_tensors
from octavo.serving.formats import FORMATS
from octavo.serving.pushing import Mismatch, WeightPush, mismatch
from octavo.serving.rotations import rotate_inputs

__all__ = ["FORMATS", "Exported", "Mismatch", "WeightPush", "export", "mismatch", "rotate_inputs", "served_tensors"]
