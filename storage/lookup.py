"""The rows of some events, without reading the others.

Invariant: looking up finds the rows that reading everything and filtering would. Bloom filters rule
out nearly all row groups, the ids in the others tell which to read.
"""

from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage import bloom
from storage.identity import is_storable_text

_ID = "event_id"
_NUM_FOOTERS = 128  # kept in memory: reading one takes as long as looking up in its segment


def read_events(path: Path, event_ids: Collection[str]) -> pa.Table:
    """Return the rows of a segment that have one of these ids, in their order."""
    wanted = sorted({i for i in event_ids if is_storable_text(i)})
    values = pa.array(wanted, pa.string())
    with pq.ParquetFile(path, metadata=_footer(path)) as file:
        groups = _possible_groups(path, file.metadata, wanted) if wanted else []
        ids = file.read_row_groups(groups, columns=[_ID]).column(_ID)
        is_wanted = pc.is_in(ids, values).to_numpy()
        lengths = [file.metadata.row_group(group).num_rows for group in groups]
        parts = np.split(is_wanted, np.cumsum(lengths)[:-1]) if groups else []
        needed = [n for n, part in enumerate(parts) if part.any()]
        rows = file.read_row_groups([groups[n] for n in needed])
    kept = np.concatenate([parts[n] for n in needed]) if needed else np.zeros(0, bool)
    return rows.filter(pa.array(kept))


def _possible_groups(path: Path, metadata: pq.FileMetaData, wanted: list[str]) -> list[int]:
    """Return the row groups that may hold any of the ids, as far as Bloom filters tell."""
    place = metadata.schema.names.index(_ID)
    groups = range(metadata.num_row_groups)
    chunks = [metadata.row_group(group).column(place) for group in groups]
    if any(chunk.bloom_filter_offset is None for chunk in chunks):
        return list(groups)
    with path.open("rb", buffering=2**18) as file:
        filters = []
        for chunk in chunks:
            file.seek(chunk.bloom_filter_offset)
            filters.append(file.read(chunk.bloom_filter_length))
    answers = bloom.may_hold_any(filters, bloom.hashes(wanted))
    return [group for group, may_hold in zip(groups, answers, strict=True) if may_hold]


@lru_cache(_NUM_FOOTERS)
def _footer(path: Path) -> pq.FileMetaData:
    return pq.read_metadata(path)  # of a file that never changes
