"""
Runs the scripts of this project on an imitated card, with the real model's shapes and no weights.

A server process loads the guard and imports everything once; each run is a fork of it, because a run changes much that
cannot be changed back. Of the project two functions are replaced: cache.load_part, which reads weights from files, and
for several ranks common.on_first_process. The host has 512 GiB of memory.

$ python -m tests.fake_card.program LIBGUARD    # a line of JSON in: the arguments of `run`; a line out: what it returns
"""
import gc
import io
import json
import os
import sys
import time
import traceback
from pathlib import Path

if __name__ == "__main__":
    from tests.fake_card import guard
    guard.load(sys.argv[1], 8)

import runpy
from types import SimpleNamespace

import psutil
import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from transformers import Qwen2_5_VLConfig

import cache
import common
from library.data import dataset, index_file
from library.files import tensor_files
from library.models import environment, host_memory
import predict
from tests.fake_card import card as fake
from training import memory_fit

HERE = Path(cache.__file__).parent

# ---- a model's folder, and encoded samples: what a training reads ----------------------------------------------------

# Qwen2.5-VL-7B; what is not here is as in tiny
TEXT = dict(hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_hidden_layers=28,
            num_key_value_heads=4, vocab_size=152064, max_position_embeddings=128000, max_window_layers=28,
            layer_types=["full_attention"] * 28, rms_norm_eps=1e-6,
            rope_parameters=dict(mrope_section=[16, 24, 24], rope_theta=1e6, rope_type="default"))
VISION = dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=3584,
              fullatt_block_indexes=[7, 15, 23, 31])

def write_model(folder, blocks, zero_cond_t):
    """A folder like that of Qwen-Image-Edit-2511 (zero_cond_t), or of v1, with all configs and no weights."""
    tiny, folder = HERE / "tiny", Path(folder)
    v1 = "" if zero_cond_t else "QwenImageEditPipeline"
    for part in ("scheduler", "tokenizer", "processor", "text_encoder", "vae", "transformer"):
        (folder / part).mkdir(parents=True)
        for file in (tiny / part).glob("*.json"):
            (folder / part / file.name).write_text(file.read_text("utf-8"), "utf-8")
    index = json.loads((tiny / "model_index.json").read_bytes())
    (folder / "model_index.json").write_text(json.dumps(index | ({"_class_name": v1} if v1 else {})), "utf-8")

    with init_empty_weights(): # diffusers' defaults are the real models' shapes
        transformer = QwenImageTransformer2DModel(num_layers=blocks, zero_cond_t=zero_cond_t)
        vae = AutoencoderKLQwenImage()
    transformer.save_config(folder / "transformer")
    vae.save_config(folder / "vae")

    def change(file, how):
        content = json.loads(file.read_bytes())
        how(content)
        file.write_text(json.dumps(content), "utf-8")

    def as_real(config):
        config["text_config"].update(TEXT)
        config["vision_config"].update(VISION)
    change(folder / "text_encoder/config.json", as_real)
    limits = dict(shortest_edge=56 * 56, longest_edge=28 * 28 * 1280)
    change(folder / "processor/preprocessor_config.json", lambda c: c.update(
        min_pixels=limits["shortest_edge"], max_pixels=limits["longest_edge"], size=limits))

def write_samples(folder, samples, dtype=torch.bfloat16):
    """An index of encoded samples, as cache.py would write it -> its path. samples: [dict(name, shapes: in tokens, the
    target first, text: tokens, mask: True or False)]."""
    folder, written = Path(folder), []
    for sample in samples:
        name, (target, *controls) = sample["name"], [h * w for _, h, w in sample["shapes"]]
        file = folder / f"latents/{common.content_key(name=name)}.safetensors"
        tensors = dict(pixel_latent=torch.zeros(target, 64, dtype=dtype),
                       control_latent=torch.zeros(sum(controls), 64, dtype=dtype),
                       img_shapes=torch.tensor(sample["shapes"]))
        if sample.get("mask"):
            tensors["edit_mask"] = torch.full((target,), 0.5)
        tensor_files.write_tensors(file, tensors, dict(version=tensor_files.VERSION, key=file.stem))
        texts = {}
        for prompt in ("make it snow", "", " "):
            text = folder / f"text/{common.content_key(name=name, prompt=prompt)}.safetensors"
            embed = dict(prompt_embed=torch.zeros(sample["text"], 3584, dtype=dtype))
            embed = embed if prompt else {f"empty_{key}": value for key, value in embed.items()}
            tensor_files.write_tensors(text, embed, dict(version=tensor_files.VERSION, key=text.stem))
            texts[prompt, True] = dict(tokens=sample["text"], file=text)
        pixels = [(16 * w, 16 * h) for _, h, w in sample["shapes"]]
        pictures = [f"{name}.png", *[f"{name}_{n}.png" for n in range(len(controls))]] # which are not here any more
        written.append(dataset.Planned(
            name, "data", pictures[1:], ["make it snow"], target=pictures[0], sizes=pixels, prompt_sizes=[],
            texts=texts,
            encodings=[dict(img_shapes=sample["shapes"], file=file)], contents=dict.fromkeys(pictures, "0" * 64)))
    geometry = dict(target_pixels=[1024 * 1024], control_pixels=1024 * 1024, upscale=True)
    index_file.write_index(folder / "index.json", written, geometry, {})
    return folder / "index.json"

