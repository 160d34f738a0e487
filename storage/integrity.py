"""Is a segment still the file that was committed?"""

import hashlib
from pathlib import Path

from storage.commits import Segment
from storage.errors import DamagedError
from storage.files import Files

MAGIC = b"PAR1"  # the last four bytes of a whole Parquet file


def read_checked(files: Files, segment: Segment) -> bytes:
    """Return the bytes of a segment, having compared their hash with the committed one."""
    where = files.root / segment.path
    try:
        data = files.read(segment.path)
    except FileNotFoundError as error:
        raise DamagedError(
            f"segment `{where}` is missing; restore it from a backup, or look at the rest with "
            "`--allow-damaged`"
        ) from error
    except OSError as error:
        raise DamagedError(
            f"segment `{where}` cannot be read ({error}); restore it from a backup"
        ) from error
    found = hashlib.sha256(data).hexdigest()
    if found != segment.sha256:
        raise DamagedError(
            f"segment `{where}` was changed: expected {segment.size_bytes} bytes with sha256 "
            f"{segment.sha256}, came {len(data)} with {found}; restore it from a backup"
        )
    return data


def damage(root: Path, segment: Segment) -> str | None:
    """Say what is wrong with a segment as far as size and footer show; None when nothing is."""
    path = root / segment.path
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - len(MAGIC)))
            footer = file.read()
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error}"
    if size != segment.size_bytes:
        return f"has {size} bytes, expected {segment.size_bytes}"
    return None if footer == MAGIC else "does not end as a Parquet file does"
