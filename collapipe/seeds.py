"""Random streams derived from the run's seed and a stream's purpose."""

import hashlib


def derive(seed: int, *purpose: int | str) -> int:
    """A 63-bit seed for one purpose, such as ``derive(seed, "dropout", unit, step, block)``.

    A hash, so that neighbouring purposes share nothing and no order of calls matters.
    """
    # numpy's whole numbers are written in another way, and are the same purpose
    plain = tuple(part if isinstance(part, str) else int(part) for part in purpose)
    text = repr((int(seed), *plain)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
