"""The Bloom filters of a Parquet file, asked for event ids.

Parquet's split-block filters (format specification, BloomFilter.md): an id sets one bit in each of
the eight words of one block, both chosen by its XXH64 hash. "No" is certain, "yes" is a guess.
pyarrow writes such filters and cannot ask them; DuckDB asks one row group at a time, which takes
longer than reading the answer.
"""

from collections.abc import Sequence

import numpy as np

ID_LENGTH = 34  # a prefix of two letters and 32 digits
_SALTS = np.array(
    [0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947,
     0x5C6BFB31],
    np.uint32,
)  # fmt: skip
_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (
        11400714785074694791, 14029467366897019727, 1609587929392839161, 9650029242287828579,
        2870177450012600261,
    )
)  # fmt: skip


def hashes(event_ids: Sequence[str]) -> np.ndarray:
    """Return the XXH64 hashes [ids] uint64 of ids, which all have `ID_LENGTH` ASCII characters."""
    data = np.frombuffer("".join(event_ids).encode(), np.uint8).reshape(-1, ID_LENGTH)
    lanes = np.ascontiguousarray(data[:, :32]).view("<u8")
    starts = np.array([(int(_P1) + int(_P2)) % 2**64, _P2, 0, 2**64 - int(_P1)], np.uint64)
    sums = _rotated(starts + lanes * _P2, 31) * _P1
    mixed: np.ndarray = np.zeros(len(data), np.uint64)
    for lane, turn in enumerate((1, 7, 12, 18)):
        mixed = mixed + _rotated(sums[:, lane], turn)
    for lane in range(4):
        mixed = (mixed ^ (_rotated(sums[:, lane] * _P2, 31) * _P1)) * _P1 + _P4
    mixed = mixed + np.uint64(ID_LENGTH)
    for place in (32, 33):
        mixed = _rotated(mixed ^ (data[:, place].astype(np.uint64) * _P5), 11) * _P1
    mixed = (mixed ^ (mixed >> np.uint64(33))) * _P2
    mixed = (mixed ^ (mixed >> np.uint64(29))) * _P3
    last: np.ndarray = mixed ^ (mixed >> np.uint64(32))
    return last


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


def _rotated(values: np.ndarray, bits: int) -> np.ndarray:
    return (values << np.uint64(bits)) | (values >> np.uint64(64 - bits))
