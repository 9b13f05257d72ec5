"""
What test_consistency.py and the tests of this folder share: models, samples and their comparison with stock, the modes
of forward(), scripts and datasets, refusals, damages, LoRA files, runs; at the end fixtures, which conftest.py gives to
every test. Processes that can be killed: tests/processes.py. The letters of shapes are those of test_consistency.py.
"""
import atexit
import contextlib
import copy
import functools
import gc
import io
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from html.parser import HTMLParser
from math import prod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import OPTIONS
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as v1_code
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus_code
from peft import LoraConfig
from PIL import Image, ImageDraw, ImageFilter
from tqdm import tqdm

import cache
import common
from library.cli import command_line
from library.data import dataset, index_file
from library.files import tensor_files
from library.lora import lora_paths
from library.results import result_files
import predict
from rope_patch import patch_qwen_model_for_multi_resolution
from tests.processes import error_of, free_port, kill, start_ranks, starter, until # the tests take these from here

gc.freeze() # what the imports made need not be searched by each gc.collect() below: 0.2 s each, for 600 of them
DTYPE, DEVICE, FULL = OPTIONS["dtype"], OPTIONS["device"], OPTIONS["full"]
DTYPE_NAME = str(DTYPE).removeprefix("torch.")
ON_DEVICE = ["--dtype", DTYPE_NAME, "--device", DEVICE]
HERE = Path(cache.__file__).parent
TINY = HERE / "tiny"
EXACT = ["--dtype", "float32"] # where a training is compared to 1e-5, whatever pytest's --dtype
NATIVE = ["--target_pixels", "native", "--control_pixels", "native"] # the default of --model tiny only
# For comparing runs that sum in different orders. Muon, tiny's optimizer, rounds to bf16, which enlarges such
# differences: losses move by 1e-6 to 1e-5, on some CPUs more often than on others.
ADAMW = ["--optimizer", "torch.optim.AdamW", "--lr", 4e-3]

# ---- models, samples, comparison with stock --------------------------------------------------------------------------

C, J, E, O = 64, 512, 128, 64
SMALL = dict(num_layers=2, num_attention_heads=4, attention_head_dim=E // 4, axes_dims_rope=(8, 12, 12),
             joint_attention_dim=J, in_channels=C, out_channels=O // 4)
VARIANTS = {
    "v1": {},
    "2511": dict(zero_cond_t=True),
    "layered": dict(use_layer3d_rope=True, use_additional_t_cond=True),
    "2511 layered": dict(zero_cond_t=True, use_layer3d_rope=True, use_additional_t_cond=True),
}
# every linear of the model: a wrong gradient anywhere shows in one of them
LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
                "img_mod.1", "txt_mod.1", "net.0.proj", "net.2", "img_in", "txt_in", "linear_1", "linear_2",
                "norm_out.linear", "proj_out"]

def add_lora(model):
    """The model gets a LoRA of two random factors, in float32 as in train.py; alpha is not the rank on purpose."""
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=4, lora_alpha=6, target_modules=LORA_TARGETS, init_lora_weights=False))
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.bfloat16().float()
    return model

