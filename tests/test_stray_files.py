"""
What a NAS, a system or a program leaves in a folder is neither trained nor an error, wherever a folder is read; what
git has not fetched is named.
"""
import json
import shutil

import pytest

import common
from library.data import dataset
from library.files import stray_files
from tests.harness import add_item, is_one_line, paint_picture, run_script, save

# {who: folders, each of which holds a thumbnail or a deleted picture; files}
LEFT = {
    "Synology": ("@eaDir #recycle #snapshot @tmp", "SYNOFILE_THUMB_M.png cat.png@SynoResource cat.png@SynoEAStream"),
    "QNAP": (".@__thumb @Recycle @Recently-Snapshot", ""),
    "Samba": ("@GMT-2024.01.01-12.00.00", ""),
    "Windows": ("$RECYCLE.BIN RECYCLER",
                "Thumbs.db ehthumbs.db DESKTOP.INI ~$cat.png cat.png:Zone.Identifier"),
    "macOS": (".AppleDouble .Trashes .fseventsd .Spotlight-V100 __MACOSX", ".DS_Store ._cat.png ._cat.txt Icon\r"),
    "Linux": ("lost+found .Trash-1000 .thumbnails", ".directory .nfs0001"),
    "programs that keep folders equal": (".stfolder .stversions .dropbox.cache .tmp.drivedownload .~tmp~ .sync "
                                         "_gsdata_",
                                         ".syncthing.cat.png.tmp .owncloudsync.log ._sync_1.db ~syncthing~a.png.tmp"),
    "programs for photographs": (".BridgeCache .picasaoriginals Previews.lrdata", ".picasa.ini cat.xmp"),
    "programmers": (".git __pycache__ .ipynb_checkpoints", ".cat.png.swp .#cat.txt")}
# what a person may call things
MINE = "backup recycler Recycler found.001 Recycle Originals thumbs trash cat@home #1 (copy)".split()

def put_left(folder, who):
    """It leaves these in a folder."""
    folders, files = [names.split(" ") if names else [] for names in LEFT[who]]
    for name in folders:
        save(paint_picture(seed=7), folder / name / "cat.png")
        save(paint_picture(seed=8), folder / name / "sub/cat_1.png")
        (folder / name / "cat.txt").write_text("a thumbnail", encoding="utf-8")
    for name in files:
        save(paint_picture(seed=9), folder / name, format="PNG")

def summary(samples):
    """What is trained: names, prompts and the bytes of each picture."""
    rows = []
    for sample in samples:
        files = [*dataset.pictures_of(sample), *filter(None, [sample.mask])]
        rows.append((sample.name, sample.prompts, [common.file_hash(path) for path in files]))
    return sorted(rows)

def pairs(folder, number=4):
    for n in range(number):
        add_item(folder, f"sub/pair{n}" if n % 2 else f"pair{n}")
    return folder

@pytest.mark.parametrize("who", LEFT)
def test_what_systems_leave_in_a_dataset_is_not_trained(tmp_path, monkeypatch, who):
    """Beside target/ too, where an unknown folder is an error, and in each folder below. A person's own names are."""
    data = pairs(tmp_path / "data")
    for name in MINE:
        add_item(data, f"{name}/{name}")
    want = summary(dataset.read_dataset(data)[0])
    for folder in (data, data / "target", data / "control/sub"):
        put_left(folder, who)
    monkeypatch.setattr(common, "warn_once", pytest.fail)
    samples, problems = dataset.read_dataset(data)
    assert summary(samples) == want and len(want) == 4 + len(MINE) and not problems

