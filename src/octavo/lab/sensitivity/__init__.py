"""Localisation: the cost and gain of FP8 per layer and GEMM, and the precision map that fits a loss budget.

localisation      `octavo.localize`; `run` localises a run of `octavo train`
precision_switch  switches GEMMs of a model between FP8 and high precision, one by one
loss, gradient    change of the loss and of the gradient's direction by each GEMM in FP8
times             measured or predicted time of each choice
solve             the map with the largest gain within the budget
result            the map, its evidence, and a table
"""

from octavo.lab.sensitivity.localisation import localize
from octavo.lab.sensitivity.result import Localisation, Sensitivity

__all__ = ["Localisation", "Sensitivity", "localize"]
