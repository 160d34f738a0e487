"""Large byte strings (adapters, optimizer states) under the hash of their content.

Invariant: an id names one content for ever; `put` returns only when the content is durable, so an
event may name it.
"""

import hashlib
import re
from contextlib import suppress

from storage.errors import DamagedError, StorageError
from storage.files import Files

FOLDER = "artifacts"
_ID = re.compile(r"([a-z][a-z0-9_]*)-([0-9a-f]{64})")


class ArtifactStore:
    """The artifacts of a store, addressed by ids of the form `<kind>-<sha256>`."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def put(self, data: bytes, kind: str) -> str:
        """Store `data` durably and return its id; the same data again is stored once."""
        artifact_id = f"{kind}-{hashlib.sha256(data).hexdigest()}"
        path = artifact_path(artifact_id)
        if not self.has(artifact_id):
            with suppress(FileExistsError):  # another process was faster
                self._files.publish(path, data)
                return artifact_id
        self._files.sync_folders([path])  # whoever stored it may have been killed before this
        self.get(artifact_id)
        return artifact_id

    def get(self, artifact_id: str) -> bytes:
        """Return the content of an artifact, its hash checked.

        Raises:
            StorageError: there is no such artifact.
            DamagedError: the file there has another content.
        """
        path = artifact_path(artifact_id)
        try:
            data = self._files.read(path)
        except FileNotFoundError as error:
            raise StorageError(
                f"artifact `{artifact_id}` is not in `{self._files.root}`; it was never stored "
                "there or was deleted to save space"
            ) from error
        if hashlib.sha256(data).hexdigest() != artifact_id.rpartition("-")[2]:
            raise DamagedError(
                f"artifact `{self._files.root / path}` was changed; restore it from a backup, or "
                "delete the file so that it can be stored again"
            )
        return data

    def has(self, artifact_id: str) -> bool:
        """Tell whether the artifact is there."""
        return (self._files.root / artifact_path(artifact_id)).exists()

    def delete(self, artifact_id: str) -> None:
        """Delete an artifact; a missing one is fine."""
        self._files.delete(artifact_path(artifact_id))


def artifact_path(artifact_id: str) -> str:
    """Return where an artifact is kept, refusing anything that is not an artifact's id."""
    match = _ID.fullmatch(artifact_id)
    if match is None:
        raise StorageError(
            f"expected an artifact id `<kind>-<sha256>` with a kind of a-z, 0-9 and _, "
            f"came {artifact_id!r}"
        )
    kind, digest = match.groups()
    return f"{FOLDER}/{kind}/{digest[:2]}/{digest}"
