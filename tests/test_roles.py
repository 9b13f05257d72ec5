"""
A new kind of picture, such as the one that a preference pair rejects, is one line of dataset.ROLES.

$ python -m pytest -q tests/test_roles.py    # some seconds
"""
import json
import shutil

import pytest
import torch
from PIL import Image

import cache
from library.data import dataset, index_file
from tests.harness import (add_item, assert_same, cached_files, index_of, is_one_line, load, make_cache, paint_picture,
                           refused, samples_of, save)

AREAS = ["--target_pixels", "64*64", "96*96"]

@pytest.fixture
def role(monkeypatch):
    """The line."""
    monkeypatch.setitem(dataset.ROLES, "rejected", dataset.Role(("rejected", "worse"), "rejected_latent"))

@pytest.fixture
def pairs(tmp_path, role):
    """cat has a rejected picture, of its target's shape and twice its size, and a mask; dog has neither."""
    data = add_item(tmp_path / "data", "cat", mask=paint_picture(mode="L"))
    save(paint_picture((128, 128), seed=9), data / "worse/cat.png")
    return add_item(data, "dog")

def test_its_pictures_are_found_encoded_at_the_target_s_size_and_read_back(tmp_path, pairs):
    """Each area has its own; as bytes of the same picture as a target are. The index knows them, and a sample without
    one has no such tensor."""
    result = make_cache(pairs, tmp_path / "c", *AREAS)
    assert result.status == 0 and "rejected: 1 of 2 pairs" in result.out, result.err
    same = add_item(tmp_path / "same", "cat")
    shutil.copy(pairs / "worse/cat.png", same / "target/cat.png")
    assert make_cache(same, tmp_path / "s", *AREAS).status == 0
    samples = index_of(tmp_path / "c")
    want = index_of(tmp_path / "s")["cat"]
    for encoding, wanted in zip(samples["cat"].encodings, want.encodings, strict=True):
        tensors = cache.load_latents(samples["cat"], encoding)
        assert torch.equal(tensors["rejected_latent"], cache.load_latents(want, wanted)["pixel_latent"])
        assert len(tensors["rejected_latent"]) == len(tensors["pixel_latent"]) == len(tensors["edit_mask"])
    assert samples["cat"].overlays == {role: str(pairs / place / "cat.png") for role, place in
                                     dict(mask="mask", rejected="worse").items()}
    assert not samples["dog"].overlays and "rejected_latent" not in load(tmp_path / "c", "dog")[0]

@pytest.mark.parametrize("role, name", [("target", "training_images"), ("control", "control_images")])
def test_a_folder_may_have_its_other_name(tmp_path, plus, role, name):
    data = add_item(tmp_path / "data", "cat", mask=paint_picture(mode="L"))
    before, = samples_of(plus, data)[0].values()
    (data / role).rename(data / name)
    sample, = samples_of(plus, data)[0].values()
    assert sample.encodings == before.encodings

def test_a_mask_is_in_the_key_as_it_always_was(tmp_path, plus, monkeypatch):
    """With another key, all pairs that have one would be encoded anew."""
    keys = []
    monkeypatch.setattr(cache, "content_key", lambda **fields: keys.append(fields) or "0" * 32)
    samples_of(plus, add_item(tmp_path / "data", "cat", mask=paint_picture(mode="L")))
    latents, = [fields for fields in keys if "vae" in fields]
    assert latents.keys() == {"version", "preprocessing", "pipeline", "dtype", "vae", "pictures", "sizes"}
    assert len(latents["pictures"]) == 3 and all(latents["pictures"])

