"""Checkpoints: the same state back, every damage noticed, nothing half-written, a disk that is really full."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopcore import checkpoint
from loopcore.checkpoint import Saved, checkpoints, load, load_model, prune, save
from loopcore.errors import CheckpointCorrupt, CheckpointNotWritten, InputError
from loopcore.specs import ModelSpec, TrainJob, TrainSpec
from loopcore.training import Training

SPEC = TrainSpec(model=ModelSpec(width=8, heads=2), seed=3)
STATE: dict[str, Any] = {
    "weights": {"a.b": torch.arange(6.0).reshape(2, 3), "empty": torch.zeros(0, 4)},
    "list": [torch.tensor(7), "text", None, True, 3, [1.5]],
    "floats": {"nan": math.nan, "up": math.inf, "down": -math.inf, "tenth": 0.1, "small": 5e-324},
    "nothing": {},
}


def same(first: Any, second: Any) -> bool:
    match first:
        case torch.Tensor():
            return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
        case dict():
            return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
        case list():
            return len(first) == len(second) and all(map(same, first, second))
        case float() if math.isnan(first):
            return math.isnan(second)
    return type(first) is type(second) and first == second


def everything_under(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    saved = save(tmp_path / "run", STATE, spec=SPEC, step=123)
    assert saved.path == tmp_path / "run" / "step-00000123"
    assert everything_under(tmp_path / "run") == [
        "step-00000123",
        "step-00000123/state.json",
        "step-00000123/tensors.safetensors",
    ]
    assert saved.bytes == sum(path.stat().st_size for path in saved.path.iterdir())
    loaded = load(saved.path, saved.digest)
    assert (loaded.spec, loaded.step, loaded.digest) == (SPEC, 123, saved.digest)
    assert same(STATE, loaded.state)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc.é ", max_size=3), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=40, deadline=None)
@given(state=st.dictionaries(st.text("abcxyz", min_size=1, max_size=4), json_values, max_size=4), step=st.integers(0, 10**9))
def test_any_nested_state_comes_back(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any], step: int) -> None:
    folder = tmp_path_factory.mktemp("run")
    saved = save(folder, state, spec=SPEC, step=step)
    assert same(state, load(saved.path, saved.digest).state)
    shutil.rmtree(folder)


def test_every_kind_of_tensor_comes_back(tmp_path: Path) -> None:
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
    state = {str(kind): torch.tensor([[0, 1], [1, 0]]).to(kind).T for kind in kinds}  # transposed: not contiguous
    assert same(state, load(save(tmp_path, state, spec=SPEC, step=0).path).state)


def test_the_digest_is_that_of_the_document_without_it(tmp_path: Path) -> None:
    """Worked out from the files alone, as another program would."""
    saved = save(tmp_path, STATE, spec=SPEC, step=1)
    document = json.loads((saved.path / "state.json").read_text())
    assert document.pop("digest") == saved.digest
    text = json.dumps(document, sort_keys=True, indent=1) + "\n"
    assert hashlib.sha256(text.encode()).hexdigest() == saved.digest
    tensors = (saved.path / "tensors.safetensors").read_bytes()
    assert document["files"] == {"tensors.safetensors": {"bytes": len(tensors), "sha256": hashlib.sha256(tensors).hexdigest()}}
    assert document["spec"] == SPEC.resolved()


def test_the_same_state_has_the_same_digest_and_another_has_not(tmp_path: Path) -> None:
    first = save(tmp_path / "a", {"x": torch.zeros(2), "y": 1}, spec=SPEC, step=1)
    again = save(tmp_path / "b", {"y": 1, "x": torch.zeros(2)}, spec=SPEC, step=1)
    assert first.digest == again.digest
    others = [
        save(tmp_path / "c", {"x": torch.ones(2), "y": 1}, spec=SPEC, step=1),
        save(tmp_path / "d", {"x": torch.zeros(2), "y": 2}, spec=SPEC, step=1),
        save(tmp_path / "e", {"x": torch.zeros(2), "y": 1}, spec=SPEC, step=2),
        save(tmp_path / "f", {"x": torch.zeros(2), "y": 1}, spec=TrainSpec(), step=1),
    ]
    assert len({first.digest, *(saved.digest for saved in others)}) == 5


def test_the_spec_of_a_job_is_kept_without_the_jobs_own_fields(tmp_path: Path) -> None:
    saved = save(tmp_path, {}, spec=TrainJob(seed=4, name="mine"), step=0)
    assert load(saved.path).spec == TrainSpec(seed=4)


@pytest.mark.parametrize("value", [object(), (1, 2), {1: 2}, {"a/b": 1}, {"__tensor__": "x"}, {"__float__": "nan"}])
def test_what_no_checkpoint_can_hold(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match="a state"):
        save(tmp_path / "run", {"value": value}, spec=SPEC, step=0)
    assert not (tmp_path / "run").exists()


# Damage


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return save(tmp_path / "run", STATE, spec=SPEC, step=5)


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors"])
def test_any_flipped_bit_is_noticed(saved: Saved, name: str) -> None:
    content = (saved.path / name).read_bytes()
    for place in range(0, len(content), max(1, len(content) // 97)):
        for bit in (0, 5, 7):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            (saved.path / name).write_bytes(damaged)
            with pytest.raises(CheckpointCorrupt, match="cannot be used"):
                load(saved.path)
    (saved.path / name).write_bytes(content)
    load(saved.path)


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors"])
@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_file_that_was_cut_off(saved: Saved, name: str, keep: int) -> None:
    content = (saved.path / name).read_bytes()
    (saved.path / name).write_bytes(content[:keep])
    with pytest.raises(CheckpointCorrupt, match=f"{saved.path} cannot be used: {name} .*; go on from an older one"):
        load(saved.path)
    (saved.path / name).write_bytes(content + b"\n")
    with pytest.raises(CheckpointCorrupt):
        load(saved.path)


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors"])
def test_a_file_that_is_missing(saved: Saved, name: str) -> None:
    (saved.path / name).unlink()
    with pytest.raises(CheckpointCorrupt, match=f"{name} cannot be read \\(No such file"):
        load(saved.path)


def test_a_checkpoint_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"state.json cannot be read"):
        load(tmp_path / "step-00000001")


def test_a_good_checkpoint_that_is_not_the_expected_one(saved: Saved) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"its digest is [0-9a-f]{12}\.\.\., expected 000000000000\.\.\."):
        load(saved.path, "0" * 64)


def rewritten(path: Path, **changes: Any) -> None:
    """A state.json whose own digest is right again after the change: what only the checks behind the digest can notice."""
    document = json.loads((path / "state.json").read_text()) | changes
    document.pop("digest")
    digest = hashlib.sha256((json.dumps(document, sort_keys=True, indent=1) + "\n").encode()).hexdigest()
    (path / "state.json").write_text(json.dumps(document | {"digest": digest}, sort_keys=True, indent=1) + "\n")


def test_a_format_of_another_program_or_version(saved: Saved) -> None:
    rewritten(saved.path, version=2)
    with pytest.raises(CheckpointCorrupt, match="its format has version 2, this program reads version 1"):
        load(saved.path)
    rewritten(saved.path, format="another")
    with pytest.raises(CheckpointCorrupt, match="no state of a loopcore checkpoint"):
        load(saved.path)
    for text in ("[]", "null", "{}", "\ufeff{}", "[" * 100_000):
        (saved.path / "state.json").write_text(text)
        with pytest.raises(CheckpointCorrupt):
            load(saved.path)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "tensors.safetensors/../../secret", "state.json"])
def test_names_that_lead_out_of_the_checkpoint(saved: Saved, name: str) -> None:
    secret = b"not to be read"
    (saved.path.parent / "secret").write_bytes(secret)
    entry = {"bytes": len(secret), "sha256": hashlib.sha256(secret).hexdigest()}
    rewritten(saved.path, files={name: entry})
    with pytest.raises(CheckpointCorrupt, match=r"expected tensors.safetensors alone"):
        load(saved.path)


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors"])
def test_links_that_lead_out_of_the_checkpoint(saved: Saved, name: str) -> None:
    moved = (saved.path / name).rename(saved.path.parent / "elsewhere")
    (saved.path / name).symlink_to(moved)
    with pytest.raises(CheckpointCorrupt, match=f"{name} cannot be read"):
        load(saved.path)


@pytest.mark.parametrize(
    "changes",
    [
        {"files": None},
        {"files": {"tensors.safetensors": {}}},
        {"files": {"tensors.safetensors": None}},
        {"spec": {"steps": 0}},
        {"spec": None},
        {"state": {"x": {"__tensor__": "not there"}}},
        {"state": {"x": {"__float__": "seven"}}},
        {"state": {"x": {"__tensor__": ["a"]}}},
    ],
)
def test_a_document_that_does_not_fit_together(saved: Saved, changes: dict[str, Any]) -> None:
    rewritten(saved.path, **changes)
    with pytest.raises(CheckpointCorrupt):
        load(saved.path)


def test_tensors_that_are_no_safetensors(saved: Saved) -> None:
    junk = b"\xff" * 64
    (saved.path / "tensors.safetensors").write_bytes(junk)
    rewritten(saved.path, files={"tensors.safetensors": {"bytes": 64, "sha256": hashlib.sha256(junk).hexdigest()}})
    with pytest.raises(CheckpointCorrupt, match="does not fit together"):
        load(saved.path)


# Publishing


def test_saving_a_step_again_changes_nothing(tmp_path: Path) -> None:
    first = save(tmp_path, STATE, spec=SPEC, step=5)
    before = {path: path.stat().st_mtime_ns for path in first.path.iterdir()}
    assert save(tmp_path, STATE, spec=SPEC, step=5) == first
    # A retry on another machine may differ in the last bit; what was announced stays.
    assert save(tmp_path, STATE | {"list": []}, spec=SPEC, step=5) == first
    assert {path: path.stat().st_mtime_ns for path in first.path.iterdir()} == before
    assert everything_under(tmp_path) == ["step-00000005", "step-00000005/state.json", "step-00000005/tensors.safetensors"]


@pytest.mark.parametrize("damage", ["empty folder", "cut off", "a file"])
def test_a_broken_checkpoint_is_replaced(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "step-00000005"
    if damage == "empty folder":
        path.mkdir()
    elif damage == "a file":
        path.write_text("in the way")
    else:
        (save(tmp_path, {}, spec=SPEC, step=5).path / "state.json").write_text("{")
    saved = save(tmp_path, STATE, spec=SPEC, step=5)
    assert same(STATE, load(path, saved.digest).state)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_a_directory_of_another_run(tmp_path: Path) -> None:
    first = save(tmp_path, STATE, spec=SPEC, step=5)
    with pytest.raises(CheckpointNotWritten, match="is a checkpoint of another run; give every run a directory of its own"):
        save(tmp_path, STATE, spec=TrainSpec(seed=99), step=5)
    assert load(first.path, first.digest).spec == SPEC
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_everything_is_on_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records the calls that matter, in their order: both files and their folder are synced, then renamed, then the parent."""
    calls: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recording_fsync(descriptor: int) -> None:
        calls.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name.split('-step')[0]}")
        fsync(descriptor)

    def recording_rename(self: Path, target: Path) -> Path:
        calls.append(f"rename to {Path(target).name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "rename", recording_rename)
    save(tmp_path / "run", {}, spec=SPEC, step=5)
    assert calls == ["sync tensors.safetensors", "sync state.json", "sync .writing", "rename to step-00000005", "sync run"]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB of its own, where this user may mount one."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_full(full_disk: Path) -> None:
    """64 KiB hold the first checkpoint and not the second; the first one stays, and of the second nothing does."""
    first = save(full_disk / "run", {"x": torch.zeros(1000)}, spec=SPEC, step=1)
    with pytest.raises(CheckpointNotWritten) as raised:
        save(full_disk / "run", {"x": torch.zeros(25_000)}, spec=SPEC, step=2)
    assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.__cause__.errno == errno.ENOSPC
    message = str(raised.value)
    assert "step-00000002" in message
    assert "No space left on device; free some space or choose another directory" in message
    free = shutil.disk_usage(full_disk).free
    assert 0 < free < 65_536
    assert load(first.path, first.digest).step == 1
    assert [path.name for path in (full_disk / "run").iterdir()] == ["step-00000001"]
    save(full_disk / "run", {"x": torch.zeros(2000)}, spec=SPEC, step=2)  # and there is room again for one that fits


def test_a_full_device_without_a_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full refuses every byte as a full disk does; here it takes the place of the second file."""
    write = checkpoint._write

    def onto_full(path: Path, content: bytes) -> None:
        if path.name == "state.json":
            path.symlink_to("/dev/full")
        write(path, content)

    monkeypatch.setattr(checkpoint, "_write", onto_full)
    with pytest.raises(CheckpointNotWritten, match=r"bytes free\): No space left on device") as raised:
        save(tmp_path / "run", STATE, spec=SPEC, step=1)
    assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.__cause__.errno == errno.ENOSPC
    assert everything_under(tmp_path / "run") == []


def test_a_place_that_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointNotWritten, match=r"Not a directory|File exists"):
        save(tmp_path / "file" / "run", STATE, spec=SPEC, step=1)


def test_an_interrupted_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_sync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "run", STATE, spec=SPEC, step=1)
    assert everything_under(tmp_path / "run") == []


# Keeping house


def test_newest_first_and_only_whole_ones(tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "not there") == []
    for step in (2, 10, 123_456_789_012):
        save(tmp_path, {}, spec=SPEC, step=step)
    (tmp_path / "step-00000011").write_text("no folder")
    (tmp_path / ".writing-step-00000012-abc").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-123456789012", "step-00000010", "step-00000002"]


def test_prune_keeps_the_newest_and_sweeps_what_the_dead_left(tmp_path: Path) -> None:
    paths = [save(tmp_path, {}, spec=SPEC, step=step).path for step in (1, 2, 3, 4)]
    old, young = tmp_path / ".writing-step-00000005-abc", tmp_path / ".removing-step-00000000-def"
    for path in (old, young):
        path.mkdir()
        (path / "state.json").write_text("half")
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    assert prune(tmp_path, keep=2) == [paths[1], paths[0]]
    assert sorted(path.name for path in tmp_path.iterdir()) == [young.name, paths[2].name, paths[3].name]
    assert prune(tmp_path, keep=2) == []
    with pytest.raises(InputError, match="expected to keep at least 1 checkpoint, got 0"):
        prune(tmp_path, keep=0)
    assert prune(tmp_path / "not there") == []


# Models


def test_a_model_is_built_from_its_checkpoint(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run = Training(SPEC)
    run.step()
    saved = save(tmp_path / "whole", run.state_dict(), spec=SPEC, step=1)
    alone = save(tmp_path / "alone", {"model": run.state_dict()["model"]}, spec=SPEC, step=1)
    assert alone.bytes < saved.bytes
    tokens_BN = run.task.random_batch(seed=0, split="held_out", index=0, size=4, length=5).tokens
    with torch.no_grad():
        logits_BNV = run.model(tokens_BN, 3)
    for found in (saved, alone):
        model, spec = load_model(found.path, expected_digest=found.digest)
        assert spec == SPEC
        assert not model.training
        assert torch.equal(model(tokens_BN, 3), logits_BNV)
        assert not model(tokens_BN, 3).requires_grad


def test_a_model_whose_corpus_is_elsewhere(tmp_path: Path) -> None:
    """Serving needs the vocabulary of a text, not the text."""
    content = {
        "task": {"kind": "text", "source": str(tmp_path / "corpus")},
        "contract": {"lengths": [8]},
        "optimizer": {"decay": "none"},
    }
    spec = TrainSpec.model_validate(content | {"model": {"width": 8, "heads": 2}})
    (tmp_path / "corpus").write_bytes(bytes(1000))
    saved = save(tmp_path / "run", {"model": Training(spec).state_dict()["model"]}, spec=spec, step=0)
    (tmp_path / "corpus").unlink()
    model, _ = load_model(saved.path)
    assert model(torch.tensor([[1, 2, 3]]), 1).shape == (1, 3, 256)


@pytest.mark.parametrize("weights", [{}, None, {"embedding_VD": torch.zeros(1)}])
def test_weights_that_are_not_the_specs(tmp_path: Path, weights: Any) -> None:
    saved = save(tmp_path, {"model": weights}, spec=SPEC, step=0)
    with pytest.raises(CheckpointCorrupt, match="its weights are not those of its spec"):
        load_model(saved.path)
    with pytest.raises(CheckpointCorrupt, match="its weights are not those of its spec"):
        load_model(save(tmp_path / "none", {}, spec=SPEC, step=0).path)
