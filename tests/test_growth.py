"""
What grows with the work grows as the work does: ten times the samples cost about ten times the CPU seconds. A square,
as in a loop over all pairs, would cost a hundred times. Nothing is encoded; the table is printed by -s.

$ python -m pytest -q -s tests/test_growth.py
"""
import gc
import os
import random
import time
from types import SimpleNamespace

import pytest

import cache
from library.data import dataset, index_file, stat_cache
import predict
import rope_patch
from tests.harness import DTYPE_NAME, TINY, encoder_flags, is_whole, paint_picture

FEW, MANY = 1000, 10_000
MOST = 30 # times the cost of a tenth: halfway between 10 and 100. plan_packs' sorted list, and caches, take some

def seconds(call):
    """CPU seconds of this process, which a busy machine may double: the least of five runs, or of fewer in a second.
    Without the garbage collector: now and then it walks through all that the imports have made."""
    found = []
    while len(found) < 5 and sum(found) < 1:
        gc.collect()
        gc.disable()
        t0 = time.process_time()
        call()
        found.append(time.process_time() - t0)
        gc.enable()
    return min(found)

def assert_near_linear(what, few, many, capsys, limit=None):
    few, many = seconds(few), seconds(many)
    with capsys.disabled():
        print(f"\n{what:40} {FEW:,}: {few:7.4f} s | {MANY:,}: {many:7.4f} s | {many / few:5.1f} times", end="")
    assert many < MOST * few and (limit is None or many < limit), what

@pytest.mark.parametrize("kind", ["two a pack", "many a pack", "one a pack, always room"])
def test_packs_are_planned_in_near_linear_time(kind, capsys):
    def lengths(n):
        rng = random.Random(0)
        if kind == "one a pack, always room":
            return [600] * (n - 1) + [1]
        return rng.choices(range(50, 4000) if kind == "many a pack" else range(400, 1000), k=n)
    few, many = [lambda n=n: rope_patch.plan_packs(dict(enumerate(lengths(n))), 1000) for n in (FEW, MANY)]
    assert_near_linear(f"plan_packs, {kind}", few, many, capsys, limit=0.5) # 0.05 s on an idle machine

def link_dataset(root, n):
    """n pairs, whose files are all links to three: made in a second, and as many names for the disk and for us."""
    for folder in ("target", "control"):
        (root / folder).mkdir(parents=True)
        paint_picture((32, 32), seed=len(folder)).save(root / f"{folder}.png")
        for i in range(n):
            os.link(root / f"{folder}.png", root / folder / f"{i:06}.png")
    (root / "caption").write_text("add a red border", "utf-8")
    for i in range(n):
        os.link(root / "caption", root / f"target/{i:06}.txt")
    for name in ("target.png", "control.png", "caption"):
        (root / name).unlink()

@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """{number of pairs: SimpleNamespace(again: what a start does before it encodes, samples, index)}, begun once."""
    pipe, starts = cache.load_pipeline(TINY), {}
    geometry = dict(target_pixels=["native"], control_pixels="native", upscale=True)
    for n in (FEW, MANY):
        root = tmp_path_factory.mktemp("growth")
        link_dataset(root / "data", n)
        flags, index = encoder_flags(dtype=DTYPE_NAME, cache_dir=str(root / "c")), root / "c/index.json"

        def begin(data=root / "data", flags=flags, index=index):
            samples, problems = dataset.read_dataset(data)
            samples, more = cache.plan_samples(pipe, samples, lambda s: [(s.prompts[0], True)], geometry, flags)
            assert not problems + more
            index_file.write_index(index, samples, geometry, {})
            return samples
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stat_cache, "SETTLED", -10**15) # the links are new
            samples = begin()
        assert len(samples) == n
        starts[n] = SimpleNamespace(again=begin, samples=samples, index=index)
    return starts

def test_a_second_start_opens_no_picture_and_is_near_linear(starts, monkeypatch, capsys):
    def refuse(path, *_):
        raise AssertionError(f"{path}: read again")
    for name in ("open_image", "file_hash"):
        monkeypatch.setattr(dataset, name, refuse)
    before = starts[MANY].index.stat().st_mtime_ns
    assert_near_linear("second start", starts[FEW].again, starts[MANY].again, capsys)
    assert starts[MANY].index.stat().st_mtime_ns == before

def test_an_index_is_written_and_read_in_near_linear_time(starts, tmp_path, capsys):
    def write(n):
        samples, old = starts[n].samples, starts[n].index
        new = old.with_name("new.json")
        new.unlink(missing_ok=True)
        geometry = dict(target_pixels=["native"], control_pixels="native", upscale=True)
        index_file.write_index(new, samples, geometry, {})
    assert_near_linear("write_index", lambda: write(FEW), lambda: write(MANY), capsys)
    few, many = [lambda n=n: index_file.read_index(starts[n].index) for n in (FEW, MANY)]
    assert_near_linear("read_index", few, many, capsys)
    assert [s.texts for s in index_file.read_index(starts[FEW].index)[0]] == [s.texts for s in starts[FEW].samples]
    assert len(starts[FEW].index.read_text("utf-8").splitlines()) == FEW + 1 # a line a sample, behind what is of all

def test_finished_pictures_are_found_in_near_linear_time_without_their_pixels(tmp_path, capsys):
    predict.save_png(paint_picture((1024, 1024)), tmp_path / "a.png", "key")
    paths = [tmp_path / f"{i}.png" for i in range(MANY)]
    for path in paths:
        os.link(tmp_path / "a.png", path)
    assert all(is_whole(path, "key") for path in paths[:10]) and not is_whole(paths[0], "other")
    few, many = [lambda n=n: [is_whole(path, "key") for path in paths[:n]] for n in (FEW, MANY)]
    assert_near_linear("finished", few, many, capsys, limit=10) # 1 s; with the pixels 200
