"""
What the tests of this folder share, beside what test_consistency.py has: refusals, damages, processes to be killed. The
fixtures at the end have to be imported by a file that uses them.
"""
import contextlib
import json
import multiprocessing
import os
import re
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

import cache
import common
import predict
from test_consistency import (DEVICE, DTYPE, EXACT, HERE, TINY, add_item, encoder_flags, log_of, lora_of, run_script,
                              tiny_v1)

DTYPE_NAME = str(DTYPE).removeprefix("torch.")
ON_DEVICE = ["--dtype", DTYPE_NAME, "--device", DEVICE]

# ---- refusals --------------------------------------------------------------------------------------------------------

def is_one_line(line, *named):
    """The form that a person can act on: error: <file or flag>: <what is wrong>; <what to do>."""
    return bool(re.fullmatch(r"error: \S.*: .+; .+", line)) and all(str(n) in line for n in named)

@contextlib.contextmanager
def refused(*named):
    with pytest.raises(common.InputError) as e:
        yield
    assert is_one_line(str(e.value), *named), e.value

@contextlib.contextmanager
def within(seconds):
    """Fails if the block hangs, as reading a FIFO does."""
    def stop(*_):
        pytest.fail(f"hangs for {seconds} s")
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

# ---- samples and caches ----------------------------------------------------------------------------------------------

def samples_of(pipe, data, texts=None, **geometry):
    """A dataset's planned samples by name, and what is wrong with it. Pictures keep their sizes."""
    problems, samples = [], []
    data = data if isinstance(data, list) else [data]
    for root in data:
        found, wrong = common.read_dataset(root)
        samples, problems = samples + found, problems + wrong
    texts = texts or (lambda s: [(prompt, True) for prompt in s.prompts])
    geometry = dict(target_pixels=["native"], control_pixels="native", upscale=True) | geometry
    good, wrong = cache.plan_samples(pipe, samples, texts, geometry, encoder_flags(dtype=DTYPE_NAME), quiet=True)
    return {s.name: s for s in good}, problems + wrong

def encode(pipe, sample, prompt=None):
    """The sample's tensors at its first resolution, encoded now."""
    text = (sample.prompts[0] if prompt is None else prompt, True)
    return cache.encode_latents(pipe, sample, sample.resolutions[0]) | cache.encode_text(pipe, sample, text)

def make_cache(data, cache_dir, *flags):
    return run_script("cache.py", "--data", data, "--cache_dir", cache_dir, "--val_data", *ON_DEVICE, *flags)

def index_of(cache_dir):
    """The samples of the one dataset in a cache folder, by name."""
    index, = [p for p in Path(cache_dir).glob("*.json")]
    return {s.name: s for s in cache.read_index(index)[0]}

def load(cache_dir, name=None):
    """One sample's tensors, as they lie in the files, and its entry in the index."""
    samples = index_of(cache_dir)
    sample = samples[name or next(iter(samples))]
    files = sample.resolutions[0]["file"], sample.texts[sample.prompts[0], True]["file"]
    latents, text = [common.read_tensors(file, key=file.stem)[0] for file in files]
    return latents | text, sample

def assert_same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype and torch.equal(got[name].cpu(), want[name].cpu()), name

def cached_files(cache_dir):
    return {p.relative_to(cache_dir): p.stat().st_mtime_ns for p in Path(cache_dir).glob("*/*")}

def train(data, tmp_path, *flags):
    """Two steps -> result of run_script, with the losses. data: a dataset or an index."""
    out_dir = tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}"
    result = run_script("train.py", "--data", data, "--val_data", "--out_dir", out_dir, "--max_steps", 2,
                        "--batch_size", 2, "--lora_rank", 2, *ON_DEVICE, *flags)
    result.losses = [r["loss"] for r in log_of(out_dir)] if (out_dir / "log.jsonl").exists() else []
    return result

def toy_functions():
    """What draws the toys, by name: tiny/make_data.py."""
    return runpy.run_path(str(TINY / "make_data.py"))

def train_and_measure(run, jobs, *flags):
    """Trains into `run`, edits the dataset `jobs` with its LoRA -> what tools/measure.py finds, by folder."""
    drawn, same = run.with_name(f"{run.name}-drawn"), ["--cache_dir", run.parent / "cache"]
    for script, *more in (["train.py", "--out_dir", run, *same, *flags],
                          ["predict.py", "--lora", run, "--jobs", jobs, "--out_dir", drawn, *same],
                          ["tools/measure.py", drawn, jobs, "--json", drawn / "measured.json"]):
        result = run_script(script, *more)
        assert result.status == 0, result.err
    return json.loads((drawn / "measured.json").read_text())

# ---- damages ---------------------------------------------------------------------------------------------------------

def flip(bit):
    return lambda data: data[:bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1:]

def damage_tensors(path):
    """One bit near the end of the file, where the tensors are."""
    path.write_bytes(flip(8 * (path.stat().st_size - 100))(path.read_bytes()))

def change_weight(part):
    """One weight of one tensor, by one part in a hundred."""
    file, = part.glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    tensors[max(tensors)].view(-1)[0] += 0.01 * tensors[max(tensors)].abs().max()
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})

# ---- LoRA files ------------------------------------------------------------------------------------------------------