@functools.cache
def hot_model(variant="v1", dtype=DTYPE, lora=False, **config):
    """This stock model feels its attention: wrong positions move its output by 0.4; as initialised, by 6e-4."""
    # It is shared, so a test that changes it takes a copy. Its weights are exact in bfloat16, so that the float32 model
    # knows the exact answer for the bfloat16 one.
    torch.manual_seed(0)
    model = QwenImageTransformer2DModel(**SMALL | VARIANTS[variant] | config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search(r"_mod\.1\.bias$", name):
                weight.normal_()
            elif re.search(r"norm_(added_)?[qk]\.weight$", name):
                weight.fill_(2)
            elif re.search(r"(to_v|add_v_proj)\.weight$", name):
                weight.mul_(4)
    model.to(torch.bfloat16).to(DEVICE, dtype)
    return add_lora(model) if lora else model

def patched_copy(model):
    """A patched copy leaves the model as it is."""
    return patch_qwen_model_for_multi_resolution(copy.deepcopy(model))

@functools.cache
def patched_model(*args, **kwargs):
    """This is the patched twin of `hot_model`, shared in the same way."""
    return patched_copy(hot_model(*args, **kwargs))

def make_sample(shapes, text_len, text_mask=None, seed=0):
    """It makes one sample in float32 on the CPU."""
    # its numbers are exact in bfloat16, so that every dtype sees the same sample
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *size: torch.randn(*size, generator=generator).bfloat16().float()
    image_len = sum(map(prod, shapes))
    return SimpleNamespace(shapes=list(shapes), image_IC=randn(image_len, C), text_TJ=randn(text_len, J),
                           text_mask=None if text_mask is None else torch.tensor(text_mask),
                           time=randn(1).sigmoid().bfloat16().float(), layered=torch.tensor([seed % 2]),
                           out_grad_IO=randn(image_len, O)) # gradient of the sample's loss with respect to its output

def make_batch(*shapes_and_text):
    """It makes a list of samples, each from its shapes, its text and another seed."""
    return [make_sample(*each, seed=seed) for seed, each in enumerate(shapes_and_text)]

def to_model(model, tensor):
    """The tensor moves to the device, and takes the model's dtype unless it holds integers."""
    return tensor.to(DEVICE, model.dtype if tensor.is_floating_point() else tensor.dtype)

def rel(got, want):
    """It returns the relative L2 distance; where the wanted tensor is zero, the absolute one."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / (want.norm() if want.any() else 1))

def show(what, error, limit):
    """It prints a measured error beside its limit, for -s."""
    print(f"{what}: {error:.2g} (limit {limit:.2g})")

def assert_equals_stock(got, stock, exact=None):
    """Each tensor of two lists or dicts keeps the rule of the claim."""
    # float32: within 1e-5 of stock. bfloat16, where `exact` is stock's float32 answer: within 1e-2 of stock, or at most
    # three times as far from `exact` as stock is.
    got, stock, exact = [x if isinstance(x, dict) else dict(enumerate(x or ())) for x in (got, stock, exact)]
    assert got.keys() == stock.keys()
    for name, want in stock.items():
        assert (got[name].shape, got[name].dtype) == (want.shape, want.dtype), name
        error, limit = rel(got[name], want), 1e-2 if exact else 1e-5
        show(f"{name}, from stock", error, limit)
        if exact and error > limit:
            error, limit = rel(got[name], exact[name]), 3 * rel(want, exact[name])
            show(f"{name}, from stock in float32", error, limit)
        assert error <= limit, name

def assert_bitwise(got, want):
    """The tensors of two lists or dicts agree in every bit."""
    got, want = [x if isinstance(x, dict) else dict(enumerate(x)) for x in (got, want)]
    assert got.keys() == want.keys()
    assert [x.dtype for x in got.values()] == [want[name].dtype for name in got] # which torch.equal ignores
    different = {name: rel(got[name], want[name]) for name in want if not torch.equal(got[name], want[name])}
    assert not different

def unpatched(model):
    """It takes the patches of an instance off, so that its classes' own code computes."""
    for module in model.modules():
        vars(module).pop("forward", None)
    return model

def stock_pipeline(folder):
    """It returns the unmodified pipeline, with weights, and with our processor, since its own needs torchvision. Its
    text encoder takes several prompts as well, for job_of."""
    pipe = cache.load_pipeline(folder)
    for part in ("vae", "text"):
        cache.load_encoder(pipe, part, encoder_flags())
    pipe.vae = cache.load_part(AutoencoderKLQwenImage, folder / "vae", "float32") # not patched for pictures
    pipe.transformer = cache.load_part(QwenImageTransformer2DModel, folder / "transformer", "float32")
    pipe.set_progress_bar_config(disable=True)
    return pipe

@contextlib.contextmanager
def stock_area(area):
    """The stock pipelines work at 1024*1024 and 384*384; here at `area`, so that a CPU is done in a second."""
    with pytest.MonkeyPatch.context() as patch:
        small = lambda real: lambda target_area, ratio: real(area if target_area == 1024 * 1024 else target_area, ratio)
        for module in (plus_code, v1_code):
            patch.setattr(module, "calculate_dimensions", small(module.calculate_dimensions))
        yield

# ---- the modes of forward(): each makes the arguments of one call out of a list of samples ---------------------------

def pad(rows, length, fill=0):
    """It pads tensors of different first dimension on the right into one batch."""
    batch = rows[0].new_full((len(rows), length, *rows[0].shape[1:]), fill)
    for padded_row, row in zip(batch, rows):
        padded_row[:len(row)] = row
    return batch

def image_lens(samples):
    """It returns the samples' numbers of image tokens."""
    return [len(s.image_IC) for s in samples]

def text_lens(samples):
    """It returns the samples' numbers of text tokens."""
    return [len(s.text_TJ) for s in samples]

def image_mask_of(samples, width):
    """It returns a mask of rows of this width, true where a sample has image tokens."""
    return pad([torch.ones(n, dtype=torch.bool) for n in image_lens(samples)], width).to(DEVICE)

def text_mask_of(samples):
    """It returns a mask that is true where a sample has text tokens, but for the holes of its own mask."""
    own = [torch.ones(len(s.text_TJ)).bool() if s.text_mask is None else s.text_mask for s in samples]
    return pad(own, max(text_lens(samples))).to(DEVICE)

def joint_mask_of(samples, width):
    """It returns the mask of the joint rows: text, then image."""
    return torch.cat([text_mask_of(samples), image_mask_of(samples, width)], dim=1)

def conditions(model, samples):
    """It returns what every call has once per sample."""
    layered = torch.cat([s.layered for s in samples]).to(DEVICE) if model.config.use_additional_t_cond else None
    return dict(timestep=to_model(model, torch.cat([s.time for s in samples])), additional_t_cond=layered,
                img_shapes=[s.shapes for s in samples])

def padded_call(model, samples, spare=3):
    """For samples of equal sizes without spare rows this is the stock call."""
    text_mask_BT = text_mask_of(samples)
    return conditions(model, samples) | dict(
        hidden_states=to_model(model, pad([s.image_IC for s in samples], max(image_lens(samples)) + spare)),
        encoder_hidden_states=to_model(model, pad([s.text_TJ for s in samples], max(text_lens(samples)))),
        encoder_hidden_states_mask=None if text_mask_BT.all() else text_mask_BT)

def stock_call(model, samples):
    """It returns the call that stock diffusers knows, for samples of equal sizes."""
    return padded_call(model, samples, spare=0)

def precomputed_call(model, samples, spare=3):
    """It has a joint mask, as the first seed document calls it; shapes are given only where they are needed."""
    call = padded_call(model, samples, spare)
    width, text_width = call["hidden_states"].shape[1], call["encoder_hidden_states"].shape[1]
    freqs = [model.pos_embed([s.shapes], max_txt_seq_len=text_width, device=DEVICE) for s in samples]
    return call | dict(
        image_rotary_emb=(pad([img for img, _ in freqs], width), torch.stack([txt for _, txt in freqs])),
        attention_kwargs={"attention_mask": joint_mask_of(samples, width)[:, None, None]},
        encoder_hidden_states_mask=None, img_shapes=call["img_shapes"] if model.config.zero_cond_t else None)

def packed_call(model, samples):
    """It puts all samples into one row, without pads."""
    return conditions(model, samples) | dict(
        hidden_states=to_model(model, torch.cat([s.image_IC for s in samples]))[None],
        encoder_hidden_states=to_model(model, torch.cat([s.text_TJ for s in samples]))[None],
        txt_seq_lens=text_lens(samples))

MODES = dict(stock=stock_call, padded=padded_call, precomputed=precomputed_call, packed=packed_call)
MIXED_MODES = ["padded", "precomputed", "packed"]

HOLES = [True, False, True, True, False, False, True, True, False]
EQUAL = make_batch(([(1, 6, 4), (1, 4, 4)], 9), ([(1, 6, 4), (1, 4, 4)], 9))
MIXED = make_batch(([(1, 6, 10)], 7), ([(1, 4, 6), (1, 4, 6)], 12))

def random_batch(n):
    """It returns n samples of random sizes, the same in every run."""
    rng = random.Random(n)
    pictures = lambda: [(1, rng.randint(1, 8), rng.randint(1, 8)) for _ in range(rng.randint(1, 3))]
    return make_batch(*[(pictures(), rng.randint(1, 15)) for _ in range(n)])

BATCHES = {
    "one sample": make_batch(([(1, 5, 7), (1, 4, 3)], 11)),
    "mixed sizes": make_batch(([(1, 6, 10)], 9), ([(1, 12, 4)], 9), ([(1, 3, 5)], 9)),
    "equal sizes, unequal text": make_batch(([(1, 6, 6), (1, 4, 4)], 3), ([(1, 6, 6), (1, 4, 4)], 11)),
    "equal tokens": make_batch(([(1, 4, 16)], 9), ([(1, 8, 8)], 9), ([(1, 4, 8), (1, 8, 4)], 9)),
    # layer3d takes the text's position in the last sample from the number of its pictures, not from their size
    "one to six pictures": make_batch(([(1, 8, 8)], 7), ([(1, 4, 6), (1, 7, 5)], 1),
                                      ([(1, 3, 3), (1, 2, 9), (1, 6, 2)], 14), ([(1, 2, 2)] * 6, 5)),
    "holes in the text": make_batch(([(1, 6, 10)], 9, HOLES), ([(1, 4, 6), (1, 4, 6)], 12),
                                    ([(1, 5, 5)], 2, [False, False])),
    "twelve samples": random_batch(12),
}

def batch_for(mode):
    """It returns samples that the mode can take: stock knows those of equal sizes only."""
    return EQUAL if mode == "stock" else MIXED

def take_apart(out, mode, samples):
    """It returns the samples' outputs without pads, which must be zero wherever a test goes."""
    if mode == "packed":
        return list(out[0].split(image_lens(samples)))
    assert all((row_IO[n:] == 0).all() for row_IO, n in zip(out, image_lens(samples)))
    return [row_IO[:n] for row_IO, n in zip(out, image_lens(samples))]

def run(model, mode, samples, **changes):
    """It returns the samples' outputs in this mode; `changes` replace arguments of the call."""
    return take_apart(model(**MODES[mode](model, samples) | changes).sample, mode, samples)

def one_by_one(model, samples, **changes):
    """It returns what the model answers to each sample alone, called as stock is."""
    return [run(model, "stock", [sample], **changes)[0] for sample in samples]

def assert_one_by_one(got, samples, stock_changes={}, **which_model):
    """`got` is what stock answers to each sample alone."""
    stock = one_by_one(hot_model(**which_model), samples, **stock_changes)
    exact = one_by_one(hot_model(dtype=torch.float32, **which_model), samples, **stock_changes)
    assert_equals_stock(got, stock, exact if DTYPE == torch.bfloat16 else None)

def with_gradients(model, samples, outputs):
    """It returns the outputs, and by name the LoRA gradients of the samples' summed losses."""
    # a dead parameter has the gradient zero
    model.zero_grad()
    torch.autograd.backward(outputs, [s.out_grad_IO.to(out) for s, out in zip(samples, outputs)])
    return dict(enumerate(outputs)) | {name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                                       for name, p in model.named_parameters() if p.requires_grad}

def everything(model, changes, *positional):
    """It returns output and all gradients, those of images and texts too, of the stock call of EQUAL with changes."""
    # `positional` names go by position
    call = stock_call(model, EQUAL) | {key: to_model(model, value) if torch.is_tensor(value) else value
                                       for key, value in changes.items()}
    model.zero_grad()
    leaves = [call[name].requires_grad_() for name in ("hidden_states", "encoder_hidden_states")]
    out = model(*[call.pop(name, None) for name in positional], **call).sample
    out.backward(to_model(model, torch.stack([s.out_grad_IO for s in EQUAL])))
    return [out, *(x.grad for x in (*leaves, *model.parameters()) if x.grad is not None)]

@functools.cache
def stock_answer(batch, variant, dtype):
    """It returns outputs and gradients of stock, one sample at a time, and remembers them."""
    model = hot_model(variant, dtype, lora=True)
    return with_gradients(model, BATCHES[batch], one_by_one(model, BATCHES[batch]))

# ---- scripts and datasets --------------------------------------------------------------------------------------------

def release_lock(names):
    """It releases the lock of a run's folder, as the end of a process does. names: train.py's globals, or others."""
    if names.get("__name__") == "__main__" and "lock" in names:
        names["lock"].release()

def run_script(script, *flags, folder=None):
    """It runs `python SCRIPT FLAGS` in this folder, or an empty one, and returns exit status, what it wrote, and its
    errors."""
    # In this process, because imports take seconds; cache.py and predict.py as the imported modules, so that a test may
    # replace functions.
    out, err = [io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace")]
    gc.collect() # models of earlier runs: memory, which some tests measure
    with (tempfile.TemporaryDirectory() as empty, pytest.MonkeyPatch.context() as patch,
          contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)):
        patch.chdir(folder or empty)
        patch.setattr(sys, "argv", [script, *map(str, flags)])
        ends, real = [], atexit.register # of cache.py's function, as libraries' own are for the end of this process
        patch.setattr(atexit, "register", lambda end, *args, **options: (
            ends.append(functools.partial(end, *args)) if end.__name__ == "forget" else real(end, *args, **options)))
        names, status = {}, 0
        try:
            if script in ("cache.py", "predict.py"):
                module = {"cache.py": cache, "predict.py": predict}[script]
                module.main(module.read_flags())
            else:
                names = runpy.run_path(str(HERE / script), run_name="__main__")
        except BaseException as e:
            for frame, _ in traceback.walk_tb(e.__traceback__): # a thread may hold these for a while
                release_lock(frame.f_globals)
            if not isinstance(e, SystemExit):
                raise
            status = e.code if isinstance(e.code, int) else int(e.code is not None) # as the interpreter does it
            if isinstance(e.code, str):
                print(e.code, file=err)
        finally:
            for end in ends:
                end()
    release_lock(names)
    tqdm._instances.clear() # bars that a script left open must not move those of the next
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    errors = list(dict.fromkeys(re.findall(r"\berror: [^\r\n]*", texts[1]))) # also behind a progress bar
    return SimpleNamespace(status=status, out=texts[0], err=texts[1], errors=errors, globals=names)

def works(script, *flags, folder=None):
    """It runs a script likewise, which has to succeed."""
    result = run_script(script, *flags, folder=folder)
    assert result.status == 0, result.err
    return result

def paste(command):
    """It returns the words that a shell makes of a line."""
    got = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True).stdout
    return os.fsdecode(got).split("\0")[:-1]

