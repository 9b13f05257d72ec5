"""
Disks that lack something (tests/places/bad_disk.py): what can be done in a weaker way is done, with one line and the
same numbers; what cannot is an error that names it, before anything slow.

$ pytest tests/test_disks.py --kills 200 -s     # kills in a bucket: 3 minutes
"""
import errno
import os
import re
import shutil
from types import SimpleNamespace

import pytest
from diffusers import ModelMixin
from PIL import Image
from safetensors import SafetensorError

import cache
import common
from library.lora import lora_paths
from training import resume, run_folder
import predict
from tests.harness import (add_item, assert_bitwise, assert_checkpoints_whole, assert_same_run, damage_tensors,
                           is_one_line, killed_runs, lora_of, paint_picture, refused, run_script, save, steps_of,
                           works)
from tests.places.bad_disk import BUCKET, bad_disk, on

def count(line, result):
    return sum(line in text for text in (result.out + result.err).splitlines())

@pytest.fixture
def no_models(monkeypatch):
    """The test fails if a model is loaded: all that is refused is refused before."""
    monkeypatch.setattr(cache, "load_part", lambda *_: pytest.fail("a model was loaded"))

# ---- a weaker way ----------------------------------------------------------------------------------------------------

LINES = dict(fsync="no fsync on this disk", flock="no locks on this disk")

@pytest.mark.parametrize("faults", [
    BUCKET, dict(fsync=errno.EINVAL, link=errno.EPERM), dict(flock=errno.ENOLCK, rename_folder=errno.EPERM),
    dict(fsync_folder=errno.EBADF)], ids=str)
def test_what_a_disk_lacks_changes_no_number(tmp_path, small, unbroken, faults):
    """Of a training that is resumed twice; each line is said once a start."""
    run = tmp_path / "run"
    with bad_disk(tmp_path, faults):
        for steps in (3, 5, 12):
            result = works("train.py", *small.flags, "--out_dir", run, "--max_steps", steps, "--save_every", 1,
                           *["--resume"] * (steps > 3))
            for kind, line in LINES.items():
                assert count(line, result) == (kind in str(faults)), result.err
            assert not (run / ".lock").exists() or not (run / ".lock").read_bytes()
    assert_same_run(run, unbroken.out_dir)
    assert steps_of(run) == [11, 12] and sorted(path.name for path in run.glob("checkpoint*")) == [
        "checkpoint-000011", "checkpoint-000012"]

def test_the_whole_road_in_a_bucket(tmp_path, small):
    """Cache, training, pictures, converting, pruning: the bits are those of a good disk."""
    made, pixels = [], []
    for name, faults in (("good", {}), ("bucket", "bucket")):
        place = tmp_path / name
        calls = [["cache.py", *small.cache_flags, "--cache_dir", place / "c"],
                 ["train.py", *small.cache_flags, "--cache_dir", place / "c", "--out_dir", place / "run", "--max_steps",
                  2, "--lora_rank", 2],
                 ["predict.py", "--jobs", small.folder / "data", "--lora", place / "run", "--cache_dir", place / "c",
                  "--out_dir", place / "o", "--num_inference_steps", 2, "--true_cfg_scale", 1],
                 ["tools/convert_lora.py", place / "run", "--to", "comfyui", "--out", place / "x.safetensors"],
                 ["tools/prune.py", place / "c", "--delete"]]
        with bad_disk(place, faults):
            for call in calls:
                result = run_script(*call)
                assert result.status == 0 and "Traceback" not in result.err, result.err
        made.append({path.relative_to(place): path.read_bytes() for path in place.glob("c/*/*")})
        pixels.append({path.name: Image.open(path).tobytes() for path in place.glob("o/*.png")})
    assert made[0] == made[1] and pixels[0] == pixels[1] and len(pixels[0]) == 6
    assert_bitwise(lora_of(tmp_path / "bucket/run"), lora_of(tmp_path / "good/run"))

def test_training_killed_in_a_bucket_ends_as_the_unbroken_run(tmp_path, small, start, unbroken):
    """As on a good disk, and what had a checkpoint after a kill is not trained again."""
    for _, process, status, _ in killed_runs(start, small, unbroken, tmp_path, 1, on(tmp_path, "bucket")):
        assert status == -9, process.output()

