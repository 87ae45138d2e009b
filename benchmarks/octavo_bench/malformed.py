"""Grammar of malformed files by format: damage by a text editor, a full disk, a crash or an attacker.

Every mutation draws from a `random.Random`, so that files are reproducible from a seed. The formats are those read by
the command line: TOML and JSON (one document, or one per line), safetensors, SQLite, plain text, and token ids.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

ESCAPE = "\x1b[31m\x9b2J\u202ered\r"
"""A name that clears a terminal if printed unescaped."""
DEEP = 100_000
"""Depth of nested lists, beyond any parser's stack."""


class Damage(NamedTuple):
    """Damage to a file."""

    name: str
    is_malformed: bool
    """True if no reader may accept the file; False if it may still be a valid document."""


Mutation = Callable[[Random, Path], Damage]
"""Damages a file in place."""

# --- text -----------------------------------------------------------------------------------------------------------


def _truncate(draw: Random, path: Path) -> Damage:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(1, max(2, len(content) - 1))])
    return Damage("cut short", path.suffix in (".json", ".safetensors", ".parquet"))


def _empty(_: Random, path: Path) -> Damage:
    path.write_bytes(b"")
    return Damage("empty", path.suffix in (".json", ".safetensors", ".parquet", ".sqlite"))


def _junk(draw: Random, path: Path) -> Damage:
    content = path.read_bytes()
    place = draw.randrange(len(content) + 1)
    path.write_bytes(content[:place] + bytes([0xFF, 0xFE, 0x80]) + draw.randbytes(40) + content[place:])
    return Damage("random bytes inside", path.suffix not in (".sqlite", ".parquet", ".bin"))


def _nul(draw: Random, path: Path) -> Damage:
    content = path.read_bytes()
    place = draw.randrange(len(content) + 1)
    path.write_bytes(content[:place] + b"\0" * 512 + content[place:])
    return Damage("zeros inside, as after a power failure", path.suffix in (".json", ".toml", ".jsonl"))


def _junk_line(draw: Random, path: Path) -> Damage:
    lines = path.read_text("utf-8").splitlines()
    lines.insert(draw.randrange(len(lines) + 1), draw.choice(["}{", "<<<<<<< HEAD", "]]", '"', f"= {ESCAPE}"]))
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return Damage("a line that is none", path.suffix in (".json", ".toml", ".jsonl"))


def _utf16(_: Random, path: Path) -> Damage:
    path.write_bytes(path.read_text("utf-8").encode("utf-16"))
    return Damage("UTF-16", True)


def _latin1(_: Random, path: Path) -> Damage:
    text = path.read_text("utf-8")
    comment = {".toml": "# \u00e9\n", ".json": "", ".jsonl": ""}.get(path.suffix, "\u00e9\n")
    path.write_bytes((comment + (text if comment else text.replace("e", "\u00e9", 1))).encode("latin-1", "replace"))
    return Damage("Latin-1", True)


def _deep(draw: Random, path: Path) -> Damage:
    nest = draw.choice(["[" * DEEP, '{"a":' * DEEP, "[" * DEEP + "]" * DEEP])
    path.write_text(f"deep = {nest}\n" if path.suffix == ".toml" else nest + "\n", "utf-8")
    return Damage("nested too deeply", True)


def _long_number(_: Random, path: Path) -> Damage:
    digits = "9" * 5000
    path.write_text(f"steps = {digits}\n" if path.suffix == ".toml" else f'{{"step": {digits}}}\n', "utf-8")
    return Damage("a number of 5,000 digits", True)


def _duplicate(draw: Random, path: Path) -> Damage:
    lines = path.read_text("utf-8").splitlines()
    keyed = [n for n, line in enumerate(lines) if ("=" in line if path.suffix == ".toml" else '":' in line)]
    if not keyed:
        return _junk_line(draw, path)
    if path.suffix == ".toml":
        place = draw.choice(keyed)
        lines.insert(place, lines[place])
    else:
        text, place = "\n".join(lines), "\n".join(lines).index("{")
        key = draw.choice(list(json.loads(lines[0] if path.suffix == ".jsonl" else text)) or ["step"])
        lines = [f"{text[: place + 1]}{json.dumps(key)}: 1, {text[place + 1 :]}"]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return Damage("a key twice", True)


