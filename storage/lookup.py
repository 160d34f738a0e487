"""The rows of some events, without reading the others.

Invariant: looking up finds the rows that reading everything and filtering would. Bloom filters rule
out nearly all row groups, the ids in the others tell which to read.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage import bloom
from storage.identity import is_storable_text

_ID = "event_id"
_NUM_INDICES = 128  # kept in memory: reading one takes as long as looking up in its segment


@dataclass(frozen=True)
class _Index:
    """Footer of a segment, and the Bloom filters of its row groups; None: it has none."""

    footer: pq.FileMetaData
    filters: list[bytes] | None


def read_events(path: Path, event_ids: Collection[str]) -> pa.Table:
    """Return the rows of a segment that have one of these ids, in their order."""
    wanted = sorted({i for i in event_ids if is_storable_text(i)})
    values = pa.array(wanted, pa.string())
    index = _index(path)
    groups = _possible_groups(index, wanted) if wanted else []
    with pq.ParquetFile(path, metadata=index.footer) as file:
        ids = file.read_row_groups(groups, columns=[_ID], use_threads=False).column(_ID)
        is_wanted = pc.is_in(ids, values).to_numpy()
        lengths = [index.footer.row_group(group).num_rows for group in groups]
        parts = np.split(is_wanted, np.cumsum(lengths)[:-1]) if groups else []
        needed = [n for n, part in enumerate(parts) if part.any()]
        rows = file.read_row_groups([groups[n] for n in needed], use_threads=False)
    kept = np.concatenate([parts[n] for n in needed]) if needed else np.zeros(0, bool)
    return rows.filter(pa.array(kept))


def _possible_groups(index: _Index, wanted: list[str]) -> list[int]:
    """Return the row groups that may hold any of the ids, as far as Bloom filters tell."""
    if index.filters is None:
        return list(range(index.footer.num_row_groups))
    answers = bloom.may_hold_any(index.filters, bloom.hashes(wanted))
    return [group for group, may_hold in enumerate(answers) if may_hold]


@lru_cache(_NUM_INDICES)
def _index(path: Path) -> _Index:
    """Read what tells where events are; the file never changes."""
    footer = pq.read_metadata(path)
    place = footer.schema.names.index(_ID)
    chunks = [footer.row_group(group).column(place) for group in range(footer.num_row_groups)]
    if any(chunk.bloom_filter_offset is None for chunk in chunks):
        return _Index(footer, None)
    filters = []
    with path.open("rb", buffering=2**18) as file:
        for chunk in chunks:
            file.seek(chunk.bloom_filter_offset)
            filters.append(file.read(chunk.bloom_filter_length))
    return _Index(footer, filters)