# ---- one run ---------------------------------------------------------------------------------------------------------

def empty_part(card):
    """cache.load_part, but the weights are not read: they are fake tensors on the CPU, which take no memory."""
    def load_part(cls, folder, dtype):
        with init_empty_weights():
            if hasattr(cls, "load_config"): # diffusers
                model = cls.from_config(cls.load_config(folder))
            else:
                model = cls._from_config(Qwen2_5_VLConfig.from_pretrained(folder))
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    with card.fake:
                        p = torch.empty(p.shape, dtype=getattr(torch, dtype))
                    module._parameters[name] = torch.nn.Parameter(p, requires_grad=False)
        return model.eval()
    return load_part

def run(script, flags, folder, card, env={}, prelude=""):
    """Runs a script in this process, on an imitated card -> dict(status, out, readings, ...). folder: where it runs;
    card: arguments of Card, or None for the CPU; env: variables of the environment; prelude: Python that comes
    first."""
    os.chdir(folder)
    os.environ.update(env)
    torch.set_num_threads(1)
    if script == "train.py" and "--lr" not in flags: # the card computes nothing, and a gradient of 0 would end the run
        flags = [*flags, "--lr", "0"]
    sys.argv = [script, *flags]
    out, status, began, on = io.TextIOWrapper(io.BytesIO(), "utf-8"), 0, time.process_time(), None
    sys.stdout = sys.stderr = out
    seen = SimpleNamespace(loaded=[]) # for preludes: what they note comes back
    try:
        if card:
            on = fake.Card(**card)
            cache.load_part = empty_part(on)
            environment.no_card = lambda: False
            host = SimpleNamespace(available=2**39, total=2**39) # what is pinned takes no memory, too
            psutil.virtual_memory, host_memory.OWN_GROUPS = lambda: host, "/nowhere"
            on.__enter__()
            if "WORLD_SIZE" in env:
                fake.join_group(on)
                # what the first process would send to the others, each makes for itself, but for what is written
                common.on_first_process = lambda make: None if env["RANK"] != "0" and hasattr(make, "func") else make()
        exec(prelude, globals() | dict(on=on, seen=seen))
        if script in ("cache.py", "predict.py"):
            module = dict(cache=cache, predict=predict)[script[:-3]]
            module.main(module.read_flags())
        elif script:
            runpy.run_path(str(HERE / script), run_name="__main__")
    except SystemExit as e: # as the interpreter does it
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        print(e.code if isinstance(e.code, str) else "")
    except BaseException:
        traceback.print_exc()
        status = 1
    out.flush()
    answer = dict(status=status, out=out.buffer.getvalue().decode(), seconds=time.process_time() - began, **vars(seen))
    if on:
        answer |= dict(readings=[*on.readings, on.reading()])
    return answer

def serve():
    """Forks for each line that comes in, and passes on what `run` returns."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    gc.freeze() # the imports need not be searched by each gc.collect() of a run: 0.4 s each, and a run may have 60
    answers.write("ready\n")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            answers.write(json.dumps(run(**json.loads(line)), default=str) + "\n")
            answers.flush()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status: # it has crashed and said nothing
            answers.write(json.dumps(dict(status=-1, out=f"the process ended with {status}", readings=[])) + "\n")

if __name__ == "__main__":
    serve()