# ---- checkpoints without a rename ------------------------------------------------------------------------------------

def test_a_folder_without_its_lora_is_no_checkpoint(tmp_path, unbroken):
    """Nobody takes it for one, --resume clears it away, and it does not count for --keep."""
    run = shutil.copytree(unbroken.out_dir, tmp_path / "run")
    for name in ("DONE", predict.LORA_FILE, f"checkpoint-000012/{predict.LORA_FILE}"):
        (run / name).unlink()
    (run / "checkpoint-000012/.tmp-0123").touch()
    assert steps_of(run) == [10] and lora_paths.find_lora(run).parent.name == "checkpoint-000010"
    with refused("no LoRA", "half-written checkpoint") as e:
        lora_paths.find_lora(run / "checkpoint-000012")
    assert resume.OPTIMIZER_FILE not in str(e.value) # which is none
    assert resume.find_checkpoint(run, SimpleNamespace(optimizer="")).info["step"] == 10
    run_folder.clean_folder(run, 10)
    assert [path.name for path in run.glob("checkpoint*")] == ["checkpoint-000010"]

def test_a_damaged_checkpoint_is_put_aside_file_by_file(tmp_path, unbroken):
    run = shutil.copytree(unbroken.out_dir, tmp_path / "run")
    damage_tensors(run / "checkpoint-000012" / resume.OPTIMIZER_FILE)
    files = {path.name: path.read_bytes() for path in (run / "checkpoint-000012").iterdir()}
    with bad_disk(tmp_path, dict(rename_folder=errno.ENOSYS)):
        run_folder.clean_folder(run, 10)
    aside, = run.glob("checkpoint-000012.damaged-*")
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == files and steps_of(run) == [10]
    damage_tensors(run / "checkpoint-000010" / resume.OPTIMIZER_FILE)
    with bad_disk(tmp_path, dict(rename=errno.EBUSY)), refused(run / "checkpoint-000010", "moved aside"):
        run_folder.clean_folder(run, 8)

@pytest.mark.parametrize("faults", [dict(rmdir=errno.ENOTEMPTY), dict(unlink=errno.EBUSY)], ids=str)
def test_a_checkpoint_that_cannot_be_deleted_is_one_warning_and_goes_later(tmp_path, small, monkeypatch, faults):
    """NFS keeps what somebody reads. What is left over is no half checkpoint, and the next one deletes it."""
    run, flags = tmp_path / "run", [*small.flags, "--out_dir", tmp_path / "run", "--save_every", 1, "--keep", 1]
    real = run_folder.remove_old

    def refuse(folder):
        with bad_disk(run, faults):
            real(folder)
    monkeypatch.setattr(run_folder, "remove_old", refuse)
    result = run_script("train.py", *flags, "--max_steps", 3)
    assert result.status == 0 and count("an old checkpoint-... cannot be deleted", result) == 1, result.err
    assert len(list(run.glob("checkpoint-*"))) == 3 and steps_of(run) == ([3] if "rmdir" in faults else [1, 2, 3])
    assert_checkpoints_whole(run)
    monkeypatch.setattr(run_folder, "remove_old", real)
    assert run_script("train.py", *flags, "--max_steps", 4, "--resume").status == 0
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-000004"]

# ---- what is needed --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EINVAL], ids=os.strerror)
@pytest.mark.parametrize("kind, words", dict(rename="cannot rename files", append="cannot append to files",
                                             unlink="cannot delete files").items())
def test_an_ability_that_is_needed_is_named_before_anything_slow(tmp_path, small, no_models, kind, words, number):
    run = tmp_path / "run"
    with bad_disk(tmp_path, {kind: number}):
        result = run_script("train.py", *small.flags, "--out_dir", run)
        assert result.status == 1 and is_one_line(result.errors[0], run, words, os.strerror(number)), result.err
        assert not re.search("permission|space", result.errors[0].replace(os.strerror(number), "")), result.errors
        if kind != "append": # of which a cache and pictures have no need
            for script, *flags in (["cache.py", *small.cache_flags], ["predict.py", "--jobs", small.folder / "data"]):
                result = run_script(script, *flags, "--cache_dir", tmp_path / "c")
                assert result.status == 1 and is_one_line(result.errors[0], tmp_path / "c", words), result.err

