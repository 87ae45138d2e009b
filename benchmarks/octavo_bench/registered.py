"""Studies of the parity protocol that were registered before their first runs, with what was predicted of them."""

from __future__ import annotations

from octavo_bench.render import table

HEADER = ("study", "size, first seed, pairs", "arms", "expected")
REGISTERED = (
    (
        "control of the bench itself",
        "`1m`, `3m`; with those below",
        "`folded+run.disabled=yes`: converted, all layers in BF16",
        "0, within three times the control's half width. On a CPU it is BF16 bit for bit; "
        "on a GPU attention's backward adds in any order",
    ),
    (
        "fast accumulation in dgrad",
        "`3m`, `1m`, 1015, 15 each",
        "`rotated_fast`, `rotated`",
        "at most 0.01 % above `rotated`: dgrad's truncation is noise around its sign, and not of the forward",
    ),
    (
        "block size",
        "`3m`, 1200, 7",
        "`rotated` with blocks of 64 and of 16",
        "64: within 0.005 % of 256. 16: up to 0.02 % more, "
        "as a product of SwiGLU keeps a crest above normal in sums of sixteen",
    ),
    (
        "Sylvester's matrices",
        "`3m`, 1200, 7; `1m`, 1100, 10",
        "`rotated` with Sylvester's 256 and 128; at `1m` 128",
        "within 0.005 % of regular matrices",
    ),
    (
        "the same, outliers",
        "`1m` under *half+outliers*, 1200, 7",
        "`rotated`, Sylvester's 128",
        "up to 0.02 % above regular: a channel of outliers, or aligned gates, "
        "leave up to 0.29 times E4M3's variance in one operand",
    ),
    (
        "power-of-two scales",
        "`3m`, 1200, 7",
        '`rotated` with `scaling = "power_of_two"`',
        "2.2 times the variance of FP32 scales (the mean square of a factor between 1 and 2): +0.035 % above `rotated`",
    ),
    (
        "weights alone, inputs alone",
        "`3m`, 1200, 7",
        "`rotated+emulate.only=weight`, `=input`: that operand rounded by the specification, "
        "product and both gradients in BF16",
        "+0.017 % each; their sum is `rotated`'s gap, to 0.01 %",
    ),
    (
        "single GEMMs in BF16",
        "`1m`, 1100, 10",
        "`rowwise`, and it with fprop, dgrad or wgrad in BF16",
        "`rowwise`, dgrad, wgrad: +0.23 %, as set aside; fprop: +0.007 %",
    ),
    (
        "tokenised text",
        "`3m-bpe` under *half*, 1000, 10",
        "`folded`, `rotated`",
        "`folded` +0.2 %, as with half of `3m`'s tokens per parameter; "
        "`rotated` 0.11 to 0.14 times as much, at most +0.03 %: passes",
    ),
    (
        "fine-tuning, all weights and LoRA",
        "`3m` under *tuned* and *lora*, 1000, 10 each",
        "`folded`, `rotated`",
        "`folded` +0.1 to +0.2 %, mostly the half that appears at once; `rotated` at most +0.03 %: passes",
    ),
    (
        "`130m`",
        "under *half+short*, 1000, 2",
        "`rotated`",
        "0.11 to 0.14 times `folded`'s +0.118 %: +0.015 %; two pairs have no interval",
    ),
)
"""One row per study; written before its first run, and never changed afterwards."""


def registered_table() -> str:
    """Return the registered studies and their predictions."""
    return table(HEADER, REGISTERED)