def encoder_flags(**changes):
    """The command line gives these flags to the functions that encode."""
    return SimpleNamespace(**dict(dtype="float32", vae_device="cpu", text_encoder_device="cpu", cache_dir="encoded",
                                  max_sequence_length=1024, quantize_text_encoder="none") | changes)

def is_whole(path, key):
    """Whether predict.py has saved this picture with this key, and no bit of it has changed since."""
    return result_files.is_finished(path, key)

def results_of(folder):
    """{a result's name without its key: path} of the pictures of predict.py below a folder; its sheet is "sheet"."""
    found = {}
    for path in folder.rglob("*.png"):
        name = path.relative_to(folder).with_suffix("").as_posix()
        found[re.sub(r"-[0-9a-f]{8}$", "", name)] = path
    return found

def paint_picture(size=(64, 64), seed=0, mode="RGB"):
    """It returns a picture that is smooth, colourful, not symmetric, and another one for every seed."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize(size, Image.BICUBIC).convert(mode)

def save(image, path, **options):
    """It saves a picture, makes the folder for it, and returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path

def write_jobs(folder, rows):
    """It writes a list for predict.py --jobs, and returns its path."""
    (folder / "jobs.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")
    return folder / "jobs.jsonl"

def add_item(data, name, sizes=((64, 64), (64, 64)), caption="add a red border", mask=None):
    """It writes target/NAME.png of the first size, control/NAME.png, NAME_1.png, ... of the others, target/NAME.txt."""
    seed = zlib.crc32(name.encode(errors="surrogateescape"))
    for k, size in enumerate(sizes):
        file = f"target/{name}.png" if k == 0 else f"control/{name}.png" if k == 1 else f"control/{name}_{k - 1}.png"
        save(paint_picture(size, seed=(seed, k)), data / file)
    (data / f"target/{name}.txt").write_text(caption, "utf-8")
    if mask:
        save(mask, data / f"mask/{name}.png")
    return data

