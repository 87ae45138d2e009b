"""Classes in pickled files are found after their module moved; `tests/lab/data` has files of earlier commits."""

from __future__ import annotations

import importlib
import pickle
import sys

import pytest

from octavo._util.former_names import FormerNames
from octavo.numerics import Granularity

NOW = "numerics.granularity"


@pytest.fixture
def finder(monkeypatch: pytest.MonkeyPatch) -> FormerNames:
    """Return a finder of modules that never were, forgotten after the test."""
    found = FormerNames("octavo", {"attic.shapes": NOW, "old_shapes": NOW, "errors": NOW})
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, found])
    for name in ("octavo.attic", "octavo.attic.shapes", "octavo.old_shapes"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delattr(f"octavo.{name.split('.')[1]}", raising=False)
    return found


@pytest.mark.parametrize("former", ["octavo.attic.shapes", "octavo.old_shapes"])
def test_a_pickle_names_the_module_as_it_was(finder: FormerNames, former: str) -> None:
    written, now = pickle.dumps(Granularity(1, 128), protocol=0), f"octavo.{NOW}".encode()
    assert now in written
    assert pickle.loads(written.replace(now, former.encode())) == Granularity(1, 128)


def test_a_module_that_exists_is_never_hidden(finder: FormerNames) -> None:
    assert hasattr(importlib.import_module("octavo.errors"), "ConfigError")


def test_other_names_and_attributes_are_not_found(finder: FormerNames) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"octavo\.attic\.doors"):
        importlib.import_module("octavo.attic.doors")
    with pytest.raises(AttributeError, match="Unheard"):
        _ = importlib.import_module("octavo.attic.shapes").Unheard
    assert not hasattr(importlib.import_module("octavo.attic"), "Granularity")
