"""Helpers of every layer: configuration files, random generators, ranks, the compiler."""
