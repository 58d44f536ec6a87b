"""A derived seed depends only on the run's seed and on its purpose."""

import hashlib
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from collapipe.seeds import derive

parts = st.integers(-(2**62), 2**62) | st.text()
purposes = st.lists(parts, max_size=4).map(tuple)
seeds = st.integers(0, 2**62)


@given(seeds, purposes)
def test_a_derived_seed_is_a_63_bit_hash_that_torch_accepts(
    seed: int, purpose: tuple[int | str, ...]
) -> None:
    """The seed has 63 bits of a BLAKE2b digest and is the same on every call."""
    derived = derive(seed, *purpose)
    digest = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()
    assert derived == sum(byte << 8 * place for place, byte in enumerate(digest)) // 2
    assert derived == derive(seed, *purpose)
    assert 0 <= derived < 2**63
    assert torch.Generator().manual_seed(derived).initial_seed() == derived


similar_parts = st.lists(st.integers(1, 12) | st.text("12", max_size=2), max_size=3).map(tuple)


@given(st.lists(st.tuples(st.integers(1, 12), similar_parts), min_size=2, max_size=20, unique=True))
def test_different_purposes_have_different_seeds(
    purposes: list[tuple[int, tuple[int | str, ...]]],
) -> None:
    """Consecutive numbers, ``"1"`` and ``1``, and differently joined parts have other seeds."""
    derived = [derive(seed, *purpose) for seed, purpose in purposes]
    assert len(set(derived)) == len(derived)


def test_seeds_of_consecutive_steps_are_unrelated() -> None:
    """About half of the bits differ from one step to the next."""
    derived = [derive(0, "dropout", 0, step, "blocks.1", 0) for step in range(200)]
    flipped = [(left ^ right).bit_count() for left, right in pairwise(derived)]
    assert 29 < sum(flipped) / len(flipped) < 34
    assert derive(0, "a", "b") != derive(0, "ab")
    assert derive(0, 1) != derive(0, "1")
    assert derive(0, 1, 2) != derive(0, 12)


def test_every_process_derives_the_same_seed() -> None:
    """Python's own hash of a string differs between processes."""
    program = "from collapipe.seeds import derive; print(derive(3, 'data', 1, 'ü'))"
    for hash_seed in ("1", "2"):
        printed = subprocess.check_output(
            [sys.executable, "-c", program],
            env={
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
        )
        assert int(printed) == derive(3, "data", 1, "ü")


def test_numpy_integers_give_the_same_seeds_as_ints() -> None:
    assert derive(np.int64(3), "unit", np.int32(1)) == derive(3, "unit", 1)