def natural(rng, size):
    """It returns a picture like a photo, with noise of all sizes."""
    out = np.zeros((size[1], size[0], 3))
    for cells, height in ((3, 70), (7, 40), (16, 22), (40, 12)):
        noise = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)).resize(size, Image.BICUBIC)
        out += height * (np.asarray(noise) / 127.5 - 1)
    return Image.fromarray((out + rng.integers(70, 190, 3)).clip(0, 255).astype(np.uint8))

def random_colour(rng):
    """It returns any colour."""
    return tuple(rng.integers(0, 256, 3).tolist())

def put_shape(rng, image):
    """It puts an ellipse or a rectangle anywhere in the picture, and returns its box."""
    (w, h), (bw, bh) = image.size, rng.uniform(0.12, 0.35, 2) * image.size
    x, y = rng.uniform(0, w - bw), rng.uniform(0, h - bh)
    pen, box = ImageDraw.Draw(image), (x, y, x + bw, y + bh)
    (pen.ellipse if rng.random() < 0.5 else pen.rectangle)(box, random_colour(rng))
    return box

def edited_pair(rng, kind, size):
    """It returns a control like a photo with sharp shapes, and the target that this kind of edit makes of it."""
    control = natural(rng, size)
    for _ in range(rng.integers(2, 6)):
        box = put_shape(rng, control)
    target, (w, h), colour = control.copy(), size, random_colour(rng)
    pen = ImageDraw.Draw(target)
    if kind in ("object", "remove"):
        put_shape(rng, target if kind == "object" else control)
    elif kind == "recolour":
        ImageDraw.Draw(control).rectangle(box, random_colour(rng))
        pen.rectangle(box, colour)
    elif kind == "border":
        pen.rectangle((0, 0, w - 1, h - 1), outline=colour, width=int(min(size) * rng.uniform(0.03, 0.12)))
    elif kind == "frame":
        pen.rectangle((w * 0.15, h * 0.15, w * 0.85, h * 0.85), outline=colour, width=min(size) // 20)
    elif kind == "half":
        halves = (0, 0, w // 2, h), (0, 0, w, h // 2), (w // 2, 0, w, h), (0, h // 2, w, h)
        pen.rectangle(halves[rng.integers(4)], colour)
    elif kind == "background":
        mask, edge = Image.new("L", size), rng.uniform(0.12, 0.25)
        ImageDraw.Draw(mask).ellipse((w * edge, h * edge, w * (1 - edge), h * (1 - edge)), 255)
        behind = natural(rng, size) if rng.random() < 0.5 else Image.new("RGB", size, colour)
        target = Image.composite(control, behind, mask)
    elif kind == "blur":
        box = w // 5, h // 5, w * 4 // 5, h * 7 // 10
        target.paste(target.crop(box).filter(ImageFilter.GaussianBlur(min(size) / 30)), box)
    elif kind == "grain":
        target = Image.fromarray((np.asarray(target) + rng.normal(0, 12, (h, w, 3))).clip(0, 255).astype(np.uint8))
    else:
        target.paste(natural(rng, (w // 2, h // 2)), (rng.integers(w // 2), rng.integers(h // 2)))
    return control, target

def toy_functions():
    """It returns what draws the toys, by name: tiny/make_data.py."""
    return runpy.run_path(str(TINY / "make_data.py"))

def copy_model(folder, *without):
    """It copies tiny without its pictures and scripts, and without files of these patterns."""
    pictures = ["data", "val", "known", "toys", "source", "*.png", "*.jpg"]
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns(*pictures, "*.py", *without))
    return folder

def as_strangers(model):
    """It makes a copy of tiny a stranger's, which has no defaults: tiny is known by the bytes of its config."""
    config = model / "transformer/config.json"
    config.write_text(config.read_text("utf-8").replace('dim": 64', 'dim":64'), "utf-8")
    return model

def as_v1(model):
    """It makes tiny a Qwen-Image-Edit v1: the same weights, the other pipeline class."""
    index = json.loads((model / "model_index.json").read_bytes())
    (model / "model_index.json").write_text(json.dumps(index | {"_class_name": "QwenImageEditPipeline"}), "utf-8")
    return model

def samples_of(pipe, data, texts=None, **geometry):
    """It returns a dataset's planned samples by name, and what is wrong with it; pictures keep their sizes."""
    problems, samples = [], []
    data = data if isinstance(data, list) else [data]
    for root in data:
        found, wrong = dataset.read_dataset(root)
        samples, problems = samples + found, problems + wrong
    texts = texts or (lambda s: [(prompt, True) for prompt in s.prompts])
    geometry = dict(target_pixels=["native"], control_pixels="native", upscale=True) | geometry
    good, wrong = cache.plan_samples(pipe, samples, texts, geometry, encoder_flags(dtype=DTYPE_NAME))
    return {s.name: s for s in good}, problems + wrong

def encode(pipe, sample, prompt=None):
    """It returns the sample's tensors at its first resolution, encoded now."""
    key = (sample.prompts[0] if prompt is None else prompt, True)
    text, = cache.encode_texts(pipe, [key], cache.read_pictures(pipe, sample, "text", key))
    return cache.encode_latents(pipe, sample, sample.encodings[0]) | text

def make_cache(data, cache_dir, *flags):
    """It encodes a dataset with cache.py, and returns the result of run_script."""
    return run_script("cache.py", "--data", data, "--cache_dir", cache_dir, "--val_data", *ON_DEVICE, *flags)

def index_of(cache_dir):
    """It returns the samples of the one dataset in a cache folder, by name."""
    index, = [p for p in Path(cache_dir).glob("*.json")]
    return {s.name: s for s in index_file.read_index(index)[0]}

def load(cache_dir, name=None):
    """It returns one sample's tensors, as they lie in the files, and its entry in the index."""
    samples = index_of(cache_dir)
    sample = samples[name or next(iter(samples))]
    files = sample.encodings[0]["file"], sample.texts[sample.prompts[0], True]["file"]
    latents, text = [tensor_files.read_tensors(file, key=file.stem)[0] for file in files]
    return latents | text, sample

def assert_same(got, want):
    """The tensors of two samples agree in dtype and in every bit, whatever devices they are on."""
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype and torch.equal(got[name].cpu(), want[name].cpu()), name

def files_of(folder):
    """It returns the paths of all files in a folder."""
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())

def cached_files(cache_dir):
    """It returns the files of a cache with their times, which change when a file is written again."""
    return {p.relative_to(cache_dir): p.stat().st_mtime_ns for p in Path(cache_dir).glob("*/*")}

def job_of(pipe, images, tmp_path, area=64 * 64, seed=3, prompt="add a red border", **settings):
    """It returns what predict.py makes of its flags: a sample, encoded, and read from the cache for denoise()."""
    sample = dataset.make_sample("--prompt", images[0], "a", None, images, [prompt])
    settings = predict.Settings(**dict(command_line.SAMPLING, num_inference_steps=3, seed=seed) | settings)
    geometry = dict(target_pixels=[area], control_pixels=area, upscale=True, height=settings.height,
                    width=settings.width, size_from=settings.size_from)
    planned = cache.plan_sample(pipe, sample, [(prompt, True), (settings.negative_prompt, True)], geometry,
                                cache.encoder_fingerprints(Path(pipe.name_or_path), tmp_path / "c"),
                                encoder_flags(cache_dir=tmp_path / "c"))
    return predict.load_job(planned, settings, "cpu", pipe)

class Reader(HTMLParser): # a class because HTMLParser calls its methods
    """It reads a page as a browser does: the tags with their attributes, the texts of each kind of tag."""
    def __init__(self, path):
        super().__init__()
        self.tags, self.texts, self.open = [], {}, []
        self.feed(path.read_text("utf-8"))
        self.pictures = [attributes for tag, attributes in self.tags if tag == "img" and "src" in attributes]

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "input"):
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        while self.open.pop() != tag:
            pass

    def handle_data(self, text):
        for tag in set(self.open):
            self.texts[tag][-1] += text

# ---- refusals --------------------------------------------------------------------------------------------------------

def is_one_line(line, *named):
    """It tells a line that a person can act on: error: <file or flag>: <what is wrong>; <what to do>."""
    return bool(re.fullmatch(r"error: \S.*: .+; .+", line)) and all(str(n) in line for n in named)

@contextlib.contextmanager
def refused(*named):
    """The block raises an InputError of that form, which names these. Yields pytest's info of it."""
    with pytest.raises(common.InputError) as e:
        yield e
    assert is_one_line(str(e.value), *named), e.value

@contextlib.contextmanager
def within(seconds):
    """The test fails if the block computes for so many seconds, or waits for long, as one does that reads a FIFO."""
    # processor time, as other work of a busy machine must not count
    clocks = (signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, 10 * seconds)

    def stop(number, _):
        pytest.fail(f"computes for {seconds} s" if number == signal.SIGPROF else f"waits for {10 * seconds} s")
    before = [signal.signal(number, stop) for _, number, _ in clocks]
    try:
        for clock, _, limit in clocks:
            signal.setitimer(clock, limit)
        yield
    finally:
        for (clock, number, _), handler in zip(clocks, before):
            signal.setitimer(clock, 0)
            signal.signal(number, handler)

# ---- damages ---------------------------------------------------------------------------------------------------------

def flip(bit):
    """It returns a function that flips this bit of bytes."""
    return lambda data: data[:bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1:]

def damage_tensors(path):
    """It flips one bit near the end of the file, where the tensors are."""
    path.write_bytes(flip(8 * (path.stat().st_size - 100))(path.read_bytes()))

def change_weight(part):
    """It changes one weight of one tensor, by one part in a hundred."""
    file, = part.glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    tensors[max(tensors)].view(-1)[0] += 0.01 * tensors[max(tensors)].abs().max()
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})

