"""A mapping becomes a dataclass, or the error names the key."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from octavo._util import config_reader
from octavo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner:
    kind: Literal["slow", "fast"] = "slow"
    size: int = 1


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    rate: float = 0.5
    on: bool = False
    inner: Inner = field(default_factory=Inner)
    maybe: int | None = None
    either: int | str = 0
    pair: tuple[int, float] = (1, 2.0)
    many: tuple[str, ...] = ()
    table: dict[str, Inner] = field(default_factory=dict)
    path: Path = Path("here")
    anything: Any = None


def read(**settings) -> Outer:
    return config_reader.read(Outer, {"name": "x", **settings}, "run.toml")


def test_defaults():
    assert read() == Outer(name="x")


def test_every_kind_of_value():
    settings = {
        "rate": 2,
        "on": True,
        "inner": {"kind": "fast", "size": 3},
        "maybe": 4,
        "either": "word",
        "pair": [5, 6],
        "many": ["a", "b"],
        "table": {"k": {"size": 7}},
        "path": "there/it.txt",
        "anything": [1, {"x": 2}],
    }
    expected = Outer(
        name="x",
        rate=2.0,
        on=True,
        inner=Inner(kind="fast", size=3),
        maybe=4,
        either="word",
        pair=(5, 6.0),
        many=("a", "b"),
        table={"k": Inner(size=7)},
        path=Path("there/it.txt"),
        anything=[1, {"x": 2}],
    )
    assert read(**settings) == expected
    assert isinstance(read(rate=2).rate, float)


def test_instances_are_taken_as_they_are():
    inner = Inner(size=9)
    assert read(inner=inner).inner is inner
    assert read(table={"k": inner}).table["k"] is inner
    assert read(path=Path("p")).path == Path("p")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nmae": 1}, r"run\.toml: unknown key 'nmae'\. Did you mean 'name'\? Known keys: name, rate, on, "),
        ({"zzzz": 1}, r"run\.toml: unknown key 'zzzz'\. Known keys"),
        (
            {"inner": {"sise": 1}},
            r"run\.toml: inner: unknown key 'sise'\. Did you mean 'size'\? Known keys: kind, size\.",
        ),
        (
            {"inner": {"kind": "fst"}},
            r"run\.toml: inner: kind: 'fst' is none of 'slow', 'fast'\. Did you mean 'fast'\?",
        ),
        ({"inner": {"kind": ["slow"]}}, r"inner: kind: \['slow'\] is none of"),
        ({"inner": 3}, r"run\.toml: inner: expected a table of settings, got 3\."),
        ({"name": 3}, r"run\.toml: name: expected str, got 3 \(int\)\."),
        ({"rate": "1"}, r"run\.toml: rate: expected float, got '1' \(str\)\."),
        ({"rate": True}, r"rate: expected float, got True \(bool\)"),
        ({"on": 1}, r"on: expected bool, got 1 \(int\)"),
        ({"maybe": "x"}, r"maybe: expected int, got 'x' \(str\)"),
        ({"maybe": True}, r"maybe: expected int, got True \(bool\)"),
        ({"inner": {"size": 1.0}}, r"size: expected int, got 1\.0 \(float\)"),
        ({"either": 1.5}, r"either: expected str, got 1\.5 \(float\)"),
        ({"pair": [1]}, r"pair: expected 2 values, got \[1\]"),
        ({"pair": 1}, r"pair: expected a list, got 1"),
        ({"pair": [1, "x"]}, r"pair\[1\]: expected float, got 'x'"),
        ({"many": "ab"}, r"many: expected a list, got 'ab'"),
        ({"many": ["a", 1]}, r"many\[1\]: expected str, got 1"),
        ({"table": []}, r"table: expected a table, got \[\]"),
        ({"table": {"k": {"szie": 1}}}, r"run\.toml: table\.k: unknown key 'szie'\. Did you mean 'size'\?"),
        ({"path": 3}, r"path: expected Path, got 3 \(int\)"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_the_message_names_source_key_and_value(settings, message):
    with pytest.raises(ConfigError, match=message):
        read(**settings)


def test_missing_key():
    with pytest.raises(ConfigError, match=r"run\.toml: the key 'name' is missing\."):
        config_reader.read(Outer, {}, "run.toml")


@pytest.mark.parametrize("mapping", [None, [], "name", 3], ids=str)
def test_not_a_table(mapping):
    with pytest.raises(ConfigError, match=r"run\.toml: expected a table of settings"):
        config_reader.read(Outer, mapping, "run.toml")


def test_keys_that_are_no_words():
    with pytest.raises(ConfigError, match="unknown key"):
        config_reader.read(Outer, {"name": "x", 1: 2}, "argument")


def test_to_dict_can_be_read_again():
    outer = read(inner={"size": 3}, many=["a"], table={"k": {}}, path="p/q", pair=[3, 4])
    plain = config_reader.to_dict(outer)
    assert plain["path"] == "p/q" and plain["many"] == ["a"] and plain["inner"] == {"kind": "slow", "size": 3}
    assert config_reader.read(Outer, plain, "again") == outer


def test_read_file(tmp_path):
    (tmp_path / "a.toml").write_text('name = "ü"\n[inner]\nsize = 2\n', encoding="utf-8")
    (tmp_path / "a.json").write_text('{"name": "ü", "inner": {"size": 2}}', encoding="utf-8")
    expected = {"name": "ü", "inner": {"size": 2}}
    assert config_reader.read_file(tmp_path / "a.toml") == config_reader.read_file(tmp_path / "a.json") == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", b"", r"a\.yaml: expected a \.toml or \.json file"),
        ("a.toml", b"x = ", r"a\.toml: malformed toml"),
        ("a.json", b"{", r"a\.json: malformed json"),
        ("b.toml", b"\xff", r"b\.toml: must be UTF-8 text, and byte 0 is not"),
        ("b.json", "{}".encode("utf-16"), r"b\.json: must be UTF-8 text, and it seems to be UTF-16"),
        ("c.json", b"[1]", r"c\.json: expected a table of settings, got list"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_read_file_says_what_is_wrong(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        config_reader.read_file(tmp_path / name)


def test_read_file_that_is_missing_or_a_directory(tmp_path):
    with pytest.raises(ConfigError, match="none: no such file or directory"):
        config_reader.read_file(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read \(No such file or directory\)"):
        config_reader.read_file(tmp_path / "none.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.toml: cannot be read \(Is a directory\)"):
        config_reader.read_file(tmp_path / "folder.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": 2, "a": 3}', r"the key 'a' appears twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ("{", "Expecting property name"),
    ],
)
def test_json_that_no_reader_should_accept(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"a\.json: malformed json \(.*{message}") as raised:
        config_reader.read_file(tmp_path / "a.json")
    assert len(str(raised.value)) < 500


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbfa = 1")
    assert config_reader.read_file(tmp_path / "a.toml") == {"a": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": float("nan")}, "rate: expected a finite number, got nan"),
        ({"rate": float("inf")}, "rate: expected a finite number, got inf"),
        ({"rate": 10**400}, "rate: expected a finite number, got 1000"),
        ({"inner": {"size": 10**30}}, "inner: size: .* does not fit in 64 bits"),
        ({"path": "a\0b"}, r"path: 'a\\x00b' contains a NUL character"),
        ({"on": "x" * 10_000}, r"on: expected bool, got 'xxx"),
        ({"on": [[[[[[1]]]]]]}, r"on: expected bool, got \[\[\["),
    ],
)
def test_values_that_no_setting_may_have(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^run\.toml: {message}") as raised:
        read(**settings)
    assert len(str(raised.value)) < 300


def test_what_a_dataclass_refuses_is_said_of_the_file() -> None:
    @dataclass(frozen=True)
    class Picky:
        size: int

        def __post_init__(self) -> None:
            raise ConfigError("size: too small.")

    with pytest.raises(ConfigError, match=r"^a\.toml: size: too small\.$"):
        config_reader.read(Picky, {"size": 1}, "a.toml")


@pytest.mark.parametrize(
    "error", [KeyError("a"), TypeError("b"), ValueError(), RecursionError("deep"), OverflowError()]
)
def test_what_a_value_causes_is_the_fault_of_its_file(error: Exception) -> None:
    expected = rf"^a\.json: damaged or of another program \({type(error).__name__}"
    with pytest.raises(ConfigError, match=expected), config_reader.blaming("a.json"):
        raise error
    with pytest.raises(ConfigError, match=r"^a\.json: no\.$"), config_reader.blaming("a.json"):
        raise ConfigError("no.")
    with pytest.raises(OSError), config_reader.blaming("a.json"):
        raise OSError
