"""The list of a pack's files, and a digest cache that may never vouch for other bytes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from flashnext_drv.errors import CheckpointError
from flashnext_drv.model import manifest as module
from flashnext_drv.model.manifest import Manifest, digest_cache_path

pytestmark = pytest.mark.host
SHM = Path("/dev/shm")


def make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.safetensors").write_bytes(b"a" * 1000)
    (folder / "b.safetensors").write_bytes(b"b" * 5000)
    (folder / "config.json").write_bytes(b"{}")
    (folder / ".gitattributes").write_bytes(b"hidden")
    (folder / "sub").mkdir()
    return folder


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    return make(tmp_path / "pack")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "digests.json"


@pytest.fixture
def short_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files count as rested after 0.1 s, ten times the coarsest tick of the file systems tested on."""
    monkeypatch.setattr(module, "RACY_NS", 100_000_000)


def differs(kept: Manifest, folder: Path, cache: Path) -> dict[str, object]:
    with pytest.raises(CheckpointError, match="differs from its manifest") as caught:
        kept.verify(folder, cache=cache)
    assert caught.value.facts.pop("folder") == str(folder) and "fetch the pack again" in str(caught.value)
    return caught.value.facts


def rested(file: Path) -> None:
    """Wait until `file` has rested long enough for the cache to trust its stamps."""
    left_ns = file.stat().st_ctime_ns + module.RACY_NS + 20_000_000 - time.time_ns()
    time.sleep(max(0, left_ns) / 1e9)


def test_files_bytes_and_digest(pack: Path, cache: Path) -> None:
    made = Manifest.of(pack, cache=cache)
    assert [f.name for f in made.files] == ["a.safetensors", "b.safetensors", "config.json"]
    assert made.files[1].sha256 == hashlib.sha256(b"b" * 5000).hexdigest() and made.size == 6002
    lines = "".join(f"{f.sha256} {f.size} {f.name}\n" for f in made.files)
    assert made.digest == hashlib.sha256(lines.encode()).hexdigest()
    made.verify(pack, cache=cache)


def test_json_form_round_trips_and_may_lie_in_the_pack(pack: Path, cache: Path) -> None:
    made = Manifest.of(pack, cache=cache)
    made.save(pack / "manifest.json")
    assert Manifest.load(pack / "manifest.json") == made == Manifest.of(pack, cache=cache)


def test_tampered_byte(pack: Path, cache: Path) -> None:
    kept = Manifest.of(pack, cache=cache)
    data = bytearray((pack / "b.safetensors").read_bytes())
    data[4999] ^= 1
    (pack / "b.safetensors").write_bytes(data)
    assert differs(kept, pack, cache) == {"changed": ["b.safetensors"]}


def test_added_file(pack: Path, cache: Path) -> None:
    kept = Manifest.of(pack, cache=cache)
    (pack / "c.safetensors").write_bytes(b"c")
    assert differs(kept, pack, cache) == {"added": ["c.safetensors"]}


def test_dropped_file(pack: Path, cache: Path) -> None:
    kept = Manifest.of(pack, cache=cache)
    (pack / "a.safetensors").unlink()
    assert differs(kept, pack, cache) == {"dropped": ["a.safetensors"]}


def test_renamed_file(pack: Path, cache: Path) -> None:
    kept = Manifest.of(pack, cache=cache)
    (pack / "a.safetensors").rename(pack / "z.safetensors")
    assert differs(kept, pack, cache) == {"renamed": [("a.safetensors", "z.safetensors")]}


