"""Measuring, and writing down what was measured: result files, and the tables made from them.

A folder is a subject: `speed`, `accuracy`, `memory`, `distributed`. What they share lies beside them: who is timed
(`implementations`), on what (`workloads`, `images`), with which clock (`timing`), beside which ceilings of the machine
(`rates`), and the files that are written (`results`). `tables` writes what the docs show of those files.
"""
