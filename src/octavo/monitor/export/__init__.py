"""A run as files that other programs read: `export(run, "parquet", "out/")`."""

from octavo.monitor.export.export import FORMATS, export

__all__ = ["FORMATS", "export"]
