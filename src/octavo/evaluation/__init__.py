"""How good a model is that was trained, or written by `octavo export`: its loss on text, in each way of computing it.

text     the text, as sequences of ids
measure  what each sequence costs a model, and how that is counted
result   means, their standard errors, what the ways differ by; as a table and as JSON
run      a run of `octavo train`: in FP8, in high precision, and its BF16 twin
served   an exported model, as transformers computes it, beside its run
"""
