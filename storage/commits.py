"""The record of one commit, and its JSON form.

Invariant: a commit is the only thing that makes rows exist. It names every segment it adds and
removes with size and hash, and the hash of the commit before it, so the commits form a chain.

Kinds: `open` starts an epoch of a stream, `append` adds rows. Maintenance belongs to no epoch:
`compact` puts the rows of the segments it removes into the ones it adds, `condemn` names files that
no commit may use any more, `collect` says that condemned files were deleted. A version that does
not know a kind refuses the store.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from storage.errors import DamagedError, NewerSchemaError
from storage.schemas import FORMAT_VERSION

KINDS = ("open", "append", "compact", "condemn", "collect")
FOLDER = "_log"


@dataclass(frozen=True)
class Segment:
    """One Parquet file of one table, as a commit describes it."""

    table: str
    path: str
    rows: int
    size_bytes: int
    sha256: str
    min_iteration: int | None
    max_iteration: int | None
    schema_version: int


@dataclass(frozen=True)
class Draft:
    """What a commit says, before it has a number.

    `run_id` is the stream, also of the segments that a compaction merges; empty for `condemn` and
    `collect`. `epoch` is 0 and `batch_key` empty for maintenance. `removed` are paths: no longer
    live (`compact`), never to be used again (`condemn`), deleted (`collect`).
    """

    nonce: str
    kind: str
    run_id: str
    epoch: int
    batch_key: str
    recorded_at: str
    closes_iteration: int | None = None
    added: tuple[Segment, ...] = ()
    removed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Commit:
    """A draft that has its place in the chain; `sha256` covers everything else in it."""

    number: int
    prev_sha256: str
    draft: Draft
    sha256: str


@dataclass(frozen=True)
class Head:
    """The newest commit: number 0 and an empty hash when nothing is committed yet."""

    number: int
    sha256: str


def commit_path(number: int) -> str:
    """Return the path of commit `number` in the store."""
    return f"{FOLDER}/{number:020d}.json"


def seal(draft: Draft, head: Head) -> Commit:
    """Return the commit that `draft` becomes right after `head`."""
    number = head.number + 1
    body = _body(number, head.sha256, draft)
    return Commit(number, head.sha256, draft, body_sha256(body))


def encode(commit: Commit) -> bytes:
    """Return the JSON form of a commit."""
    body = _body(commit.number, commit.prev_sha256, commit.draft)
    return canonical_json(body | {"sha256": commit.sha256}) + b"\n"


def decode(data: bytes, path: str) -> Commit:
    """Read a commit back, refusing newer formats and anything whose hash does not fit.

    Raises:
        DamagedError: not the JSON of a commit, or not the one that was written.
        NewerSchemaError: written by a newer version.
    """
    body = decode_body(data, path)
    if body.get("kind") not in KINDS:
        raise NewerSchemaError(
            f"`{path}`: a commit of kind {body.get('kind')!r}; this version knows "
            f"{', '.join(KINDS)}. Install a newer version of rrl to use this store"
        )
    try:
        body["added"] = tuple(Segment(**segment) for segment in body["added"])
        body["removed"] = tuple(body["removed"])
        number, prev_sha256, sha256 = (body.pop(k) for k in ("number", "prev_sha256", "sha256"))
        return Commit(number, prev_sha256, Draft(**body), sha256)
    except (KeyError, TypeError) as error:
        raise DamagedError(f"`{path}`: expected the fields of a commit: {error!r}") from error


def decode_body(data: bytes, path: str) -> dict[str, Any]:
    """Parse the JSON of a commit or checkpoint, and check its format and its own hash."""
    try:
        body = json.loads(data)
        claimed = body.pop("sha256")
        version = body["format"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(
            f"`{path}`: expected a JSON object with `format` and `sha256`, came {len(data)} bytes "
            "that are none; restore the file from a backup"
        ) from error
    if version != FORMAT_VERSION:
        raise NewerSchemaError(
            f"`{path}`: written in format {version!r}; this version reads format "
            f"{FORMAT_VERSION}. Install a newer version of rrl to use this store"
        )
    if body_sha256(body) != claimed:
        raise DamagedError(
            f"`{path}`: its content was changed (its hash is {body_sha256(body)}, it says "
            f"{claimed}); restore the file from a backup"
        )
    del body["format"]
    return {**body, "sha256": claimed}


def body_sha256(body: dict[str, Any]) -> str:
    """Return the hash of a body that does not yet hold its own."""
    return hashlib.sha256(canonical_json(body)).hexdigest()


def canonical_json(value: Any) -> bytes:
    """Return the one JSON form that hashes are taken over."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _body(number: int, prev_sha256: str, draft: Draft) -> dict[str, Any]:
    return {
        "format": FORMAT_VERSION,
        "number": number,
        "prev_sha256": prev_sha256,
        **asdict(draft),
    }
