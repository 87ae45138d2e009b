"""The tables of README and docs, generated: no figure is typed.

A page holds a table between two lines, and only what stands between them is written:

    <!-- table: parity -->
    <!-- end -->

`octavo bench tables` writes every page again; with `--check` it names the pages that are not current and exits with 1.
"""