@pytest.mark.parametrize("who", LEFT)
def test_import_data_takes_no_thumbnail_and_no_bin_for_a_pair(tmp_path, who):
    """Found by names or named, with two halves, which share no picture."""
    source = pairs(tmp_path / "data")
    for folder in (source, source / "target", source / "control/sub"):
        put_left(folder, who)
    named = ["--target", source / "target", "--control", source / "control"]
    for n, words in enumerate(([source, tmp_path / "out0"], [tmp_path / "out1", *named])):
        result = run_script("tools/import_data.py", *words, "--hold_out", 2)
        assert result.status == 0 and "not used" not in result.out + result.err, result.err
        halves = [summary(dataset.read_dataset(tmp_path / f"out{n}{end}")[0]) for end in ("", "_val")]
        assert list(map(len, halves)) == [2, 2]
        first, second = [{content for _, _, files in half for content in files} for half in halves]
        assert first.isdisjoint(second)

def test_junk_beside_a_tables_pictures_a_table_and_a_configuration_is_passed_over(tmp_path):
    """AppleDouble files have the name of a table."""
    source = tmp_path / "source"
    for name in "ab":
        save(paint_picture(seed=ord(name)), source / "images" / f"{name}.png")
    row = json.dumps(dict(target="images/a.png", control="images/b.png", prompt="go"))
    (source / "metadata.jsonl").write_text(row, encoding="utf-8")
    for name in ("._metadata.jsonl", "._train.parquet", "._x.safetensors"):
        (source / name).write_bytes(b"\0\5\x16\7")
    for who in LEFT:
        put_left(source / "images", who)
    result = run_script("tools/import_data.py", source, tmp_path / "out")
    assert result.status == 0 and ": 1 samples" in result.out, result.err
    (source / "set.toml").write_bytes(b'[[datasets]]\nimage_directory = "images"\ncontrol_directory = "images2"')
    shutil.copytree(source / "images", source / "images2")
    result = run_script("tools/import_data.py", source / "set.toml", tmp_path / "configured", "--prompt", "go")
    assert result.status == 0 and ": 2 samples" in result.out, result.err

def test_a_folder_of_pictures_to_edit_holds_no_junk(tmp_path):
    """Nor is one that a person found in a bin refused: only what lies below it counts."""
    folder = tmp_path / "#recycle/@eaDir/mine"
    save(paint_picture(), folder / "a.png")
    for who in LEFT:
        put_left(folder, who)
    flags = type("Flags", (), dict(jobs=None, image=[folder], prompt="go", out_dir=tmp_path / "out"))
    samples, problems = dataset.read_samples(flags)
    assert [sample.name for sample in samples] == ["a"] and not problems

POINTERS = ("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            "/annex/objects/MD5E-s1--1.png\n")

@pytest.mark.parametrize("pointer", POINTERS)
@pytest.mark.parametrize("file", ["target/cat.png", "control/cat.png", "target/cat.txt", "metadata.jsonl", "rows.csv"])
def test_a_pointer_of_git_is_neither_a_picture_nor_a_prompt(data, tmp_path, file, pointer):
    """One line says what it is, and how to fetch the file."""
    (data / file).write_text(pointer, encoding="utf-8")
    if file == "rows.csv":
        [problem] = run_script("tools/import_data.py", data / file, tmp_path / "out").errors
    elif file == "metadata.jsonl":
        with pytest.raises(common.InputError) as e:
            dataset.read_dataset(data / file)
        problem = str(e.value)
    else:
        samples, problems = dataset.read_dataset(data)
        for sample in samples:
            with common.collect_errors(problems):
                dataset.read_facts(sample)
        [problem] = problems
    assert is_one_line(problem, data / file, "a pointer of git", "git lfs pull")

def test_the_table_knows_any_case_and_no_name_of_a_person():
    """A dot alone begins what is junk, but for the folders . and .."""
    for name in ("THUMBS.DB", "@EADIR", "$Recycle.Bin", "System Volume Information", "Icon\r", "LOST+FOUND", ".x"):
        assert stray_files.is_junk(name), name
    for name in (*MINE, ".", "..", "cat.png", "icon", "Icon.png", "thumbs.png", "recycler.png", "@cat.png", "#2.png",
                 "snapshot", "tmp", "Thumbs.db.png"):
        assert not stray_files.is_junk(name), name