# ---- LoRA files ------------------------------------------------------------------------------------------------------

def lora_tensors(rank=2, names=("attn.to_q", "attn.to_out.0", "img_mlp.net.2"), blocks=(0, 1), prefix="transformer."):
    """It returns a random LoRA for tiny, in diffusers' form."""
    weights = safetensors.torch.load_file(TINY / "transformer/diffusion_pytorch_model.safetensors")
    rng, tensors = torch.Generator().manual_seed(0), {}
    for layer in [f"transformer_blocks.{b}.{name}" for b in blocks for name in names]:
        out_len, in_len = weights[f"{layer}.weight"].shape
        tensors[f"{prefix}{layer}.lora_A.weight"] = torch.randn(rank, in_len, generator=rng)
        tensors[f"{prefix}{layer}.lora_B.weight"] = torch.randn(out_len, rank, generator=rng)
    return tensors

def renamed(old, new):
    """It returns a function that renames a LoRA's tensors."""
    return lambda tensors: {k.replace(old, new): v for k, v in tensors.items()}

def lora_file(folder, tensors, **meta):
    """It writes a LoRA with its metadata into the folder, and returns the path."""
    path = folder / predict.LORA_FILE
    safetensors.torch.save_file(tensors, path, metadata=dict(lora_adapter_metadata=json.dumps(meta)) if meta else None)
    return path