def test_the_reason_decides_the_remedy(tmp_path):
    for number, remedy in ((errno.ENOSPC, "space"), (errno.EDQUOT, "space"), (errno.EROFS, "another folder"),
                           (errno.EACCES, "permissions"), (errno.EIO, "another disk")):
        with bad_disk(tmp_path, dict(write=number)), refused(tmp_path, os.strerror(number), remedy):
            common.write_file(tmp_path / "a", b"x")
    with bad_disk(tmp_path, dict(name=errno.ENAMETOOLONG)), refused("shorter names"):
        common.write_file(tmp_path / ("a" * 200), b"x")
    for number in (errno.EIO, errno.ENOSPC, errno.EEXIST): # no disk says so that it has no fsync
        for kind in ("rename", "fsync", "fsync_folder"): # the place is the user's, not a file of ours beside it
            with bad_disk(tmp_path, {kind: number}), refused(f"error: {tmp_path / 'a'}: ", os.strerror(number)):
                common.write_file(tmp_path / "a", b"x")

def test_room_for_a_checkpoint_is_asked_before_anything_slow(tmp_path, small, no_models, monkeypatch, capsys):
    """By the disk's own numbers, if it has any. Less than --keep needs is a warning."""
    usage = lambda free: monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1e12, free=free))
    usage(1000)
    result = run_script("train.py", *small.flags, "--out_dir", tmp_path / "run")
    assert result.status == 1 and is_one_line(result.errors[0], tmp_path / "run", "1e-06 GB", "space"), result.err
    common.warn_once.cache_clear()
    for free, fit in ((12 * 10**6 + 10, 1), (30 * 10**6, 2)): # no error
        usage(free)
        run_folder.check_room(tmp_path, 10**6, 2)
        assert f"room for {fit} more checkpoint" in capsys.readouterr().err
    run_folder.check_room(tmp_path, 10**6, 1)
    assert not capsys.readouterr().err
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=0, free=0))
    run_folder.check_room(tmp_path, 10**6, 2)

@pytest.mark.parametrize("faults", ["bucket", dict(rename_full=errno.EIO), dict(rename_folder=errno.EEXIST)], ids=str)
def test_a_tool_that_renames_a_folder_at_its_end_tries_that_first(tmp_path, small, two_loras, no_models, faults):
    """With a folder that has something in it, however the disk refuses, and before any picture is looked at."""
    with bad_disk(tmp_path, faults):
        for call in (["tools/convert_lora.py", two_loras[0], "--to", "model", "--out", tmp_path / "x"],
                     ["tools/import_data.py", small.folder / "data", tmp_path / "x"],
                     ["tools/doctor.py", small.folder / "data", "--out", tmp_path / "o", "--align", tmp_path / "x"]):
            result = run_script(*call)
            line = result.errors[-1]
            assert result.status == 1 and is_one_line(line, tmp_path / "x", "cannot rename folders"), result.err
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob(".*")) and not (tmp_path / "o/report.json").exists()

def test_what_a_tool_has_made_counts_though_its_empty_folder_stays(tmp_path, small):
    """NFS keeps the folder of a file that somebody reads."""
    with bad_disk(tmp_path, dict(rmdir=errno.ENOTEMPTY)):
        result = run_script("tools/import_data.py", small.folder / "data", tmp_path / "x")
    assert result.status == 0 and (tmp_path / "x/target").is_dir(), result.err

