"""Random bits are Philox-4x32-10: against known answers of Random123, an independent twin, and Triton's stream."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from octavo.numerics import random_bits

CPU = torch.device("cpu")
SEEDS = [0, 1, 0xFFFFFFFF, 1 << 32, 0x299F31D0A4093822, (1 << 64) - 1]


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox-4x32-10 with Python's integers, written down from the paper (Salmon et al., SC'11)."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ k0, right % 2**32, (left >> 32) ^ d ^ k1, left % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return a, b, c, d


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_the_twin_gives_the_known_answers_of_random123(counter, key, answer):
    assert philox(counter, key) == answer  # kat_vectors of Random123


def test_first_bits_are_the_known_answer():
    assert random_bits(0, (1,), CPU).item() == 0x6627E8D5


@pytest.mark.parametrize("seed", SEEDS, ids=hex)
def test_every_element_is_its_own_counter(seed):
    bits = random_bits(seed, (20, 15), CPU)
    expected = [philox((i, 0, 0, 0), (seed % 2**32, seed >> 32))[0] for i in range(300)]
    assert bits.shape == (20, 15)
    assert bits.flatten().tolist() == expected


@pytest.mark.parametrize("seed", [0, 1, 0xFFFFFFFF, 1 << 32, (1 << 62) - 1], ids=hex)
def test_a_seed_may_be_a_tensor(seed):
    assert torch.equal(random_bits(torch.tensor(seed), (64,), CPU), random_bits(seed, (64,), CPU))


def test_shape_does_not_matter_only_the_index_does():
    assert torch.equal(random_bits(7, (6, 4), CPU).flatten(), random_bits(7, (24,), CPU))
    assert torch.equal(random_bits(7, (5,), CPU), random_bits(7, (24,), CPU)[:5])


def test_seeds_give_different_streams():
    assert not torch.equal(random_bits(1, (64,), CPU), random_bits(2, (64,), CPU))


def test_bits_are_uniform():
    share = (random_bits(3, (1 << 16,), CPU).double() * 2.0**-32).mean()
    assert abs(share - 0.5) < 5 * (1 / 12 / (1 << 16)) ** 0.5  # five standard errors


def test_no_elements():
    assert random_bits(0, (0, 3), CPU).shape == (0, 3)


TRITON = """
import torch, triton, triton.language as tl

@triton.jit
def bits(out, seed, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(out + index, tl.randint(seed, index).to(tl.int64) & 0xFFFFFFFF)

for seed in (0, 1, 123456789, 0x299F31D0A4093822):
    out = torch.empty(64, dtype=torch.int64)
    bits[(1,)](out, seed, 64)
    print(*out.tolist())
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_triton_gives_the_same_stream(tmp_path):
    script = tmp_path / "bits.py"  # triton reads the source of a kernel from a file, and its mode at import
    script.write_text(TRITON)
    run = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    for seed, line in zip((0, 1, 123456789, 0x299F31D0A4093822), run.stdout.splitlines(), strict=True):
        assert random_bits(seed, (64,), CPU).tolist() == [int(word) for word in line.split()]


@pytest.mark.gpu
def test_same_bits_on_a_gpu():
    assert torch.equal(random_bits(5, (100, 33), torch.device("cuda")).cpu(), random_bits(5, (100, 33), CPU))
