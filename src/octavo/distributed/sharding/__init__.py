"""Sharded data parallel by FSDP2, with weights that are gathered as FP8 codes."""
