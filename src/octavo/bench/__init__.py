"""Measuring, and writing down what was measured: result files and the tables made from them."""
