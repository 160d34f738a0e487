"""The Bloom filters of a Parquet file, asked for event ids.

Parquet's split-block filters (format specification, BloomFilter.md): an id sets one bit in each of
the eight words of one block, both chosen by its XXH64 hash. "No" is certain, "yes" is a guess.
pyarrow writes such filters and cannot ask them; DuckDB asks one row group at a time, which takes
longer than reading the answer.
"""

from collections.abc import Sequence

import numpy as np
import xxhash

_SALTS = np.array(
    [0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947,
     0x5C6BFB31],
    np.uint32,
)  # fmt: skip


def hashes(event_ids: Sequence[str]) -> np.ndarray:
    """Return the XXH64 hashes [ids] uint64 of ids."""
    return np.array(
        [xxhash.xxh64_intdigest(event_id.encode()) for event_id in event_ids], np.uint64
    )


def may_hold_any(filters: Sequence[bytes], of_ids: np.ndarray) -> list[bool]:
    """Tell of each filter, with its header, if it may hold any id with one of these hashes."""
    found = [False] * len(filters)
    for length in set(map(len, filters)):
        numbers = [n for n, filter_ in enumerate(filters) if len(filter_) == length]
        answers = _may_hold_any(b"".join(filters[n] for n in numbers), length, of_ids)
        for number, answer in zip(numbers, answers.tolist(), strict=True):
            found[number] = answer
    return found


def _may_hold_any(filters: bytes, length: int, of_ids: np.ndarray) -> np.ndarray:
    """Ask filters of one length, all in a row."""
    size = 1 << (length.bit_length() - 1)  # the bits; the header is shorter
    bare = np.frombuffer(filters, np.uint8).reshape(-1, length)[:, length - size :]
    words = np.ascontiguousarray(bare).view("<u4").reshape(len(bare), -1, 8)
    blocks = ((of_ids >> np.uint64(32)) * np.uint64(words.shape[1])) >> np.uint64(32)
    keys = of_ids.astype(np.uint32)[:, None]
    bits = np.uint32(1) << ((keys * _SALTS) >> np.uint32(27))
    answers: np.ndarray = ((words[:, blocks.astype(np.int64)] & bits) == bits).all(2).any(1)
    return answers
