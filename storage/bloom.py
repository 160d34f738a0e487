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
    found = np.zeros(len(filters), bool)
    lengths = np.array(list(map(len, filters)), np.int64)
    for length in np.unique(lengths).tolist():
        numbers = np.flatnonzero(lengths == length)
        together = b"".join(filters[n] for n in numbers.tolist())
        found[numbers[_holding(together, length, of_ids)]] = True
    answers: list[bool] = found.tolist()
    return answers


def _holding(filters: bytes, length: int, of_ids: np.ndarray) -> np.ndarray:
    """Return the numbers of the filters, all of one length and in a row, that may hold an id."""
    size = 1 << (length.bit_length() - 1)  # the bits; the header is shorter
    bare = np.frombuffer(filters, np.uint8).reshape(-1, length)[:, length - size :]
    words = np.ascontiguousarray(bare).view("<u4").reshape(len(bare), -1, 8)
    blocks = ((of_ids >> np.uint64(32)) * np.uint64(words.shape[1])) >> np.uint64(32)
    keys = of_ids.astype(np.uint32)[:, None]
    bits = np.uint32(1) << ((keys * _SALTS) >> np.uint32(27))
    places = blocks.astype(np.int64)
    # Each word rules out more than half of the pairs that are left.
    numbers, ids = np.nonzero(words[:, places, 0] & bits[:, 0])
    for word in range(1, 8):
        is_set = words[numbers, places[ids], word] & bits[ids, word] != 0
        numbers, ids = numbers[is_set], ids[is_set]
    return numbers