def test_a_model_that_does_not_fit_on_the_disk_needs_space(tmp_path, two_loras, monkeypatch):
    """safetensors has its own errors, with the system's number in their words."""
    def full(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    monkeypatch.setattr(ModelMixin, "save_pretrained", full)
    result = run_script("tools/convert_lora.py", two_loras[0], "--to", "model", "--out", tmp_path / "x")
    assert result.status == 1 and is_one_line(result.errors[-1], tmp_path / "x", "No space", "free some"), result.err

@pytest.mark.parametrize("number", [errno.EBUSY, errno.EPERM], ids=os.strerror)
def test_an_open_file_need_not_be_deleted(tmp_path, capsys, number):
    """A run has its lock where only closed files can be deleted."""
    common.warn_once.cache_clear()
    with bad_disk(tmp_path, dict(unlink_open=number)):
        folder, lock = run_folder.lock(SimpleNamespace(out_dir="x", resume=False), tmp_path / "run", "a")
        assert lock.is_locked
    lock.release()
    assert os.listdir(folder) in ([".lock"], []) and not capsys.readouterr().err

def test_what_a_dead_process_has_left_may_stay(tmp_path, unbroken, capsys):
    """--resume warns of temporary files that it cannot delete; what marks a run as finished must go."""
    run = shutil.copytree(unbroken.out_dir, tmp_path / "run")
    for name in (".tmp-abc", ".tmp-0123456789/a"):
        save(paint_picture(), run / f"{name}.png")
        with bad_disk(next(run.glob(".tmp-*")), dict(unlink=errno.EBUSY)):
            common.warn_once.cache_clear()
            run_folder.clean_folder(run, 12)
        assert f"{run}: an old .tmp-... cannot be deleted" in capsys.readouterr().err
        run_folder.clean_folder(run, 12)
        assert not list(run.glob(".tmp-*"))
    for name in ("DONE", predict.LORA_FILE):
        (run / name).touch()
        with bad_disk(run / name, dict(unlink=errno.EBUSY)), refused(run / name, "cannot be deleted", "run again"):
            run_folder.clean_folder(run, 12)

def test_what_prune_cannot_delete_is_one_line(tmp_path, small):
    folder = shutil.copytree(small.cache, tmp_path / "c", ignore=shutil.ignore_patterns(".planned-*"))
    (folder / "tiny-data.json").unlink()
    with bad_disk(folder, dict(write=errno.EROFS)):
        result = run_script("tools/prune.py", folder, "--delete")
    assert result.status == 1 and is_one_line(result.errors[0], folder, "cannot be deleted"), result.err

# ---- a cache that cannot be written ----------------------------------------------------------------------------------

@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES], ids=os.strerror)
def test_a_complete_cache_on_a_read_only_disk_serves(tmp_path, small, number):
    """Also with an index of another place, whose paths are others."""
    folder = shutil.copytree(small.cache, tmp_path / "c")
    (folder / "tiny-data.json").write_bytes((folder / "tiny-data.json").read_bytes() + b" ")
    flags = [*small.cache_flags, "--cache_dir", folder]
    with bad_disk(folder, dict(write=number)):
        for script, *more in (["cache.py"], ["cache.py", "--verify"],
                              ["train.py", "--max_steps", 1, "--out_dir", tmp_path / "run"]):
            result = run_script(script, *flags, *more)
            assert result.status == 0 and count("serves only if it is complete", result) == 1, result.err
        add_item(tmp_path / "more", "a")
        result = run_script("cache.py", "--data", tmp_path / "more", *flags[2:])
    line = result.errors[-1]
    assert result.status == 1 and is_one_line(line, f"--cache_dir {folder}", "lacks 2 of 2", "tiny-data.json"), line
    file = min(folder.glob("latents/*"))
    damage_tensors(file)
    with bad_disk(tmp_path, dict(write=number)):
        result = run_script("cache.py", *flags, "--verify")
        assert result.status == 1 and is_one_line(result.errors[0], file, "--cache_dir"), result.err
        result = run_script("cache.py", *small.cache_flags, "--cache_dir", tmp_path / "new")
    assert result.status == 1 and is_one_line(result.errors[0], tmp_path / "new", os.strerror(number)), result.err

def test_pictures_are_drawn_from_a_cache_on_a_read_only_disk(tmp_path):
    photo = save(paint_picture(), tmp_path / "in/a.png")
    flags = ["--image", photo, "--prompt", "x", "--num_inference_steps", 2, "--cache_dir", tmp_path / "c", "--lora="]
    assert run_script("predict.py", *flags, "--out", tmp_path / "o/a.png").status == 0
    with bad_disk(tmp_path / "c", dict(write=errno.EROFS)):
        result = run_script("predict.py", *flags, "--seed", 1, "--out", tmp_path / "o/b.png")
    assert result.status == 0 and count("serves only if it is complete", result) == 1, result.err
    assert (tmp_path / "o/b.png").exists()
