"""
Encoded samples on disk: they are what the stock pipeline computes, they change when and only when their sources do, and
no damage to them, to their index or to the model's folder goes unnoticed.
"""
import errno
import itertools
import os
import pickle
import re
import shutil
import sys
import time
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from PIL import Image
from transformers import Qwen2VLProcessor

import cache
import common
from library.data import dataset as dataset_, index_file, picture_files, stat_cache
from library.data.dataset import picture_facts, read_dataset, run_name
from library.files import tensor_files
import predict
from tests.harness import (DEVICE, DTYPE, DTYPE_NAME, NATIVE, ON_DEVICE, TINY, add_item, as_v1, assert_same,
                           cached_files, change_weight, copy_model, damage_tensors, encode, encoder_flags, flip,
                           index_of, is_one_line, load, make_cache, paint_picture, refused, rel, run_script,
                           samples_of, save, show, start_ranks, stock_area, train, until, works)

# ---- encoding equals the stock pipeline ------------------------------------------------------------------------------

def given_by_stock(pipe, **call):
    """What the stock pipeline hands to the transformer in its first step: keyword arguments of the call."""
    processor = object.__new__(Qwen2VLProcessor) # its constructor needs torchvision, its call does so for videos only
    processor.tokenizer, processor.image_processor = pipe.tokenizer, pipe.processor.image_processor
    for name in ("image", "video"):
        setattr(processor, f"{name}_token", f"<|{name}_pad|>")
        setattr(processor, f"{name}_token_id", pipe.tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>"))
    given, transformer = [], predict.load_transformer(TINY, DTYPE_NAME).to(DEVICE)
    transformer.forward = lambda **kwargs: given.append(kwargs) or 1 / 0
    with pytest.raises(ZeroDivisionError), stock_area(128 * 128): # so that it takes milliseconds
        type(pipe)(**pipe.components | dict(transformer=transformer, processor=processor))(
            **call, num_inference_steps=2, true_cfg_scale=1.0, output_type="latent")
    return SimpleNamespace(**given[0])

@pytest.mark.parametrize("family, sizes", [
    ("Plus", [(96, 64), (100, 75)]), # enlarged
    ("Plus", [(64, 96), (257, 301), (640, 64), (48, 80)]), # shrunk, long, one side rounded up; three controls
    ("v1", [(96, 64), (100, 75)]), ("v1", [(64, 64), (64, 301)])], ids=str)
@pytest.mark.parametrize("prompt", ["turn the {red} circle blue", "", "\u96ea \U0001f431\n 100% <b>"], ids=ascii)
def test_samples_are_encoded_as_the_stock_pipeline_encodes_them(tmp_path, pipes, family, sizes, prompt):
    pipe, data = pipes[family], add_item(tmp_path, "cat", sizes)
    sample = samples_of(pipe, data, lambda s: [(prompt, True)], control_pixels=128 * 128)[0]["cat"]
    got, name = encode(pipe, sample, prompt), "prompt_embed" if prompt else "empty_prompt_embed"
    image, (width, height) = [Image.open(c) for c in sample.controls][0 if family == "v1" else slice(None)], sizes[0]
    stock = given_by_stock(pipe, image=image, prompt=prompt, width=width, height=height)
    assert torch.equal(got["control_latent"], stock.hidden_states[0, len(got["pixel_latent"]):])
    assert torch.equal(got[name], stock.encoder_hidden_states[0])
    assert got[name + "s_mask"].all() and stock.encoder_hidden_states_mask is None
    assert list(map(tuple, got["img_shapes"].tolist())) == stock.img_shapes[0]
    assert sample.texts[prompt, True]["tokens"] == len(got[name]) # known without encoding

def test_sizes_are_the_stock_geometry():
    assert picture_files.fit_size((1920, 1080), 1024 * 1024) == (1376, 768) # 1365 is nearest to 43 * 32
    assert picture_files.fit_size((64, 48), 1024 * 1024) == (1184, 896)
    assert picture_files.fit_size((64, 48), 1024 * 1024, upscale=False) == (64, 64) # its own size, sides rounded to 32
    assert picture_files.fit_size((4000, 3000), 1024 * 1024, upscale=False) == (1184, 896)
    assert picture_files.fit_size((33, 330), "native") == (32, 320)
    assert picture_files.fit_size((640, 64), 32 * 32) == (96, 32) # stock's formula gives a side of 0 here

@pytest.mark.parametrize("family", ["Plus", "v1"])
def test_the_text_encoder_knows_rows_and_columns_of_a_picture(pipes, monkeypatch, family):
    """transformers 5.2 finds these positions by itself; later versions need cache.add_token_types, as diffusers 0.42.1
    passes no mm_token_type_ids (issue 14194)."""
    pipe, seen = pipes[family], []
    encoder = pipe.text_encoder.model.language_model
    monkeypatch.setattr(pipe.processor, "image_processor", cache.Qwen2VLImageProcessorPil()) # tiny's makes one row
    monkeypatch.setattr(encoder, "forward", lambda **call: seen.append(call["position_ids"]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache.encode_prompts(pipe, ["go"], [paint_picture((112, 84))])
    time, row, column = seen[0][-3:, 0].cpu() # transformers may put text positions in front
    first = int((time[1:] == time[:-1]).nonzero()[0]) # where time stands still a picture begins
    at = slice(first, first + 3 * 4 + 1) # three rows of four tokens, and the text behind them
    assert time[at].tolist() == [first] * 12 + [first + 4]
    assert row[at].tolist() == [first + n for n in (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 4)]
    assert column[at].tolist() == [first + n for n in (0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 4)]

def test_the_stock_pipeline_of_the_guide_encodes_as_the_cache_does(plus):
    code = re.search(r"```\n(import cache.*?)```", (TINY.parent / "GUIDE.md").read_text("utf-8"), re.DOTALL)[1]
    scope = {}
    exec(code.replace('"tiny"', repr(str(TINY))), scope)
    pipe, picture = scope["pipe"].to(DEVICE), paint_picture((128, 64))
    with stock_area(64 * 64):
        pipe([picture], "go", num_inference_steps=2, true_cfg_scale=1.0)
    got, _ = pipe.to(dtype=DTYPE).encode_prompt(["go"], [picture])
    error = rel(got[0], cache.encode_prompts(plus, ["go"], [picture])[0]) # but for the vision tower's first product
    assert error <= (1e-5 if DTYPE == torch.float32 else 1e-2)

@pytest.mark.parametrize("mode, size", [("L", 64), ("1", 64), ("RGB", 128)])
def test_the_edit_mask_is_the_edited_share_of_each_token(tmp_path, plus, mode, size):
    mask = Image.new("L", (64, 64))
    mask.paste(255, (0, 0, 24, 64)) # one and a half of the four columns of tokens
    mask.putpixel((63, 63), 255) # and a single pixel
    add_item(tmp_path, "cat", mask=mask.resize((size, size), Image.NEAREST).convert(mode))
    sample, want = samples_of(plus, tmp_path)[0]["cat"], torch.tensor([[1, 0.5, 0, 0]] * 3 + [[1, 0.5, 0, 1 / 256]])
    torch.testing.assert_close(encode(plus, sample)["edit_mask"].reshape(4, 4), want, rtol=0, atol=0.5 / 255 + 1e-6)

def test_a_mask_that_marks_nothing_or_everything_is_none(tmp_path):
    """A line tells; the others are counted."""
    half = Image.new("L", (64, 96))
    half.paste(255, (0, 0, 32, 48))
    masks = dict(half=half, black=Image.new("L", half.size), white=Image.new("L", half.size, 255))
    for name, mask in masks.items():
        add_item(tmp_path / "data", name, ((64, 96), (64, 64)), mask=mask)
    result = make_cache(tmp_path / "data", tmp_path / "c", *NATIVE)
    assert result.status == 0 and "mask: 1 of 3 pairs" in result.out, result.out
    assert re.search("warning: 2 masks mark nothing or everything, .*(black|white).png", result.err)
    tensors = {name: load(tmp_path / "c", name)[0].get("edit_mask") for name in masks}
    assert tensors["black"] is tensors["white"] is None and tensors["half"].mean() == 0.25

def test_every_target_area_has_its_own_latents_and_all_share_the_text(data, tmp_path):
    add_item(data, "wide", [(70, 64), (64, 64)])
    areas = ["64*64", "128x64", "16384", "native"] # native is 64*64 here, so that its file is the first one's
    result = make_cache(data, tmp_path / "c", "--control_pixels", "32*32", "--target_pixels", *areas)
    assert result.status == 0 and "3 samples" in result.out, result.err
    sample = index_of(tmp_path / "c")["cat"]
    loaded = [cache.load_latents(sample, resolution) for resolution in sample.encodings]
    assert [t["img_shapes"].tolist() for t in loaded] == [[[1, n, n], [1, 2, 2]] for n in (4, 6, 8, 4)]
    assert [len(t["pixel_latent"]) for t in loaded] == [16, 36, 64, 16] and len(cached_files(tmp_path / "c")) == 9 + 3

def test_a_cached_sample_is_the_live_one_and_holds_what_the_contract_names(cached, plus):
    """cat: 64x64 with one control and a mask; dog: 64x32 with three controls."""
    lengths = dict(cat=dict(pixel_latent=16, control_latent=16, img_shapes=2, edit_mask=16),
                   dog=dict(pixel_latent=8, control_latent=16 + 16 + 8, img_shapes=4))
    for name, live in samples_of(plus, cached / "data")[0].items():
        tensors, sample = load(cached / "cache", name)
        text = dict.fromkeys(["prompt_embed", "prompt_embeds_mask"], sample.texts[sample.prompts[0], True]["tokens"])
        assert {k: len(v) for k, v in tensors.items()} == lengths[name] | text
        assert_same(tensors, encode(plus, live))
        assert tensors["pixel_latent"].dtype == tensors["prompt_embed"].dtype == DTYPE

def test_the_encoders_are_never_on_the_device_together(data, tmp_path, monkeypatch):
    """All latents come first; when the text encoder comes, the VAE is gone from memory, and at the end both are."""
    real, encoders = cache.load_encoder, {}

    def load_encoder(pipe, part, args):
        assert pipe.vae is pipe.text_encoder is None and not any(encoder() for encoder, _ in encoders.values())
        real(pipe, part, args)
        encoders[part] = weakref.ref(pipe.vae or pipe.text_encoder), pipe # which outlives the call
    monkeypatch.setattr(cache, "load_encoder", load_encoder)
    make_cache(data, tmp_path / "c")
    assert list(encoders) == ["vae", "text"] and not any(encoder() for encoder, _ in encoders.values())

@pytest.fixture
def twelve(tmp_path):
    """A dataset of so many items."""
    for n in range(12):
        add_item(tmp_path / "twelve", f"{n}")
    return tmp_path / "twelve"

def test_pictures_are_read_while_the_encoder_works_but_not_far_ahead(twelve, tmp_path, monkeypatch):
    read, begun, encoded, leads = cache.read_pictures, [], [], []

    def watched(kind, encode):
        def watch(*args):
            encoded.append(kind)
            until(lambda: len(begun) >= min(len(encoded) + 8, 24))
            leads.append(len(begun) - len(encoded))
            return encode(*args)
        return watch
    monkeypatch.setattr(cache, "read_pictures", lambda *args: begun.append(1) or read(*args))
    monkeypatch.setattr(common, "THREADS", 4) # and four pictures more
    for kind in ("latents", "texts"):
        monkeypatch.setattr(cache, f"encode_{kind}", watched(kind, getattr(cache, f"encode_{kind}")))
    result = make_cache(twelve, tmp_path / "c")
    assert result.status == 0 and len(begun) == 24 and max(leads) == 8, result.err
    assert encoded == ["latents"] * 12 + ["texts"] * 12

@pytest.mark.parametrize("limit, passes", [(8192, [2, 4, 5]), (40, [1, 2, 2, 2, 4]), (1, [1] * 11)])
def test_prompts_about_the_same_pictures_share_passes_of_bounded_length(data, tmp_path, monkeypatch, limit, passes):
    """Those without pictures share passes, too. Pictures are read once a pass; what is there is not encoded again."""
    (data / "target/cat.txt").write_text("make it snow\nmake it warm\nadd rain", "utf-8")
    encode, read, calls, reads = cache.encode_prompts, cache.read_pictures, [], []
    monkeypatch.setattr(cache, "PASS_TOKENS", limit)
    monkeypatch.setattr(cache, "encode_prompts", lambda *args: calls.append(len(args[1])) or encode(*args))
    monkeypatch.setattr(cache, "read_pictures", lambda *args: reads.append(args[2]) or read(*args))
    flags = ["--caption_dropout_rate", 0.1, "--prompt_image_dropout_rate", 0.1]
    assert make_cache(data, tmp_path / "c", *flags).status == 0
    assert sorted(calls) == passes and reads.count("text") == len(passes)
    texts = index_of(tmp_path / "c")["cat"].texts
    for key in (("make it snow", True), ("", True)):
        texts[key]["file"].unlink()
    assert make_cache(data, tmp_path / "c", *flags).status == 0
    assert sum(calls) == sum(passes) + 2 and texts["", True]["file"].is_file()

def test_what_the_disk_refuses_at_the_very_end_is_one_line_and_no_index(twelve, tmp_path, monkeypatch):
    """Threads write while the next samples are encoded."""
    write, written, begun = tensor_files.write_tensors, [], itertools.count()

    def write_tensors(path, *args):
        number = next(begun)
        time.sleep(0.02)
        if number == 23:
            raise common.InputError(f"{path}: cannot be written; free some space")
        write(path, *args)
        written.append(path)
    monkeypatch.setattr(tensor_files, "write_tensors", write_tensors)
    result = make_cache(twelve, tmp_path / "c")
    assert result.status == 1 and len(result.errors) == 1 and is_one_line(result.errors[0], "cannot be written")
    assert "Traceback" not in result.err and not list((tmp_path / "c").glob("*.json")) and len(written) == 23

def test_a_large_picture_is_no_warning(tmp_path):
    """PIL has a limit of its own, below ours; and its warnings cannot be silenced in one thread alone."""
    Image.new("1", (12000, 8000)).save(tmp_path / "large.png") # 96 megapixels
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert picture_files.image_size(tmp_path / "large.png") == (12000, 8000)
        picture_files.read_image(tmp_path / "large.png")

def test_a_run_is_called_after_the_revision_of_its_model():
    """That it is fetched at its revision: tests/test_hub.py."""
    assert run_name("Qwen/Edit@v1.0", ["photos"]) == "Edit@v1.0-photos"
    assert run_name("Qwen/Edit@refs/pr/3", ["photos"]) == "Edit@refs-pr-3-photos"

# ---- what a cached file depends on -----------------------------------------------------------------------------------

def paint_mask(width):
    """A mask of 64x64 pixels, white on the left."""
    mask = Image.new("L", (64, 64))
    mask.paste(255, (0, 0, width, 64))
    return mask

@pytest.fixture(scope="session")
def cached(tmp_path_factory):
    """A folder with model, data and cache, to be copied."""
    folder = copy_model(tmp_path_factory.mktemp("cached") / "model").parent
    add_item(folder / "data", "cat", mask=paint_mask(32))
    add_item(folder / "data", "dog", [(64, 32), (64, 64), (64, 64), (32, 64)])
    for path in folder.glob("data/*/*.png"):
        overwrite(path, Image.open(path))
    assert make_cache(folder / "data", folder / "cache", "--model", folder / "model", *NATIVE).status == 0
    return folder

@pytest.fixture
def root(cached, tmp_path):
    """Such a folder, to be changed; make(*flags) calls cache.py on it again."""
    folder = shutil.copytree(cached, tmp_path / "root")
    index = folder / "cache/model-data.json"
    index.write_text(index.read_text("utf-8").replace(str(cached), str(folder)), "utf-8") # as if it had been made here
    data, model, cache_dir = folder / "data", folder / "model", folder / "cache"
    make = lambda *flags: make_cache(next(folder.glob("*/target")).parent, cache_dir, "--model", model, *NATIVE, *flags)
    return SimpleNamespace(make=make, data=data, model=model, cache=cache_dir, index=cache_dir / "model-data.json")

def overwrite(path, image=None):
    """Other content under the same name, with the same time and, being BMP, the same length."""
    times = path.stat()
    (image or paint_picture((64, 64), seed=99)).save(path, format="BMP")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

CHANGES = { # of two items, cat with a mask and dog with three controls: how many latents and texts are encoded again
    "folder's name": (lambda r, patch: r.data.rename(r.data.with_name("renamed")), 0, 0),
    "item's name": (lambda r, patch: [p.rename(p.with_stem("tom")) for p in r.data.glob("*/cat.*")], 0, 0),
    "transformer": (lambda r, patch: change_weight(r.model / "transformer"), 0, 0),
    "target": (lambda r, patch: overwrite(r.data / "target/cat.png"), 1, 0),
    "mask": (lambda r, patch: overwrite(r.data / "mask/cat.png", paint_mask(16)), 1, 0),
    "mask that marks all": (lambda r, patch: overwrite(r.data / "mask/cat.png", paint_mask(64)), 1, 0),
    "mask of a pair that has none": (["--mask", "auto"], 1, 0),
    "control": (lambda r, patch: overwrite(r.data / "control/cat.png"), 1, 1),
    "second control": (lambda r, patch: overwrite(r.data / "control/dog_1.png"), 1, 1),
    "one control less": (lambda r, patch: (r.data / "control/dog_2.png").unlink(), 1, 1),
    "order of controls": (lambda r, patch: [(r.data / f"control/{a}.png").rename(r.data / f"control/{b}.png")
                                            for a, b in (("dog", "x"), ("dog_1", "dog"), ("x", "dog_1"))], 1, 1),
    "caption": (lambda r, patch: (r.data / "target/cat.txt").write_text("add a blue border", "utf-8"), 0, 1),
    "control size": (["--control_pixels", "32*32"], 2, 0),
    "dtype": (["--dtype", "bfloat16" if DTYPE == torch.float32 else "float32"], 2, 2),
    "empty prompt": (["--caption_dropout_rate", 0.1], 0, 2),
    "no pictures": (["--prompt_image_dropout_rate", 0.1], 0, 1), # both have the same prompt
    "VAE": (lambda r, patch: change_weight(r.model / "vae"), 2, 0),
    "text encoder": (lambda r, patch: change_weight(r.model / "text_encoder"), 0, 2),
    "tokenizer": (lambda r, patch: (r.model / "tokenizer/tokenizer_config.json").open("ab").write(b"\n"), 0, 2),
    "processor": (lambda r, patch: (r.model / "processor/preprocessor_config.json").open("ab").write(b"\n"), 0, 2),
    "model family": (lambda r, patch: [as_v1(r.model), [p.unlink() for p in r.data.glob("control/dog_*")]], 2, 2),
    "preprocessing": (lambda r, patch: patch.setattr(cache, "PREPROCESSING", "another"), 2, 2),
    "cache version": (lambda r, patch: [r.index.unlink(), patch.setattr(cache, "VERSION", "2.1")], 2, 2)}

@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_encodes_again_what_it_touches_and_nothing_else(root, monkeypatch, kind):
    change, latents, texts = CHANGES[kind]
    if callable(change):
        change(root, monkeypatch)
    if latents + texts == 0: # not even the models are loaded
        monkeypatch.setattr(cache, "load_encoder", lambda *_: pytest.fail("an encoder was loaded"))
    before, result = cached_files(root.cache), root.make(*change if isinstance(change, list) else ())
    assert result.status == 0, result.err
    new = [path.parent.name for path, time in cached_files(root.cache).items() if before.get(path) != time]
    assert (new.count("latents"), new.count("text"), len(new)) == (latents, texts, latents + texts)

def test_the_text_encoder_in_few_bits_gives_other_texts_and_the_same_latents(root):
    before, want = cached_files(root.cache).keys(), load(root.cache)[0]["prompt_embed"]
    assert root.make("--quantize_text_encoder", "int8").status == 0
    error, new = rel(load(root.cache)[0]["prompt_embed"], want), cached_files(root.cache).keys() - before
    show("int8 text encoder", error, 0.05)
    assert 0 < error < 0.05 and [path.parent.name for path in new] == ["text", "text"]

# ---- files and indexes -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("write", [torch.save, pickle.dump])
def test_no_pickle_is_ever_opened(tmp_path, write):
    class Bomb:
        def __reduce__(self): # unpickling it runs this
            return os.mkdir, (str(tmp_path / "exploded"),)
    for path in [tmp_path / f"a.{suffix}" for suffix in ("pt", "pth", "bin", "ckpt", "pkl", "safetensors", "json")]:
        write(Bomb(), path.open("wb"))
        for read in (tensor_files.read_tensors, predict.read_lora, index_file.read_index):
            with refused(path):
                read(path)
    weights = copy_model(tmp_path / "model") / "vae/diffusion_pytorch_model.safetensors"
    torch.save(safetensors.torch.load_file(weights), weights.with_suffix(".bin")) # harmless, but who knows?
    weights.unlink()
    with refused(weights.parent):
        cache.load_part(cache.AutoencoderKLQwenImage, weights.parent, "float32")
    assert not (tmp_path / "exploded").exists()
    pickle.loads(pickle.dumps(Bomb()))
    assert (tmp_path / "exploded").exists() # so it would have gone off

@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch, fails):
    """It is on the disk before it gets its name, and its name is before the call returns."""
    path, calls, fsync, replace = tmp_path / "sub/f.bin", [], os.fsync, os.replace
    common.write_file(path, b"old")
    with monkeypatch.context() as patch, refused(path, "No space"):
        patch.setattr(os, fails, lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        common.write_file(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(path.parent) == ["f.bin"]
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr(os, "replace", lambda a, b: calls.append(path.read_bytes()) or replace(a, b))
    common.write_file(path, b"new")
    assert calls[1:] == [b"old", str(path.parent)] and ".tmp" in calls[0] and path.read_bytes() == b"new"

def test_verify_names_every_damaged_file_and_encodes_only_these_again_to_the_same_bytes(data, tmp_path):
    make_cache(data, tmp_path / "c")
    damaged = [min(tmp_path.glob("c/latents/*")), max(tmp_path.glob("c/text/*"))]
    before, sound = cached_files(tmp_path / "c"), [path.read_bytes() for path in damaged]
    for path in damaged:
        damage_tensors(path)
    result, after = make_cache(data, tmp_path / "c", "--verify"), cached_files(tmp_path / "c")
    assert result.status == 0 and set(re.findall(r"(.+): damaged", result.err)) == set(map(str, damaged))
    assert {tmp_path / "c" / path for path in after if after[path] != before[path]} == set(damaged)
    assert [path.read_bytes() for path in damaged] == sound

def test_verify_deletes_nothing_of_an_index_which_cannot_encode_it_again(root):
    file = sorted(root.cache.glob("latents/*"))[0]
    flags = ["--data", root.index, "--model", root.model, "--val_data", "--cache_dir", root.cache, *ON_DEVICE]
    assert run_script("cache.py", *flags, "--verify").status == 0
    damage_tensors(file)
    result = run_script("cache.py", *flags, "--verify")
    assert result.status == 1 and is_one_line(result.errors[0], file, "damaged", "the dataset"), result.err
    assert file.is_file()

REFUSED = { # what is done to a cache, where a and b are files of texts, or the training's flags; what is named
    "cut": (lambda r, a, b: os.truncate(a, a.stat().st_size - 1), "text/"),
    "another's copy": (lambda r, a, b: shutil.copy(b, a), "text/", "holds"),
    "gone": (lambda r, a, b: a.unlink(), "text/", "missing"),
    "index of version 3.0": (lambda r, *_: r.index.write_bytes(
        r.index.read_bytes().replace(b'"2.0"', b'"3.0"')), "3.0"),
    "VAE": (lambda r, a, b: change_weight(r.model / "vae"), "data.json", "vae"),
    "tokenizer": (lambda r, a, b: (r.model / "tokenizer/merges.txt").write_text("a b", "utf-8"), "data.json", "text"),
    "model family": (lambda r, a, b: as_v1(r.model), "data.json", "pipeline"), # the encoder sees other pictures
    "caption dropout": (lambda r, a, b: ["--caption_dropout_rate", 0.1], "data.json", "--caption_dropout_rate"),
    "no pictures": (lambda r, a, b: ["--prompt_image_dropout_rate", 0.1], "data.json", "--prompt_image_dropout"),
    "held out": (lambda r, a, b: ["--val_data", r.index], "data.json", "--val_data")}

@pytest.mark.parametrize("kind", REFUSED)
def test_training_refuses_an_index_that_does_not_fit_and_names_what(tmp_path, root, kind):
    change, *named = REFUSED[kind]
    flags = change(root, *sorted(root.cache.glob("text/*")))
    result = train(root.index, tmp_path, "--model", root.model, *flags if isinstance(flags, list) else ())
    assert result.status == 1 and len(result.losses) < 2 and is_one_line(result.errors[-1], *named), result.err

def test_a_model_folder_without_weights_is_no_other_model(root):
    """As a download for --plan leaves it."""
    for part in ("vae", "text_encoder"):
        next((root.model / part).glob("*.safetensors")).unlink()
    here, args = cache.encoder_fingerprints(root.model, root.cache), SimpleNamespace(cache_dir=root.cache)
    assert list(here) == ["pipeline"]
    samples, _ = index_file.open_index(root.index, here, lambda s: [], args)
    assert len(samples) == 2

def test_a_copied_cache_trains_and_validates_on_a_machine_without_the_pictures(tmp_path, data):
    val, flags = add_item(tmp_path / "val", "dog", [(64, 32), (64, 64), (32, 64)]), ["--caption_dropout_rate", 0.5]
    here = train(data, tmp_path, "--cache_dir", tmp_path / "c", "--val_data", val, "--sample_every", 1, *flags)
    there = shutil.copytree(tmp_path / "c", tmp_path / "there")
    for folder in (data, val, tmp_path / "c"):
        shutil.rmtree(folder)
    val, = there.glob("tiny-val*.json")
    again = train(there / "tiny-data.json", tmp_path, "--val_data", val, "--sample_every", 1, *flags)
    assert again.losses == here.losses and len(here.losses) == 2, again.err
    logs = [(tmp_path / run / "log.jsonl").read_text("utf-8") for run in ("run-0", "run-1")]
    looks = [re.findall(r'"val_loss": ([\d.]+)', log) for log in logs]
    assert looks[0] == looks[1] and len(looks[0]) == len(list((tmp_path / "run-1/samples").glob("*.png"))) == 2

# ---- several calls, datasets and processes share a cache, good items and bad ones ------------------------------------

def is_cached(sample):
    return all(map(Path.is_file, cache.files_of(sample)))

def test_an_index_holds_what_the_last_call_has_asked_for_and_files_stay_until_they_are_pruned(root):
    """So that a training without dropout, between two with it, costs nothing."""
    root.make("--caption_dropout_rate", 0.1)
    before, files = root.index.read_text("utf-8"), cached_files(root.cache)
    assert root.make().status == 0 and cached_files(root.cache) == files
    texts = {s.name: [prompt for prompt, _ in s.texts] for s in index_file.read_index(root.index)[0]}
    assert texts == dict.fromkeys(("cat", "dog"), ["add a red border"])
    root.make("--caption_dropout_rate", 0.1)
    assert root.index.read_text("utf-8") == before and cached_files(root.cache) == files

def test_an_index_to_validate_on_has_its_own_sizes_and_lends_them_to_nothing(data, tmp_path):
    """The training, and datasets to validate on beside it, have those of the flags, in whatever order."""
    val, other = add_item(tmp_path / "val", "dog"), add_item(tmp_path / "other", "cow")
    make_cache(data, tmp_path / "c", "--val_data", val, "--target_pixels", "32*32")
    roots = [tmp_path / "c/tiny-val-val.json", other]
    for named in (roots, roots[::-1]):
        result = train(data, tmp_path, "--cache_dir", tmp_path / "c", "--val_data", *named, "--target_pixels", "64*64",
                       "--control_pixels", "native")
        assert result.status == 0 and result.globals["geometry"]["target_pixels"] == 64 * 64, result.err
        shapes = {s.name: s.encodings[0]["img_shapes"][0] for s in result.globals["val_samples"]}
        assert list(map(tuple, shapes.values())) == [(1, 2, 2), (1, 4, 4)][::1 if named is roots else -1]

def test_a_dataset_that_is_trained_on_and_validated_on_keeps_all_its_files(data, tmp_path):
    flags = ["--target_pixels", "64*64", "32*32", "--caption_dropout_rate", 0.1]
    for other in (data, add_item(tmp_path / "other", "dog")):
        assert make_cache(other, tmp_path / "c", "--val_data", data, *flags).status == 0
        works("tools/prune.py", tmp_path / "c", "--delete")
        sample, = [s for s in index_file.read_index(tmp_path / "c/tiny-data.json")[0] if s.name == "cat"]
        assert len(sample.encodings) == 2 and ("", True) in sample.texts and is_cached(sample)

def test_files_of_removed_items_stay_until_they_are_pruned_and_those_of_other_datasets_always(data, tmp_path):
    cache_dir, index = tmp_path / "c", tmp_path / "c/tiny-others.json"
    for dataset in (data, add_item(tmp_path / "others", "dog", [(64, 32), (64, 64)])):
        make_cache(dataset, cache_dir)
    before, sound, caption = cached_files(cache_dir), index.read_bytes(), data / "target/good.txt"
    for path in data.glob("*/cat.*"):
        path.unlink()
    result = make_cache(data, cache_dir)
    assert result.status == 0 and "2 files" in works("tools/prune.py", cache_dir).out
    assert cached_files(cache_dir) == before
    samples, *_ = index_file.read_index(cache_dir / "tiny-data.json")
    assert [s.name for s in samples] == ["good"] # nobody shall train them
    for folder, named, spoil in ((cache_dir, "others.json", "{"), (tmp_path, "latents", sound)):
        index.write_text(spoil, "utf-8") if spoil == "{" else index.write_bytes(spoil) # what must stay is not known
        result = run_script("tools/prune.py", folder, "--delete")
        assert result.status == 1 and is_one_line(result.errors[-1], named) and cached_files(cache_dir) == before
    caption.unlink() # with errors the index stays as it is, and so do its files
    assert make_cache(data, cache_dir).status == 1
    assert "2 files" in works("tools/prune.py", cache_dir, "--delete").out and len(cached_files(cache_dir)) == 4
    assert "0 files" in works("tools/prune.py", cache_dir).out
    assert all(is_cached(s) for path in cache_dir.glob("*.json") for s in index_file.read_index(path)[0])

def read_counter():
    """In a process of its own: says on stderr that it has opened a picture."""
    real = dataset_.image_size
    dataset_.image_size = lambda path: print("opened", path, file=sys.stderr) or real(path)

@pytest.fixture
def opened(monkeypatch):
    """The names of the pictures that were opened for a plan. All that this test writes counts as settled."""
    names, real = [], picture_facts
    monkeypatch.setattr(stat_cache, "SETTLED", -10**15)
    monkeypatch.setattr(dataset_, "picture_facts", lambda path: names.append(Path(path).name) or real(path))
    return names

def test_a_start_opens_only_pictures_that_are_new_or_changed(data, tmp_path, opened, monkeypatch):
    """Also if a change leaves length and age as they were: other pixels, or two pictures that change places. An index
    that is right is not written again."""
    for n in range(3):
        add_item(data, f"{n}", mask=paint_mask(32))
    for n, seed in enumerate((7, 8)): # a BMP's length tells its size alone
        paint_picture(seed=seed).save(data / f"control/{n}.bmp")
        (data / f"control/{n}.png").unlink()
        os.utime(data / f"control/{n}.bmp", ns=(10**18, 10**18))

    def start():
        opened.clear()
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").glob("*.*")}
        result = make_cache(data, tmp_path / "c")
        assert result.status == 0, result.err
        changed = {path.name for path in (tmp_path / "c").glob("*.*") if before.get(path) != path.stat().st_mtime_ns}
        return "encoding" in result.out, changed
    both = {"pictures.txt", "tiny-data.json"}
    all_new = both | {"masks.txt"} # (tiny's files are too young for models.txt where this repository is)
    assert start()[1] - {"models.txt"} == all_new and len(set(opened)) == 7
    assert start() == (False, set()) and not opened
    os.utime(data / "control/2.png", ns=(2 * 10**18, 2 * 10**18)) # of a camera whose clock is years ahead
    assert start()[1] == {"pictures.txt"} and opened == ["2.png"]
    assert start() == (False, set()) and not opened
    shutil.copy(data / "target/2.png", data / "target/0.png")
    assert start() == (True, both) and {*opened} == {"0.png"}
    a, b = [data / f"control/{n}.bmp" for n in (0, 1)]
    stat = a.stat()
    pixels = a.read_bytes()
    a.write_bytes(pixels[:-100] + bytes(100))
    os.utime(a, ns=(10**18, 10**18))
    assert (a.stat().st_size, a.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert start() == (True, both) and {*opened} == {"0.bmp"}
    for source, to in ((a, data / "x"), (b, a), (data / "x", b)):
        time.sleep(0.02) # a tick of the disk's clock
        source.rename(to)
    assert start() == (True, both) and {*opened} == {"0.bmp", "1.bmp"}
    monkeypatch.setattr(stat_cache, "FORM", stat_cache.FORM + 1) # what another version has written is not believed
    assert start()[1] - {"models.txt"} == {"pictures.txt", "masks.txt"} and len(set(opened)) == 7

def test_a_remembered_picture_that_becomes_a_bad_one_is_an_error_at_every_start(data, tmp_path, opened):
    assert make_cache(data, tmp_path / "c").status == 0
    save(paint_picture((400, 32)), data / "target/cat.png")
    save(paint_picture((16, 64)), data / "control/good.png")
    for _ in range(2):
        opened.clear()
        result = make_cache(data, tmp_path / "c")
        assert result.status == 1 and len(result.errors) == 2 and {*opened} == {"cat.png", "good.png"}
        assert any(is_one_line(line, data / "target/cat.png", "400x32") for line in result.errors), result.err

def test_what_was_read_before_ctrl_c_is_remembered(data, tmp_path, opened, monkeypatch):
    """Pictures are asked for in their order: cat's target, cat's control, good's ..."""
    counting = dataset_.picture_facts # the fixture's
    monkeypatch.setattr(dataset_, "picture_facts",
                        lambda path: stop() if "control/cat" in path else picture_facts(path))

    def stop():
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        make_cache(data, tmp_path / "c")
    monkeypatch.setattr(dataset_, "picture_facts", counting)
    opened.clear()
    assert make_cache(data, tmp_path / "c").status == 0 and opened == ["cat.png", "good.png", "good.png"]

def test_a_picture_that_has_just_changed_is_not_remembered(data, tmp_path, opened, monkeypatch):
    """It may change once more within a tick of the clock."""
    assert stat_cache.SETTLED == -10**15
    monkeypatch.setattr(stat_cache, "SETTLED", 10**15)
    for _ in range(2):
        opened.clear()
        assert make_cache(data, tmp_path / "c").status == 0
        assert {*opened} == {"cat.png", "good.png"} and not (tmp_path / "c/pictures.txt").exists()

MEMORIES = {"empty": lambda data: b"", "cut": lambda data: data[:-1], "binary": flip(7), "a size": flip(8 * 300),
            "a hash": lambda data: data.replace(b'"', b'"0', 30)}

@pytest.mark.parametrize("how", MEMORIES)
def test_a_damaged_memory_of_pictures_is_not_used(data, tmp_path, opened, how):
    """It is written again; a person's file of this name stays."""
    make_cache(data, tmp_path / "c")
    memory, index = tmp_path / "c/pictures.txt", (tmp_path / "c/tiny-data.json").read_bytes()
    sound, mine = memory.read_bytes(), b"my pictures: cat, good"
    for content, left in ((MEMORIES[how](sound), sound), (mine, mine)):
        memory.write_bytes(content)
        opened.clear()
        result = make_cache(data, tmp_path / "c")
        assert result.status == 0 and "encoding" not in result.out and {*opened} == {"cat.png", "good.png"}, result.err
        assert (tmp_path / "c/tiny-data.json").read_bytes() == index and memory.read_bytes() == left

def test_the_first_process_alone_reads_a_dataset_and_its_error_ends_all(data, tmp_path, start):
    flags = ["--data", data, "--val_data", "--cache_dir", tmp_path / "c", *ON_DEVICE, *NATIVE]
    first, second = start_ranks(start, *flags, preludes=(read_counter, read_counter), script="cache.py")
    assert first.wait() == second.wait() == 0, first.output() + second.output()
    assert len(set(re.findall("opened .*", first.output()))) == 4 and "opened" not in second.output()
    assert sorted(index_of(tmp_path / "c")) == ["cat", "good"]
    (data / "controls").mkdir() # an error that ends the planning
    first, second = start_ranks(start, *flags, preludes=(None, None), script="cache.py")
    assert first.wait() == second.wait() == 1
    assert is_one_line(first.output().strip().splitlines()[-1], data / "controls")
    assert "controls" not in second.output() and "Traceback" not in first.output() + second.output()

def test_a_missing_file_of_an_index_is_an_error_and_is_not_encoded_with_other_flags(root, tmp_path):
    file = next(root.cache.glob("latents/*.safetensors"))
    file.unlink()
    for val_data in ([], [root.data]): # beside a dataset there is a pipeline that could encode it
        result = run_script("train.py", "--model", root.model, "--data", root.index, "--val_data", *val_data,
                            "--cache_dir", tmp_path / "c", "--max_steps", 1, "--out_dir", tmp_path / "o", *NATIVE)
        assert result.status == 1 and is_one_line(result.errors[-1], file, "missing"), result.err
        assert not file.exists()

def planned(data, tmp_path):
    """What encode_samples wants: a pipeline, a dataset's planned samples, flags."""
    pipe, flags = cache.load_pipeline(TINY), encoder_flags(cache_dir=tmp_path / "c")
    geometry = dict(target_pixels=[4096], control_pixels=4096, upscale=True)
    samples, _ = read_dataset(data)
    samples, _ = cache.plan_samples(pipe, samples, lambda s: [(s.prompts[0], True)], geometry, flags)
    return pipe, samples, flags

def test_processes_that_share_the_work_leave_nothing_out(twelve, tmp_path, monkeypatch):
    """Each rank decides alone which files are its own, perhaps when others have written theirs already."""
    pipe, samples, flags = planned(twelve, tmp_path)
    written = []
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        assert not cache.encode_samples(pipe, samples, flags)
        written.append(len(cached_files(tmp_path / "c")))
    assert written[0] < written[1] < written[2] == 24 and all(map(is_cached, samples))

@pytest.mark.parametrize("place", [0, 1])
def test_what_one_process_could_not_encode_all_know(data, tmp_path, monkeypatch, place):
    """Whichever of the processes it was; another one has written its share without an error."""
    picture = data / "control/cat.png"
    os.truncate(picture, picture.stat().st_size // 2)
    others = [({}, [])]
    monkeypatch.setattr(common, "gather_objects", lambda value: others[place:] + [value] + others[:place])
    pipe, samples, flags = planned(data, tmp_path)
    failed = cache.encode_samples(pipe, samples, flags)
    bad = [sample for sample in samples if sample.name == "cat"]
    assert failed.keys() == {file for sample in bad for file in cache.files_of(sample)}
    assert all(is_one_line(line, picture) for line in failed.values())

def test_good_items_are_cached_although_others_are_bad(data, tmp_path, monkeypatch):
    """Each is named once: at once, before anything else; or if it shows only when the picture is decoded, after it."""
    add_item(add_item(data, "cut"), "late")
    cut, late, caption = data / "control/cut.png", data / "control/late.png", data / "target/cat.txt"
    paint_picture((96, 64)).save(cut, format="WEBP") # whose header tells how long it is
    for path in (cut, late):
        os.truncate(path, path.stat().st_size // 2)
    sound, real = caption.read_text("utf-8"), cache.encode_samples
    caption.unlink()
    monkeypatch.setattr(cache, "encode_samples", lambda *args: print("now", file=cache.sys.stderr) or real(*args))
    result = make_cache(data, tmp_path / "c")
    assert result.status == 1 and len(result.errors) == 2 and "now" not in result.err, result.err
    assert all(any(is_one_line(line, path) for line in result.errors) for path in (caption, cut))
    caption.write_text(sound, "utf-8")
    whole = cut.with_name("good.png").read_bytes()
    broken = cut.read_bytes()
    cut.write_bytes(whole)
    result = make_cache(data, tmp_path / "c")
    assert result.status == 1 and len(result.errors) == 1 and is_one_line(result.errors[0], late), result.err
    assert result.err.count("--skip_bad") == 1 and "now" in result.err
    assert not list(tmp_path.glob("c/*.json")) # which would look complete
    cut.write_bytes(broken)
    caption.unlink()
    result = make_cache(data, tmp_path / "c", "--skip_bad")
    assert result.status == 0 and "--skip_bad" not in result.err
    assert list(index_of(tmp_path / "c")) == ["good"] and load(tmp_path / "c", "good")
    assert len(train(data, tmp_path, "--cache_dir", tmp_path / "c", "--skip_bad").losses) == 2
    (data / "target/good.txt").unlink() # so that nothing is left
    result = train(data, tmp_path, "--cache_dir", tmp_path / "c", "--skip_bad")
    assert result.status == 1 and is_one_line(result.errors[-1], data), result.err
    result = train(data, tmp_path, "--no-use_cache", "--skip_bad") # which would find the others too late to skip them
    assert result.status == 2 and is_one_line(result.errors[0]), result.err

@pytest.mark.parametrize("part, value", [("image", torch.nan), ("image", 1e5), ("prompts", torch.inf)])
def test_what_is_not_finite_is_not_cached(data, tmp_path, monkeypatch, part, value):
    real, first = getattr(cache, f"encode_{part}"), [torch.tensor([0])] # 1e5 is Inf in float16

    def spoil(tensor): # only of the first sample
        return tensor.index_fill(0, first.pop(), value).half() if first else tensor
    monkeypatch.setattr(cache, f"encode_{part}", lambda *args: list(map(spoil, real(*args))) if part == "prompts" else
                        spoil(real(*args)))
    result = make_cache(data, tmp_path / "c", "--skip_bad")
    assert result.status == 0 and len(result.errors) == 1 and is_one_line(result.errors[0], "target/cat.png")
    assert list(index_of(tmp_path / "c")) == ["good"]
    tensors = [tensor_files.read_tensors(f)[0] for f in (tmp_path / "c").glob("*/*.safetensors")]
    assert len(tensors) == 3 and all(t.isfinite().all() for each in tensors for t in each.values())

def test_a_prompt_that_overflows_spoils_no_other_of_its_pass(data, tmp_path, monkeypatch):
    """0 * NaN is NaN, behind a mask as well; and each prompt has its own error."""
    (data / "target/cat.txt").write_text("make it snow\nadd ~ here\nadd a red border", "utf-8")
    load_encoder = cache.load_encoder

    def overflow(pipe, part, args):
        load_encoder(pipe, part, args)
        if part == "text":
            pipe.text_encoder.get_input_embeddings().weight[pipe.tokenizer("~").input_ids] = torch.inf
    monkeypatch.setattr(cache, "load_encoder", overflow)
    result = make_cache(data, tmp_path / "c", "--skip_bad")
    assert result.status == 0 and len(result.errors) == 1 and is_one_line(result.errors[0], "target/cat.png")
    tensors = [tensor_files.read_tensors(f)[0]["prompt_embed"] for f in (tmp_path / "c/text").iterdir()]
    assert len(tensors) == 2 + 1 and all(t.isfinite().all() for t in tensors) # two of cat, one of good

def test_a_folder_that_is_none_is_one_line(root, monkeypatch):
    """A full disk: tests/test_faults.py."""
    monkeypatch.setattr(cache, "load_encoder", lambda *_: pytest.fail("an encoder was loaded"))
    result = root.make("--cache_dir", root.model / "model_index.json") # a file
    assert result.status == 1 and is_one_line(result.errors[0], "model_index.json", "cannot be written")

# ---- flags and model folders -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("flags", [
    "--target_pixels 0", "--target_pixels 1024*", "--dtype float64", "--device banana", "--vae_device cuda:99",
    "--data", "--cache_dir=", "--max_sequence_length 0", "--data=",
    "--data a.json b", "--data a b a", "--model",
    "--repeats 0", "--repeats 1 2", "--caption_dropout_rate 2", "--prompt_image_dropout_rate nan", "--no_such_flag",
    "--mod no/such-model"]) # short for --model, but too late for the defaults that depend on it
def test_a_bad_flag_is_told_before_any_model_is_loaded(monkeypatch, flags):
    monkeypatch.setattr(cache, "load_pipeline", lambda *_: pytest.fail("not told before the work began"))
    result = run_script("cache.py", *flags.split())
    assert result.status == 2 and re.search(r"--\w+", flags)[0] in result.err.splitlines()[-1], result.err

DAMAGES = {
    "gone": os.unlink, "empty": lambda p: os.truncate(p, 0), "cut": lambda p: os.truncate(p, p.stat().st_size // 2),
    "LFS pointer": lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 500000\n"),
    "foreign": lambda p: safetensors.torch.save_file({"a": torch.ones(1)}, p, {"format": "pt"}), # the rest: random
    "no shard": lambda p: p.with_suffix(".safetensors.index.json").write_bytes(b'{"weight_map": {"a": "b.s"}}'),
    "Flux": lambda p: p.write_text('{"_class_name": "FluxPipeline"}', "utf-8")}
PARTS = {
    "vae/diffusion_pytorch_model.safetensors": ["gone", "cut", "foreign"], "vae/config.json": ["empty"],
    "text_encoder/model.safetensors": ["gone", "LFS pointer", "no shard"], "tokenizer/tokenizer.json": ["gone", "cut"],
    "transformer/diffusion_pytorch_model.safetensors": ["gone", "foreign"], "scheduler/scheduler_config.json": ["cut"],
    "processor/preprocessor_config.json": ["gone"], "model_index.json": ["gone", "LFS pointer", "Flux"]}

@pytest.mark.parametrize("file, how", [(file, how) for file in PARTS for how in PARTS[file]])
def test_an_incomplete_model_is_named_on_a_line_of_its_own(data, tmp_path, monkeypatch, file, how):
    """Also where a progress bar stands, as on a terminal."""
    real, model = common.tqdm.__init__, copy_model(tmp_path / "model")
    monkeypatch.setattr(common.tqdm, "__init__", lambda *args, **kwargs: real(*args, **kwargs | dict(disable=False)))
    DAMAGES[how](model / file)
    result = train(data, tmp_path, "--model", model, "--cache_dir", tmp_path / "c", *NATIVE)
    named = (model / file).parent if how in ("gone", "no shard", "foreign") else model / file
    assert result.status == 1 and is_one_line(result.errors[-1], named), result.err
    assert re.search(r"(^|[\r\n])" + re.escape(result.errors[-1]), result.err), result.err

def test_val_data_without_controls_is_refused_before_anything_is_encoded(data, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "load_part", lambda *_: pytest.fail("a model was loaded"))
    add_item(tmp_path / "val", "dog", [(64, 32)])
    result = run_script("cache.py", "--data", data, "--val_data", tmp_path / "val", "--cache_dir", tmp_path / "c")
    assert result.status == 1 and is_one_line(result.errors[-1], "--val_data", "dog"), result.err