def layers_of(tensors):
    """It returns the names of the layers that have tensors here."""
    return sorted({k.removeprefix("transformer.").rsplit(".lora_", 1)[0] for k in tensors})

# ---- runs ------------------------------------------------------------------------------------------------------------

@functools.cache
def demo_cache():
    """It encodes the demo's dataset, with the empty prompt, once for all tests."""
    folder = Path(tempfile.mkdtemp(), "cache")
    assert run_script("cache.py", "--cache_dir", folder, "--caption_dropout_rate", 0.1, "--device", DEVICE,
                      *EXACT).status == 0
    return folder

def train_demo(out_dir, *flags):
    """It trains a few steps on the demo's dataset, and returns the result of run_script."""
    return run_script("train.py", "--cache_dir", demo_cache(), "--out_dir", out_dir, "--max_steps", 3,
                      "--batch_size", 4, "--val_data", *EXACT, "--device", DEVICE, *flags)

def train_log(out_dir, *flags):
    """It trains likewise, which has to succeed, and returns the steps in the log."""
    result = train_demo(out_dir, *flags)
    assert result.status == 0, result.err
    return log_of(out_dir)

def globals_of_train(out_dir, *flags):
    """It returns train.py's functions, after a run of one step with these flags."""
    result = train_demo(out_dir, "--max_steps", 1, *flags)
    assert result.status == 0, result.err
    return result.globals

