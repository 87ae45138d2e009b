"""A trained model as inference engines load it: the codes and scales that its last forward read, byte for byte.

layers              the FP8 layers of a model: codes, scales, how inputs are quantised
compressed_tensors  how the format of that name writes them; `fine_grained` the blocks of DeepSeek-V3
engine_models       what a model is called outside: names of its tensors, its config.json
files               safetensors and JSON, written whole or not at all
"""

from octavo.serving.exporting import FORMATS, Exported, export

__all__ = ["FORMATS", "Exported", "export"]
