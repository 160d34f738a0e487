"""Seeds derived from a root and a place: a resumed or forked run draws what the first one drew."""

import hashlib


def derive_seed(seed_root: int, *place: str | int) -> int:
    """Return a 63-bit seed that depends on `seed_root` and every part of `place`, and nothing else.

    Args:
        seed_root: root of the run, stored with it and inherited by forks.
        place: what the seed is for, e.g. ("attempt", iteration, prompt_id, sample_index, attempt).
            1 and "1" are different parts.
    """
    text = repr((seed_root, *place))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