@functools.cache
def recipe():
    """train.py's names, after one step with its default flags; shared, so a test changes none of them."""
    return globals_of_train(Path(tempfile.mkdtemp(), "run"))

def train(data, tmp_path, *flags):
    """It trains two steps on a dataset or an index, and returns the result of run_script, with the losses."""
    out_dir = tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}"
    result = run_script("train.py", "--data", data, "--val_data", "--out_dir", out_dir, "--max_steps", 2,
                        "--batch_size", 2, "--lora_rank", 2, *ON_DEVICE, *flags)
    result.losses = losses_of(log_of(out_dir)) if (out_dir / "log.jsonl").exists() else []
    return result

def train_and_measure(run, jobs, *flags):
    """It trains into `run`, edits the dataset `jobs` with its LoRA, and returns what tools/measure.py finds."""
    results, same = run.with_name(f"{run.name}-results"), ["--cache_dir", run.parent / "cache"]
    works("train.py", "--out_dir", run, *same, *flags)
    works("predict.py", "--lora", run, "--jobs", jobs, "--out_dir", results, *same)
    return measured(works("tools/measure.py", results, jobs))

def measured(result):
    """-> {folder: {measure: value}} of the table that tools/measure.py has printed."""
    title, *lines = [line for line in result.out.splitlines() if not line.startswith("Ranges: ")]
    table = {}
    for line in lines:
        folder, *cells = line.rsplit(maxsplit=7)
        table[folder] = {name: float(cell) for name, cell in zip(title.split(), cells) if cell != "-"}
    return table

def records_of(out_dir):
    """It returns the lines of a run's log, but for the first, which has the flags."""
    return list(map(json.loads, (Path(out_dir) / "log.jsonl").read_text("utf-8").splitlines()[1:]))

def log_of(out_dir):
    """It returns the steps in a run's log; validations have lines of their own."""
    return [r for r in records_of(out_dir) if "loss" in r]

def validations_of(out_dir):
    """It returns the validations in a run's log."""
    return [r for r in records_of(out_dir) if "val_loss" in r]

def losses_of(log):
    """It returns the losses of these steps."""
    return [r["loss"] for r in log]

