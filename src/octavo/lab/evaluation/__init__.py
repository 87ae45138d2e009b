"""Evaluation of trained and exported models: their loss on text, in each precision.

text    the text, as sequences of ids
result  scores per sequence, means with errors, differences between precisions; as a table and as JSON
run     a run of `octavo train`: in FP8, in high precision, and its BF16 baseline in both
served  an exported model, computed by transformers, beside its run
"""
