"""One family of errors, and a hint at what was meant."""

import pytest

from octavo import errors
from octavo.errors import OctavoError, did_you_mean

KINDS = [
    errors.ConfigError,
    errors.DataError,
    errors.CheckpointError,
    errors.NonFiniteError,
    errors.UnsupportedError,
    errors.StoreError,
]
"""Besides `RunError` and the one that is one."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_an_octavo_error_and_none_is_another(kind):
    assert issubclass(kind, OctavoError)
    assert not any(issubclass(kind, other) for other in KINDS if other is not kind)


def test_no_error_is_left_out_of_this_file():
    defined = {v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, OctavoError)}
    assert defined == {OctavoError, errors.RunError, errors.DivergedError, *KINDS}
    assert issubclass(errors.DivergedError, errors.RunError) and errors.DivergedError.exit_code == 3


def test_a_wrong_argument_is_also_a_value_error():
    assert issubclass(errors.ConfigError, ValueError)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("folded", " Did you mean 'folded'?"),
        ("foldd", " Did you mean 'folded'?"),
        ("blokc", " Did you mean 'block'?"),
        ("zzz", ""),
        ("", ""),
    ],
)
def test_did_you_mean(word, expected):
    assert did_you_mean(word, ["rowwise", "folded", "block"]) == expected


def test_did_you_mean_takes_any_iterable():
    assert did_you_mean("a", {"ab": 1}) == " Did you mean 'ab'?"
    assert did_you_mean("a", iter(())) == ""