def curve(log):
    """It returns what must be the same in two equal runs: not the times."""
    return [(r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in log]

def lora_of(out_dir):
    """It returns the tensors of a run's LoRA."""
    return predict.read_lora(out_dir).state

def assert_same_run(out_dir, other):
    """Log and final LoRA agree in every bit; the run is finished; nothing is left behind."""
    assert curve(log_of(out_dir)) == curve(log_of(other))
    assert_bitwise(lora_of(out_dir), lora_of(other))
    assert (out_dir / "DONE").exists() and not list(out_dir.rglob(".tmp-*"))

def assert_checkpoints_whole(out_dir):
    """Every file of every checkpoint can be read."""
    for path in out_dir.glob("checkpoint-*/*.safetensors"):
        tensor_files.read_tensors(path, "lora_adapter_metadata" if path.name == predict.LORA_FILE else "json")

def steps_of(out_dir):
    """It returns the steps of which a run has checkpoints."""
    return list(map(lora_paths.number_of, lora_paths.checkpoints(out_dir)))

def killed_runs(start, small, unbroken, folder, seed, prelude=None, numbers=(9,)):
    """It starts trainings, each by one command, and sends them one of these signals at random moments, until --kills of
    them are done and all runs have ended as the unbroken one. After each process that did not end its run it yields
    (run folder, process, its status, the signal or None)."""
    rng, kills, runs = random.Random(seed), 0, 0
    while kills < OPTIONS["kills"] or (folder / f"{runs}").exists():
        out_dir, number = folder / f"{runs}", None
        before = max(steps_of(out_dir), default=0)
        process = start("train.py", *small.flags, "--out_dir", out_dir, "--resume", prelude=prelude)
        if kills < OPTIONS["kills"]:
            time.sleep(rng.uniform(0, 0.8 * unbroken.seconds))
            number = rng.choice(numbers)
            kill(process, number)
        status = process.wait()
        assert_checkpoints_whole(out_dir)
        assert max(steps_of(out_dir), default=0) >= before, "a checkpoint was lost"
        if status == 0 and (out_dir / "DONE").exists():
            assert_same_run(out_dir, unbroken.out_dir)
            runs += 1
        else:
            kills += number is not None
            yield out_dir, process, status, number
    print(f"{kills} kills of train.py in {runs} runs: all end as the unbroken one")

# ---- fixtures --------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module", autouse=True)
def nothing_old_is_searched():
    """The garbage collector leaves alone what is there when a module of tests has ended: imports, and what is kept."""
    # A compiler's imports are millions of objects, and each gc.collect() would take half a second from then on: a test
    # of a training has ten of them.
    yield
    gc.collect()
    gc.freeze()

@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """There are three pictures of different sizes and aspects."""
    folder = tmp_path_factory.mktemp("photos")
    return [save(paint_picture(size, seed), folder / f"{seed}.png")
            for seed, size in enumerate([(100, 60), (64, 128), (90, 90)])]

@pytest.fixture(scope="session")
def tiny_v1(tmp_path_factory):
    """This folder has tiny as a Qwen-Image-Edit v1."""
    return as_v1(copy_model(tmp_path_factory.mktemp("v1") / "tiny"))

@pytest.fixture
def data(tmp_path):
    """The dataset has two items: `good`, which stays so, and `cat`, which a test spoils."""
    return add_item(add_item(tmp_path / "data", "good"), "cat")

@pytest.fixture(scope="session")
def pipes(tiny_v1):
    """The tiny model is here under both names, with encoders; Plus is what 2509 and 2511 are."""
    pipes = {family: cache.load_pipeline(folder) for family, folder in (("Plus", TINY), ("v1", tiny_v1))}
    args = encoder_flags(dtype=DTYPE_NAME, vae_device=DEVICE, text_encoder_device=DEVICE)
    for pipe in pipes.values():
        for part in ("vae", "text"):
            cache.load_encoder(pipe, part, args)
    return pipes

@pytest.fixture
def plus(pipes):
    """This is the pipeline of tiny as it is."""
    return pipes["Plus"]

@pytest.fixture(scope="session")
def two_loras(tmp_path_factory):
    """There are two random LoRAs with different layers, in diffusers' form; one has rsLoRA in its metadata."""
    paths = []
    for i, names in enumerate([("attn.to_q", "attn.to_out.0"), ("attn.to_q", "img_mlp.net.2")]):
        tensors = {k: 0.05 * v for k, v in lora_tensors(rank=4, names=names).items()}
        paths.append(lora_file(tmp_path_factory.mktemp(f"lora{i}"), tensors, **{
            "transformer.r": 4, "transformer.lora_alpha": 8, "transformer.use_rslora": bool(i),
            "transformer.target_modules": layers_of(tensors)}))
    return paths

@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """It is the function of starter, whose processes take less than a second to begin."""
    start = starter(tmp_path_factory.mktemp("output"))
    start("cache.py", "-h").wait() # the fork server imports for seconds; kills are aimed by the time a process takes
    return start

@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """There are a dataset of 5 samples, its cache, flags of cache.py, and those of a training of 12 steps on it."""
    folder = tmp_path_factory.mktemp("small")
    for n in range(5):
        add_item(folder / "data", f"{n}", [(64, 64 + 32 * (n % 2)), (64, 64)])
    flags = ["--data", folder / "data", "--val_data", *EXACT, "--device", "cpu"]
    assert run_script("cache.py", *flags, "--cache_dir", folder / "cache").status == 0
    training = ["--data", folder / "cache/tiny-data.json", "--val_data", *EXACT, "--device", "cpu", "--max_steps", 12,
                "--save_every", 2, "--batch_size", 2, "--lora_rank", 2, "--lora_targets", "to_q", "to_v",
                "--lr_scheduler", "constant", "--warmup_steps", 4]
    before = files_of(folder)
    yield SimpleNamespace(folder=folder, cache=folder / "cache", cache_flags=flags, flags=training)
    # (a process that was killed leaves its list of what prune.py must not take, whole or half written)
    now = [path for path in files_of(folder) if not path.name.startswith((".planned-", ".tmp-"))]
    assert now == before, "a test has written into what all tests share"

@pytest.fixture(scope="session")
def unbroken(small, start, tmp_path_factory):
    """That training was left alone; here are its folder and seconds."""
    out_dir, t0 = tmp_path_factory.mktemp("unbroken") / "run", time.monotonic()
    process = start("train.py", *small.flags, "--out_dir", out_dir)
    assert process.wait() == 0, process.output()
    return SimpleNamespace(out_dir=out_dir, seconds=time.monotonic() - t0)
