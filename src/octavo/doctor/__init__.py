"""The doctor: checks of a machine, of a model on it, and of a run. Each has a verdict, what was seen, and a remedy.

check        what a check is
checks       all of them; to add one, add a line
machine/     software, driver, kernels, accumulation, clocks and memory of a GPU, collectives, resources, variables
model/       NaN, fallback, shapes, drift, serving, launches, host syncs
run/         the health of a recorded run
examination  makes them one after another
issue        a block for a bug report
"""
