"""Artifacts: one content per id, checked when read."""

import hashlib

import pytest

import storage


def test_an_artifact_comes_back_under_the_hash_of_its_content(store: storage.Store):
    artifact = store.artifacts.put(b"weights", "adapter")
    assert artifact == "adapter-" + hashlib.sha256(b"weights").hexdigest()
    assert store.artifacts.get(artifact) == b"weights"
    assert storage.open(store.path).artifacts.get(artifact) == b"weights"


def test_the_same_content_is_stored_once(store: storage.Store):
    first = store.artifacts.put(b"weights", "adapter")
    assert store.artifacts.put(b"weights", "adapter") == first
    assert store.artifacts.put(b"weights", "optimizer") != first
    assert len([p for p in (store.path / "artifacts").rglob("*") if p.is_file()]) == 2


def test_a_deleted_artifact_is_gone_and_says_so(store: storage.Store):
    artifact = store.artifacts.put(b"weights", "adapter")
    assert store.artifacts.has(artifact)
    store.artifacts.delete(artifact)
    store.artifacts.delete(artifact)
    assert not store.artifacts.has(artifact)
    with pytest.raises(storage.StorageError, match="deleted to save space"):
        store.artifacts.get(artifact)


def test_a_changed_artifact_is_refused(store: storage.Store):
    artifact = store.artifacts.put(b"weights", "adapter")
    [path] = (p for p in (store.path / "artifacts").rglob("*") if p.is_file())
    path.unlink()
    path.write_bytes(b"weighty")
    for use in (
        lambda: store.artifacts.get(artifact),
        lambda: store.artifacts.put(b"weights", "adapter"),
    ):
        with pytest.raises(storage.DamagedError, match="was changed"):
            use()


@pytest.mark.parametrize("artifact", ["", "adapter", "../x-" + "0" * 64, "adapter-" + "0" * 63])
def test_only_ids_of_artifacts_are_looked_up(store: storage.Store, artifact: str):
    for use in (store.artifacts.get, store.artifacts.has, store.artifacts.delete):
        with pytest.raises(storage.StorageError, match="expected an artifact id"):
            use(artifact)


@pytest.mark.parametrize("kind", ["", "A", "a-b", "../a", "1"])
def test_kinds_are_plain_words(store: storage.Store, kind: str):
    with pytest.raises(storage.StorageError, match="expected an artifact id"):
        store.artifacts.put(b"", kind)