# --- trees of JSON and TOML -----------------------------------------------------------------------------------------

_WRONG: tuple[Any, ...] = (
    *([], {}, [[]], {"a": {"b": 1}}, True, "", ESCAPE, "text", "a\0b", -1, 0, 2.5, 10**30, -(10**30)),
    *(float("nan"), float("inf"), float("-inf"), 1e308, None, [None], "\ud800", "x" * 5000),
)


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from _places(value, (*path, key))


def _parent(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        tree = tree[key]
    return tree


def _edit(draw: Random, tree: Any) -> Damage:
    """Change one node of a document by a production of the grammar."""
    places = list(_places(tree))
    path = draw.choice(places)
    parent, key = _parent(tree, path), path[-1]
    shown = ".".join(map(str, path))[:60]
    match draw.choice(["value", "value", "value", "drop", "add", "rename", "bury"]):
        case "value":
            wrong = draw.choice(_WRONG)
            parent[key] = wrong
            return Damage(f"{shown} = {ascii(wrong)[:30]}", False)
        case "drop":
            del parent[key]
            return Damage(f"without {shown}", False)
        case "add" if isinstance(parent, dict):
            parent[draw.choice([ESCAPE, "base", "__class__", "", "a.b", "step "])] = draw.choice(_WRONG)
            return Damage(f"one key more beside {shown}", False)
        case "rename" if isinstance(parent, dict):
            parent[f"{key}s"] = parent.pop(key)
            return Damage(f"{shown} renamed", False)
        case _:
            parent[key] = [parent[key]]
            return Damage(f"{shown} in a list", False)


def _tree(draw: Random, path: Path) -> Damage:
    if path.suffix == ".jsonl":
        lines = path.read_text("utf-8").splitlines()
        place = draw.randrange(len(lines))
        holder = {"line": json.loads(lines[place])}
        damage = _edit(draw, holder)
        lines[place] = json.dumps(holder.get("line"))
        path.write_text("\n".join(lines) + "\n", "utf-8")
        return damage
    tree = {"document": _loaded(path)}
    damage = _edit(draw, tree["document"]) if draw.random() < 0.95 and tree["document"] else _edit(draw, tree)
    document = tree.get("document")
    path.write_text(toml(document) if path.suffix == ".toml" else json.dumps(document), "utf-8", "surrogatepass")
    return damage


def _loaded(path: Path) -> Any:
    import tomllib

    text = path.read_text("utf-8")
    return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)


def toml(tree: Any) -> str:
    """Return a mapping as TOML; for any other value, an invalid document."""
    if not isinstance(tree, dict):
        return f"{_toml_value(tree)}\n"
    return "".join(f"{json.dumps(str(key))} = {_toml_value(value)}\n" for key, value in tree.items())


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if value is None:
        return "null"
    return repr(value) if isinstance(value, float) else json.dumps(value)


# --- safetensors ----------------------------------------------------------------------------------------------------