def lora_tensors(rank=2, names=("attn.to_q", "attn.to_out.0", "img_mlp.net.2"), blocks=(0, 1), prefix="transformer."):
    """A random LoRA for tiny, in diffusers' form."""
    weights = safetensors.torch.load_file(TINY / "transformer/diffusion_pytorch_model.safetensors")
    rng, tensors = torch.Generator().manual_seed(0), {}
    for layer in [f"transformer_blocks.{b}.{name}" for b in blocks for name in names]:
        out_len, in_len = weights[f"{layer}.weight"].shape
        tensors[f"{prefix}{layer}.lora_A.weight"] = torch.randn(rank, in_len, generator=rng)
        tensors[f"{prefix}{layer}.lora_B.weight"] = torch.randn(out_len, rank, generator=rng)
    return tensors

# ---- processes of their own, to be killed ----------------------------------------------------------------------------

def in_child(script, flags, env, prelude, output):
    """`python SCRIPT FLAGS` in a process that has its imports behind it. prelude(): runs in it first."""
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)
    os.environ.update(env)
    sys.argv = [str(HERE / script), *map(str, flags)]
    signal.signal(signal.SIGINT, signal.default_int_handler) # the server of forks ignores it
    torch.set_num_threads(1)
    status = 0
    try:
        if prelude:
            prelude()
        {"cache.py": cache.main, "predict.py": predict.main}.get(
            script, lambda: runpy.run_path(str(HERE / script), run_name="__main__"))()
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        print(e.code if isinstance(e.code, str) else "")
    except BaseException:
        sys.excepthook(*sys.exc_info()) # as the interpreter does it
        status = 1
    sys.stdout.flush()
    os._exit(status)

def starter(folder):
    """-> start(script, *flags, env={}, prelude=None): a process of its own: pid, wait() -> status (-9 of SIGKILL),
    alive(), output(). Forked after the imports, so that it costs less than a second."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["predict", "tests.harness"])

    def start(script, *flags, env={}, prelude=None):
        output = folder / f"{len(list(folder.iterdir()))}.txt"
        output.touch()
        process = forks.Process(target=in_child, args=(script, flags, env, prelude, str(output)))
        process.start()

        def wait():
            process.join()
            return process.exitcode
        return SimpleNamespace(pid=process.pid, wait=wait, alive=process.is_alive, output=output.read_text)
    return start

def start_ranks(start, *flags, preludes=(None, None), script="train.py"):
    """A script with a process per prelude, as torchrun starts them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = dict(WORLD_SIZE=str(len(preludes)), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return [start(script, *flags, env=env | {"RANK": str(n)}, prelude=p) for n, p in enumerate(preludes)]

def kill(process, number=signal.SIGKILL):
    """If it still runs."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)

def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)

def error_of(process):
    """The error line that a process has written."""
    return re.search(r"error: .*", process.output())[0]

# ---- runs ------------------------------------------------------------------------------------------------------------

def curve_of(out_dir):
    return [(r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in log_of(out_dir)]

def assert_same_run(out_dir, other):
    """Log and final LoRA, bit for bit; finished; nothing left behind."""
    assert curve_of(out_dir) == curve_of(other)
    a, b = lora_of(out_dir), lora_of(other)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert (out_dir / "DONE").exists() and not list(out_dir.rglob(".tmp-*"))

def assert_checkpoints_whole(out_dir):
    for path in out_dir.glob("checkpoint-*/*.safetensors"):
        common.read_tensors(path, "lora_adapter_metadata" if path.name == predict.LORA_FILE else "json")

def steps_of(out_dir):
    return sorted(int(p.name[-6:]) for p in out_dir.glob("checkpoint-*"))

# ---- fixtures --------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="session")
def pipes(tiny_v1):
    """The tiny model under both names, with encoders. Plus is what 2509 and 2511 are."""
    pipes = {family: cache.load_pipeline(folder) for family, folder in (("Plus", TINY), ("v1", tiny_v1))}
    args = encoder_flags(dtype=DTYPE_NAME, vae_device=DEVICE, text_encoder_device=DEVICE)
    for pipe in pipes.values():
        for part in ("vae", "text"):
            cache.load_encoder(pipe, part, args)
    return pipes

@pytest.fixture
def plus(pipes):
    return pipes["Plus"]

@pytest.fixture(scope="session")
def start(tmp_path_factory):
    start = starter(tmp_path_factory.mktemp("output"))
    start("cache.py", "-h").wait() # the fork server imports for seconds; kills are aimed by the time a process takes
    return start

@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A dataset of 5 samples and its cache; flags of cache.py, and of a training of 12 steps on it."""
    folder = tmp_path_factory.mktemp("small")
    for n in range(5):
        add_item(folder / "data", f"{n}", [(64, 64 + 32 * (n % 2)), (64, 64)])
    flags = ["--data", folder / "data", "--val_data", *EXACT, "--device", "cpu"]
    assert run_script("cache.py", *flags, "--cache_dir", folder / "cache").status == 0
    training = ["--data", folder / "cache/tiny-data.json", "--val_data", *EXACT, "--device", "cpu", "--max_steps", 12,
                "--save_every", 2, "--batch_size", 2, "--lora_rank", 2, "--lora_targets", "to_q", "to_v",
                "--lr_scheduler", "constant", "--warmup_steps", 4]
    return SimpleNamespace(folder=folder, cache=folder / "cache", cache_flags=flags, flags=training)

@pytest.fixture(scope="session")
def unbroken(small, start, tmp_path_factory):
    """That training, left alone -> its folder and seconds."""
    out_dir, t0 = tmp_path_factory.mktemp("unbroken") / "run", time.monotonic()
    process = start("train.py", *small.flags, "--out_dir", out_dir)
    assert process.wait() == 0, process.output()
    return SimpleNamespace(out_dir=out_dir, seconds=time.monotonic() - t0)
