"""Octavo's benchmarks: measurements, their result files, and the tables made from them.

A file is a kind of measurement with its command. Shared: the implementations that are compared (`implementations`,
`sharded`), their work (`workloads`), ceilings of the machine (`rates`), result files (`results`), commands (`cli`) and
tables (`tables`, `measured`, `facts`, `render`).
"""