def _header(draw: Random, path: Path) -> Damage:
    """Change the JSON header of a safetensors file."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, body = json.loads(content[8 : 8 + size]), content[8 + size :]
    damage = _edit(draw, header)
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(written)) + written + body)
    return Damage(f"header: {damage.name}", False)


def _header_size(draw: Random, path: Path) -> Damage:
    content = path.read_bytes()
    path.write_bytes(struct.pack("<Q", draw.choice([0, 1, 2**20, 2**40, 2**64 - 1])) + content[8:])
    return Damage("another size of the header", True)


def _tensors(draw: Random, path: Path) -> Damage:
    """Write a valid file with a changed tensor: shape, dtype, NaN, an added or missing name."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    name = draw.choice(sorted(tensors))
    tensor = tensors[name]
    what = draw.choice(["shape", "short", "dtype", "nan", "gone", "new", "renamed", "scalar"])
    if what == "gone":
        del tensors[name]
    elif what == "new":
        tensors[ESCAPE] = torch.zeros(3)
    elif what == "renamed":
        tensors[f"{name}{ESCAPE}"] = tensors.pop(name)
    elif what == "nan":
        tensors[name] = torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor[:0].clone()
    else:
        flat = tensor.flatten()
        tensors[name] = {
            "shape": flat.reshape(-1, 1).clone(),
            "short": flat[: len(flat) // 2].clone(),
            "dtype": tensor.to(torch.int64),
            "scalar": torch.tensor(1.0),
        }[what]
    save_file(tensors, path)
    return Damage(f"{what}: {name}", False)


# --- SQLite ---------------------------------------------------------------------------------------------------------


def _database(draw: Random, path: Path) -> Damage:
    """Change tables or cells of a run store, or leave it as if its process was killed while creating it."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        table = draw.choice(tables)
        columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
        column = draw.choice(columns)
        wrong = draw.choice(
            [None, "", ESCAPE, "{", "[]", '{"a": NaN}', '"', -1, 2**62, 1e308, b"\xff\x00\x01", "[" * DEEP]
        )
        what = draw.choice(["cell", "cell", "cell", "drop", "rows", "half-born", "newer", "foreign", "view", "column"])
        if what == "cell":
            with contextlib.suppress(sqlite3.IntegrityError):
                database.execute(f'UPDATE {table} SET "{column}" = ?', (wrong,))
        elif what == "drop":
            database.execute(f"DROP TABLE {table}")
        elif what == "rows":
            database.execute(f"DELETE FROM {table}")
        elif what == "half-born":
            for each in tables:
                database.execute(f"DELETE FROM {each} WHERE '{each}' != 'meta'")
        elif what == "newer":
            database.execute("PRAGMA user_version = 999")
        elif what == "foreign":
            database.execute("PRAGMA application_id = 7")
        elif what == "view":
            endless = "WITH RECURSIVE n(step) AS (SELECT 1 UNION ALL SELECT step + 1 FROM n)"
            names = ", ".join(f"step AS '{name}'" for name in columns)
            database.execute(f"DROP TABLE {table}")
            database.execute(f"CREATE VIEW {table} AS {endless} SELECT {names} FROM n")
        elif what == "column":
            database.execute(f"ALTER TABLE {table} RENAME COLUMN \"{column}\" TO 'octavo'")
        database.commit()
        database.execute("PRAGMA journal_mode = DELETE")
    named = {"cell": f"{table}.{column} = {ascii(wrong)[:20]}", "column": f"{table}.{column} renamed"}
    return Damage(named.get(what, f"{what}: {table}"), what in ("newer", "foreign"))


# --- places ---------------------------------------------------------------------------------------------------------


def _missing(_: Random, path: Path) -> Damage:
    path.unlink()
    return Damage("missing", False)


def _directory(_: Random, path: Path) -> Damage:
    path.unlink()
    path.mkdir()
    return Damage("a directory", False)


def _loop(_: Random, path: Path) -> Damage:
    path.unlink()
    path.symlink_to(path.name)
    return Damage("a link to itself", False)


_EVERY: tuple[Mutation, ...] = (_truncate, _empty, _junk, _nul, _directory, _loop)
_TEXT: tuple[Mutation, ...] = (*_EVERY, _junk_line, _utf16, _latin1)
_DOCUMENT: tuple[Mutation, ...] = (*_TEXT, _deep, _long_number, _duplicate, *(_tree,) * 12)
GRAMMAR: dict[str, tuple[Mutation, ...]] = {
    ".toml": _DOCUMENT,
    ".json": _DOCUMENT,
    ".jsonl": _DOCUMENT,
    ".txt": _TEXT,
    ".parquet": _EVERY,
    ".bin": _EVERY,
    ".safetensors": (*_EVERY, _header_size, *(_header,) * 3, *(_tensors,) * 6),
    ".sqlite": (*_EVERY, *(_database,) * 12),
}
"""Mutations by suffix; repeated ones are drawn more often."""


def damage(draw: Random, path: Path) -> Damage:
    """Damage a file in place by a mutation of its format."""
    return draw.choice(GRAMMAR[path.suffix])(draw, path)