def test_it_changes_the_keys_only_of_samples_that_have_it(tmp_path, pairs, plus, monkeypatch):
    """Nothing else is encoded again; another such picture is another file."""
    shutil.move(pairs / "worse", tmp_path / "worse")
    with monkeypatch.context() as without:
        without.delitem(dataset.ROLES, "rejected")
        assert make_cache(pairs, tmp_path / "c", *AREAS).status == 0
    before = cached_files(tmp_path / "c")
    shutil.move(tmp_path / "worse", pairs / "worse")
    assert make_cache(pairs, tmp_path / "c", *AREAS).status == 0
    after = cached_files(tmp_path / "c")
    new = after.keys() - before.keys()
    assert {path.parent.name for path in new} == {"latents"} and len(new) == 2
    assert all(after[path] == time for path, time in before.items())
    first = samples_of(plus, pairs)[0]["cat"].encodings[0]["file"]
    save(paint_picture((128, 128), seed=10), pairs / "worse/cat.png")
    assert samples_of(plus, pairs)[0]["cat"].encodings[0]["file"] != first

def test_a_line_of_a_manifest_names_it(tmp_path, pairs, plus):
    """The same sample as the folder's, to the key of its file."""
    row = dict(target="target/cat.png", control=["control/cat.png"], prompt="add a red border", mask="mask/cat.png",
               rejected="worse/cat.png")
    (pairs / "list.jsonl").write_text(json.dumps(row), "utf-8")
    sample, = samples_of(plus, pairs / "list.jsonl")[0].values()
    folder = samples_of(plus, pairs)[0]["cat"]
    assert (sample.overlays, sample.encodings) == (folder.overlays, folder.encodings)
    assert_same(cache.encode_latents(plus, sample, sample.encodings[0]),
                cache.encode_latents(plus, folder, folder.encodings[0]))

def test_what_cannot_be_right_is_one_line(tmp_path, pairs, plus):
    """One without a target, two of a name, another shape, a broken one; in a manifest one that is not there."""
    save(paint_picture(), pairs / "worse/bird.png")
    save(paint_picture((128, 64)), pairs / "worse/dog.png")
    problems = samples_of(plus, pairs)[1]
    assert len(problems) == 2 and is_one_line(problems[0], "worse/bird.png", "no target has this name")
    assert is_one_line(problems[1], "worse/dog.png: 128x64 for a target of 64x64")
    (pairs / "worse/bird.png").unlink()
    (pairs / "worse/dog.png").write_bytes(b"no picture")
    assert is_one_line(samples_of(plus, pairs)[1][0], "worse/dog.png")
    shutil.copy(pairs / "worse/cat.png", pairs / "worse/dog.png")
    Image.open(pairs / "worse/cat.png").save(pairs / "worse/cat.webp")
    assert is_one_line(samples_of(plus, pairs)[1][0], "worse/cat", "has the same name")
    row = dict(target="target/dog.png", control=[], prompt="go", rejected="worse/none.png")
    (pairs / "list.jsonl").write_text(json.dumps(row), "utf-8")
    assert is_one_line(samples_of(plus, pairs / "list.jsonl")[1][0], "none.png")

def test_an_index_is_compared_with_the_file_of_its_rejected_picture(tmp_path, pairs):
    """A file without it, or with another number of tokens, is no file of this sample; nor is a path that no hash
    belongs to."""
    assert make_cache(pairs, tmp_path / "c", "--target_pixels", "64*64").status == 0
    sample = index_of(tmp_path / "c")["cat"]
    tensors = cache.load_latents(sample, sample.encodings[0])
    for wrong in ({}, dict(rejected_latent=torch.zeros(3, 64)), dict(rejected_latent=torch.zeros(16))):
        with refused(sample.encodings[0]["file"].name, "rejected_latent"):
            rest = {name: tensor for name, tensor in tensors.items() if name != "rejected_latent"}
            index_file.check_tensors(rest | wrong, sample, sample.encodings[0])
    index, = (tmp_path / "c").glob("*.json")
    for wrong in ("", 5, ["x"], str(tmp_path / "other.png")):
        written = json.loads(index.read_text("utf-8"))
        written["samples"][0]["rejected"] = wrong
        other = index.with_name("other.json")
        other.write_text(json.dumps(written), "utf-8")
        with refused("other.json"):
            index_file.read_index(other)
