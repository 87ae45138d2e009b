"""Octavo's benchmarks: measurements, their result files, and the tables made from them.

Each file holds one kind of measurement with its command. Shared: compared implementations (`implementations`,
`sharded`), workloads (`workloads`), rate limits of the machine (`rates`), result files (`results`), commands (`cli`)
and tables (`tables`, `measured`, `facts`, `render`).
"""
