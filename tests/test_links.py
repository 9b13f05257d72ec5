"""
Links and spellings: one rule for folders and tables. A link to a file is followed where it stays inside or leads to
the hub's blobs; one that leads nowhere, or to a folder, is called that; NFC and NFD meet.
"""
import json
import os
import shutil
import sys
import unicodedata
from pathlib import Path, PureWindowsPath

import pytest

from library.data import dataset
from library.files import stray_files
from training import run_folder
import predict
from tests.harness import add_item, is_one_line, paint_picture, refused, run_script, save

NFC, NFD = [unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD")]
ROW = dict(target="target/cat.png", control=["control/cat.png"], prompt="go")

def edited(image, monkeypatch):
    """What predict.py would edit by this command -> (samples, problems)."""
    monkeypatch.setattr(sys, "argv", ["predict.py", "--image", str(image), "--prompt", "go"])
    monkeypatch.setattr(dataset, "refuse_missing_input", lambda args: None)
    return dataset.read_samples(predict.read_flags())

# ---- links -----------------------------------------------------------------------------------------------------------

def to_blobs(data, blobs):
    """Each file of a folder becomes a link to one that is named by a hash."""
    blobs.mkdir(parents=True)
    for n, path in enumerate(sorted(filter(Path.is_file, data.rglob("*")))):
        shutil.move(path, blobs / f"{n:064x}")
        path.symlink_to(os.path.relpath(blobs / f"{n:064x}", path.parent))

@pytest.mark.parametrize("place", ["hub/datasets--me--pairs/snapshots/0a1b", "downloaded", "own/snapshots/main"])
@pytest.mark.parametrize("form", ["folders", "metadata.jsonl", "a table", "a table in a folder"])
def test_links_into_the_hubs_blobs_are_files_in_folders_and_tables(tmp_path, place, form):
    """In its cache, and in a folder that an older version has downloaded to; the table is a link itself."""
    data = tmp_path / place
    if form == "folders":
        add_item(data, "cat")
    else:
        for n, name in enumerate(("before/cat.png", "after/cat.png")):
            save(paint_picture(seed=n), data / name)
        row = dict(target="after/cat.png", control=["before/cat.png"], prompt="go")
        (data / ("rows.jsonl" if form == "a table" else "metadata.jsonl")).write_text(json.dumps(row), encoding="utf-8")
    to_blobs(data, data.parents[1] / "blobs" if "snapshots" in place else tmp_path / "hub/datasets--me--pairs/blobs")
    if form in ("folders", "metadata.jsonl"):
        for root in [data, data / "metadata.jsonl"][:2 - (form == "folders")]:
            samples, problems = dataset.read_dataset(root)
            assert len(samples) == 1 and not problems
            dataset.read_facts(samples[0])
    source = data / "rows.jsonl" if form == "a table" else data
    result = run_script("tools/import_data.py", source, tmp_path / "out")
    assert result.status == 0 and ": 1 samples" in result.out and "not used" not in result.out, result.err
    samples, problems = dataset.read_dataset(tmp_path / "out")
    assert len(samples) == 1 and not problems and not os.path.islink(samples[0].target)

def test_a_link_to_other_blobs_is_not_followed(data, tmp_path):
    """A folder of this name is not the hub's."""
    to_blobs(data, tmp_path / "mine/blobs")
    (data / "rows.jsonl").write_text(json.dumps(ROW), encoding="utf-8")
    assert all("leads out" in problem for problem in dataset.read_dataset(data)[1])
    [problem] = dataset.read_dataset(data / "rows.jsonl")[1]
    assert is_one_line(problem, "rows.jsonl:1", "control/cat.png", "stay inside it, also after links", "cp -rL")

def test_a_link_that_leads_nowhere_is_called_that(data, tmp_path, monkeypatch):
    """A picture, a caption, a folder, a manifest; in a dataset, to import, to edit."""
    why = "a link that leads nowhere"
    for file in ("control/cat.png", "target/cat.txt", "target/gone"):
        folder = shutil.copytree(data, tmp_path / file.replace("/", "-"))
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to("/nowhere/at/all")
        problems = dataset.read_dataset(folder)[1]
        problems += run_script("tools/import_data.py", folder, tmp_path / "out").errors
        assert len(problems) == 2 and all(is_one_line(problem, folder / file, why) for problem in problems), problems
    shutil.rmtree(data / "target")
    (data / "metadata.jsonl").symlink_to("nowhere")
    with refused(data / "metadata.jsonl", why):
        dataset.read_dataset(data)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.png").symlink_to("nowhere")
    samples, [problem] = edited(tmp_path / "in", monkeypatch)
    assert not samples and is_one_line(problem, why)

def test_a_run_folder_that_is_a_link_to_nowhere_is_called_that(tmp_path):
    """Not "File exists"; also where only a folder above it is one."""
    (tmp_path / "out").symlink_to(tmp_path / "unmounted")
    for folder in (tmp_path / "out", tmp_path / "out/run"):
        with refused(tmp_path / "out", "leads nowhere"):
            run_folder.check(folder)

# ---- spellings -------------------------------------------------------------------------------------------------------

@pytest.fixture(params=[(NFC, NFD), (NFD, NFC)], ids=["NFD on the disk", "NFC on the disk"])
def spelled(request, tmp_path):
    """A dataset whose files and folders are spelled in another form than its tables name them: (folder, a row)."""
    word, other = request.param
    data = add_item(tmp_path / "data", f"{other}/{other}", mask=paint_picture(mode="L"))
    row = dict(target=f"target/{word}/{word}.png", control=[f"control/{word}/{word}.png"], prompt="go",
               mask=f"mask/{word}/{word}.png")
    return data, row

def test_a_table_may_spell_names_in_another_form(spelled, tmp_path, monkeypatch):
    """metadata.jsonl, jobs.jsonl, --image and import_data.py's tables; a sample's name is NFC, as from a folder."""
    data, row = spelled
    (data / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
    samples, problems = dataset.read_dataset(data / "rows.jsonl")
    assert [sample.name for sample in samples] == [f"target/{NFC}/{NFC}"] and samples[0].mask and not problems
    dataset.read_facts(samples[0])
    job = dict(image=f"data/{row['control'][0]}", prompt="go")
    (tmp_path / "jobs.jsonl").write_text(json.dumps(job), encoding="utf-8")
    samples, problems = dataset.read_manifest(tmp_path / "jobs.jsonl", is_job=True)
    assert len(samples) == 1 and not problems and Path(samples[0].controls[0]).is_file()
    for image in (data / row["control"][0], data / Path(row["control"][0]).parent):
        samples, problems = edited(image, monkeypatch)
        assert len(samples) == 1 and not problems and Path(samples[0].controls[0]).is_file()
    (data / "rows.csv").write_text("target,control,mask,prompt\n" + ",".join(
        [row["target"], *row["control"], row["mask"], "go"]), encoding="utf-8")
    result = run_script("tools/import_data.py", data / "rows.csv", tmp_path / "out")
    assert result.status == 0 and ": 1 samples" in result.out and "not used" not in result.out, result.err

def test_of_two_names_in_different_forms_none_is_chosen(tmp_path):
    word = "caf\u00e9 \u00fc"
    forms = [unicodedata.normalize(form, word) for form in ("NFC", "NFD")]
    data = add_item(tmp_path / "data", forms[0])
    save(paint_picture(), data / f"target/{forms[1]}.png")
    problems = dataset.read_dataset(data)[1]
    assert any("has the same name; keep one" in problem for problem in problems)

# ---- separators and drives -------------------------------------------------------------------------------------------

def test_names_have_slashes_on_windows_and_another_drive_is_no_error(monkeypatch):
    """os.path.relpath writes backslashes there, and raises for a path on another drive, as os.path.commonpath does."""
    import ntpath
    monkeypatch.setattr(stray_files, "Path", PureWindowsPath)
    monkeypatch.setattr(stray_files.os, "path", ntpath)
    monkeypatch.setattr(ntpath, "abspath", ntpath.normpath)
    assert stray_files.seen_from(r"C:\data", r"C:\data\target\a.png") == "target/a.png"
    assert stray_files.seen_from(r"C:\data", r"D:\target\a.png") == "D:/target/a.png"
