"""Export of trained models for inference engines: the codes and scales of the last forward, byte for byte.

exporting      `octavo.export`; `run` exports a run of `octavo train`
layers         the FP8 layers of a model: codes, scales, input quantisation
formats        how FP8 layers are stored: compressed-tensors, and the blocks of DeepSeek-V3
engine_models  exported names of modules, and config.json
files          safetensors and JSON, written atomically
notes          differences between engines and Octavo
pushing        changed weights, as codes, into a running engine; the mismatch of trainer and engine
"""

from octavo.serving.exporting import Exported, export, served_tensors
from octavo.serving.formats import FORMATS
from octavo.serving.pushing import Mismatch, WeightPush, mismatch

__all__ = ["FORMATS", "Exported", "Mismatch", "WeightPush", "export", "mismatch", "served_tensors"]
