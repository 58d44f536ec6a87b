"""Random streams derived from the run's seed and a stream's purpose."""

import hashlib


def derive(seed: int, *purpose: int | str) -> int:
    """Return a 63-bit seed for one purpose, such as ``derive(seed, "dropout", unit, step, block)``.

    It is a hash, so similar purposes give unrelated seeds, and the order of calls does not matter.
    """
    # convert numpy's integers, whose repr differs
    plain = tuple(part if isinstance(part, str) else int(part) for part in purpose)
    text = repr((int(seed), *plain)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
