"""Read the documents of a file by its suffix. Error messages name the file, and the line if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo._util.config_reader import parse, read_text
from octavo._util.files import os_errors
from octavo.errors import DataError

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class Document:
    """A text and its origin."""

    name: str
    """Path relative to the source, with a line or row number if the file has several documents."""
    text: str
    """The text with its original line ends."""


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file with documents."""

    name: str
    """Path relative to the source, separated by `/`."""
    path: Path
    """Path of the file."""


def read_documents(file: TextFile) -> Iterator[Document]:
    """Yield the documents of a file: one per text file, one per line of `.jsonl`, one per row of `.parquet`.

    Texts of white space only are left out.

    Raises:
        DataError: the file cannot be read, is not UTF-8, or a line or row has no field of text.
    """
    if file.path.suffix == ".parquet":
        documents = _parquet(file)
    elif file.path.suffix == ".jsonl":
        documents = _jsonl(file)
    else:
        documents = iter([Document(file.name, read_text(file.path, DataError))])
    return (document for document in documents if document.text.strip())


def _jsonl(file: TextFile) -> Iterator[Document]:
    with os_errors(file.path, DataError, "cannot be read"), file.path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield Document(f"{file.name}:{number}", _line_text(line, f"{file.path}:{number}"))


def _line_text(line: bytes, where: str) -> str:
    try:
        value = parse(line.decode("utf-8-sig"), where, DataError)  # the first line may begin with a byte-order mark
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text (byte {error.start} of the line).") from error
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        keys = f"its fields are {', '.join(map(str, value))}" if isinstance(value, dict) and value else "it has none"
        raise DataError(f"{where}: each line needs a string field 'text'; {keys}.")
    check_characters(text, where)
    return text


def check_characters(text: str, where: str) -> None:
    r"""Check that a text can be encoded, which an escape of JSON such as `\ud800` prevents.

    Raises:
        DataError: it contains a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: the text contains a lone surrogate, which is not a character ({error.reason})."
        ) from error


def _parquet(file: TextFile) -> Iterator[Document]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f'{file.path}: reading Parquet needs pyarrow: pip install "octavo[parquet]"') from error
    try:
        table = pyarrow.parquet.ParquetFile(file.path)
        if "text" not in table.schema_arrow.names:
            columns = ", ".join(table.schema_arrow.names)
            raise DataError(f"{file.path}: needs a column 'text'; its columns are {columns}.")
        row = 0
        for batch in table.iter_batches(batch_size=1024, columns=["text"]):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str):
                    raise DataError(f"{file.path}: row {row}: the column 'text' contains {text!r}, not a string.")
                yield Document(f"{file.name}:{row}", text)
                row += 1
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{file.path}: not a readable Parquet file ({error}).") from error
