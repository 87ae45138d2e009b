"""Monitoring of runs.

monitor       `octavo.Monitor`, for custom training loops
recorder      writes a run in the background: store, system readings, trackers
store/        the run store: one SQLite file per run, its writer and reader
measurements  scalars and telemetry on their way from the device
groups        statistics of weights and gradients per parameter group
system        power, memory and load of the machine; versions and settings
trackers      Weights & Biases, trackio, MLflow
export        Parquet, CSV, event files of TensorBoard
dashboard/    a local web page, and the same page as one file
"""