def test_swapped_files(pack: Path, cache: Path) -> None:
    kept = Manifest.of(pack, cache=cache)
    a, b = (pack / "a.safetensors").read_bytes(), (pack / "b.safetensors").read_bytes()
    (pack / "a.safetensors").write_bytes(b)
    (pack / "b.safetensors").write_bytes(a)
    assert differs(kept, pack, cache) == {"changed": ["a.safetensors", "b.safetensors"]}


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": 2, "files": []}', '{"format": 1, "files": [{"name": "a"}]}']
)
def test_malformed_manifest(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(CheckpointError, match="manifest is malformed") as caught:
        Manifest.load(tmp_path / "m.json")
    assert caught.value.file == str(tmp_path / "m.json")


def test_edited_manifest(pack: Path, cache: Path, tmp_path: Path) -> None:
    Manifest.of(pack, cache=cache).save(tmp_path / "m.json")
    raw = json.loads((tmp_path / "m.json").read_text())
    raw["files"][0]["sha256"] = "0" * 64
    (tmp_path / "m.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="manifest contradicts itself"):
        Manifest.load(tmp_path / "m.json")


def test_missing_manifest_and_folder(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(CheckpointError, match="manifest cannot be read"):
        Manifest.load(tmp_path / "m.json")
    with pytest.raises(CheckpointError, match="pack folder cannot be read"):
        Manifest.of(tmp_path / "none", cache=cache)


@pytest.fixture(params=["disk", "tmpfs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The pack's folder on disk, and on tmpfs."""
    folder = tmp_path if request.param == "disk" else SHM / f"flashnext_{os.getpid()}_{tmp_path.name}"
    if request.param == "tmpfs" and not os.access(SHM, os.W_OK):
        pytest.skip("no writable tmpfs at /dev/shm")
    request.addfinalizer(lambda: shutil.rmtree(folder, ignore_errors=True))
    return make(folder / "pack")


def test_rewrite_at_once_of_the_same_size_with_restored_mtime(place: Path, cache: Path) -> None:
    """200 rewrites, each hashed right after it was made: most fall into a clock tick of the one before."""
    file = place / "a.safetensors"
    stamp = file.stat()
    for i in range(200):
        data = i.to_bytes(2, "little") * 500
        file.write_bytes(data)
        os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        made = Manifest.of(place, cache=cache)
        assert made.files[0].sha256 == hashlib.sha256(data).hexdigest(), f"rewrite {i} went unseen"


def test_later_rewrite_with_restored_mtime(place: Path, cache: Path, short_rest: None) -> None:
    file = place / "a.safetensors"
    rested(file)
    kept = Manifest.of(place, cache=cache)
    assert len(json.loads(cache.read_text())["entries"]) >= 1
    stamp = file.stat()
    file.write_bytes(b"x" * 1000)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert file.stat().st_mtime_ns == stamp.st_mtime_ns and file.stat().st_size == stamp.st_size
    made = Manifest.of(place, cache=cache)
    assert made.files[0].sha256 == hashlib.sha256(b"x" * 1000).hexdigest() and made.digest != kept.digest
    rested(file)
    assert Manifest.of(place, cache=cache) == made


def test_stamps_inside_the_tick_are_not_trusted(
    pack: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst case made on purpose: a rewrite that leaves every stamp as it was."""
    file = pack / "a.safetensors"
    real = os.stat(file)
    seen = Manifest.of(pack, cache=cache)

    class Frozen:
        st_dev, st_ino, st_size = real.st_dev, real.st_ino, real.st_size
        st_mtime_ns, st_ctime_ns = real.st_mtime_ns, real.st_ctime_ns

    file.write_bytes(b"y" * 1000)
    monkeypatch.setattr(
        module.os, "fstat", lambda fd: Frozen if os.stat(fd).st_ino == real.st_ino else os.stat(fd)
    )
    again = Manifest.of(pack, cache=cache)
    assert again.files[0].sha256 == hashlib.sha256(b"y" * 1000).hexdigest() != seen.files[0].sha256


def test_rested_files_are_not_read_again(
    pack: Path, short_rest: None, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.safetensors", "b.safetensors", "config.json"):
        rested(pack / name)
    made = Manifest.of(pack, cache=cache)
    hashed: list[int] = []
    real = hashlib.sha256
    monkeypatch.setattr(module.hashlib, "sha256", lambda *a: hashed.append(1) or real(*a))
    assert Manifest.of(pack, cache=cache).files == made.files and hashed == []
    assert Manifest.of(pack, cache=cache, use_cache=False).files == made.files and len(hashed) == 3


def test_verify_reads_every_byte(pack: Path, short_rest: None, cache: Path) -> None:
    """A poisoned cache does not help a changed file."""
    for name in ("a.safetensors", "b.safetensors", "config.json"):
        rested(pack / name)
    kept = Manifest.of(pack, cache=cache)
    raw = json.loads(cache.read_text())
    for entry in raw["entries"].values():
        entry["sha256"] = "f" * 64
    cache.write_text(json.dumps(raw))
    assert Manifest.of(pack, cache=cache).files[0].sha256 == "f" * 64
    kept.verify(pack, cache=cache)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 1, "entries": {"k": 5}}', '{"format": 9, "entries": {}}']
)
def test_broken_cache_is_an_empty_cache(pack: Path, cache: Path, text: str) -> None:
    cache.parent.mkdir()
    cache.write_text(text)
    assert Manifest.of(pack, cache=cache).files[0].sha256 == hashlib.sha256(b"a" * 1000).hexdigest()


def test_unwritable_cache_costs_time_only(pack: Path, short_rest: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    rested(pack / "a.safetensors")
    assert len(Manifest.of(pack, cache=tmp_path / "file" / "digests.json").files) == 3


def test_file_that_changes_while_it_is_hashed(
    pack: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fstat
    calls = 0
    lock = threading.Lock()

    def changing(fd: int) -> os.stat_result:
        nonlocal calls
        with lock:
            calls += 1
            if calls == 2:
                time.sleep(0.03)
                (pack / "a.safetensors").write_bytes(b"q" * 999)
                (pack / "b.safetensors").write_bytes(b"q" * 999)
                (pack / "config.json").write_bytes(b"q" * 999)
        return real(fd)

    monkeypatch.setattr(module.os, "fstat", changing)
    with pytest.raises(CheckpointError, match="changed while it was hashed"):
        Manifest.of(pack, cache=cache)


def test_cache_lies_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert digest_cache_path() == tmp_path / "flashnext_drv" / "digests.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert digest_cache_path() == tmp_path / "home" / ".cache" / "flashnext_drv" / "digests.json"
