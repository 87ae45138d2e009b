"""Octavo inside other libraries' training loops: one module per library, which imports that library and nothing else.

    octavo.integrations.transformers    `OctavoCallback`, for the Trainer of transformers and those of TRL
    octavo.integrations.lightning       `OctavoPrecision` and `LastShare`, a plugin and a callback of Lightning;
                                        `FabricPrecision`, a plugin of Fabric
    octavo.integrations.trl             `Rollouts`, for TRL's GRPO with an engine that computes with the policy's codes
    octavo.integrations.megatron        `fp8_spec`, the layer spec of a Megatron-Core model in FP8
    octavo.integrations.torchtitan      `OctavoConverter`, a converter of torchtitan's model config

Other loops need none: convert the model before it is wrapped, and train under BF16 autocast.
"""
