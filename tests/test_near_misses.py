"""
Near misses: what is nearly right is answered at once with what is probably meant.

$ python -m pytest -q tests/test_near_misses.py    # 10 seconds
"""
import json
import os
import random
import shlex
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import common
from library.cli import flag_types
from library.data import dataset
from library.lora import lora_paths
from library.models import environment, hub
from tests.harness import (HERE, add_item, is_one_line, lora_file, lora_tensors, paint_picture, refused, run_script,
                           save)

def answer(script, *flags, status):
    """The one line that this command ends with."""
    result = run_script(script, *flags)
    assert result.status == status and len(result.err.splitlines()) == 1, result.err
    assert is_one_line(result.errors[0])
    return result.errors[0]

# ---- the first hour: what is typed, and what the one line must hold to help ------------------------------------------

RUN, MODEL = "out/tiny-photos-001", "Qwen/Qwen-Image-Edit-2509"
PHOTO = "predict.py --image photo.jpg --prompt x " # a command to which a slip is added
PAIRS = "train.py --data photos "
LONG = "make it warm, " * 30
WARM = "python predict.py --image photo.jpg --prompt 'make it warm'"
MISSES = [
    # words without their flag
    ("predict.py photo.jpg 'make it warm'", WARM), ("predict.py --image photo.jpg make it warm", WARM),
    ("predict.py --image photo.jpg --prompt make it warm", WARM), ("predict.py make it warm --image photo.jpg", WARM),
    ("predict.py --image photo.jpg --prompt \u201cmake it warm\u201d", WARM), # a web page's quotes
    ('predict.py --image photo.jpg --prompt "\'make" it "warm\'"', WARM), # what cmd.exe makes of 'make it warm'
    ("predict.py photo.jpg", "--image photo.jpg --prompt TEXT"), ("predict.py 'make it warm'", "--image PICTURE"),
    ("predict.py photo.jpg cat.png --prompt x", "--prompt x --image photo.jpg cat.png"),
    (f"{PHOTO}{RUN}", f"--lora {RUN}"), (f"{PHOTO}{MODEL}", f"--model {MODEL}"),
    ("predict.py jobs.jsonl", "--jobs jobs.jsonl"),
    ("train.py photos", "train.py --data photos"), ("train.py photos --max_steps 5", "--max_steps 5 --data photos"),
    ("train.py config.yaml", "tools/import_data.py config.yaml OUT"), ("train.py config.toml", "import_data.py"),
    ("cache.py photos", "cache.py --data photos"), ("tools/gpu_check.py speed", "gpu_check.py --stages speed"),
    ("tools/import_data.py before after pairs", "import_data.py pairs --target after --control before"),
    (PHOTO + "--seed=1 1", "1: belongs to no flag; leave it out"),
    (PAIRS + "--warmup_steps 5 -1", "-1: belongs to no flag"),
    # a text is longer than a name can be; what would not be taken is not advised
    (f"predict.py photo.jpg '{LONG}'", f"python predict.py --image photo.jpg --prompt '{LONG}'"),
    (f"predict.py --image photo.jpg '{LONG}'", f"python predict.py --image photo.jpg --prompt '{LONG}'"),
    (f"predict.py --prompt x --image '{LONG}'", "--image: longer than a file's name can be; shorten it"),
    (f"train.py --model '{LONG}'", "--model: longer than"), (f"tools/doctor.py '{LONG}'", "longer than a file's name"),
    (PHOTO + f"--lora '{LONG}'", "--lora: longer than"), (PAIRS + f"--transformer '{LONG}'", "--transformer: longer"),
    ("predict.py --image 'make it warm'", "python predict.py --image PICTURE --prompt 'make it warm'"),
    ("predict.py photo.jpg make it 2 times larger", "--image photo.jpg --prompt 'make it 2 times larger'"),
    ("predict.py --image=photo.jpg cat.png 'make it warm'", "--image photo.jpg cat.png --prompt 'make it warm'"),
    (PAIRS + f"--model {MODEL} {MODEL}", "2509: belongs to no flag; leave it out, or put"),
    (PAIRS + "-- --seed", ": belongs to no flag; leave it out"),
    ("tools/import_data.py before after pairs --prompt x", "pairs --target after --control before --prompt x"),
    ("train.py --seed 1 '' ' '", "'': belongs to no flag; leave it out"),
    # what a stranger typed, and was not helped
    ("train.py \u2013-data photos", "long dash, of a word processor; type --data"),
    ("train.py help", "for all flags give -h"), ("train.py /?", "for all flags give -h"),
    (PAIRS + "--control_pixels", "give 1024x1024, 512x512 or native"), (PAIRS + "--quantize 4bit", "give nf4"),
    (PAIRS + "--cache_dir photos", "--cache_dir: photos is a dataset; give another folder"),
    ("train.py data=photos", "give --data photos"),
    (PAIRS + "--lora_rank 100000", "give 1 to 3072"), (PHOTO + f"--lora_weights {RUN}", f"here --lora {RUN}"),
    (PAIRS + "--gradient_accumulation_steps 4", "here --batch_size N, your batch times the accumulation"),
    (PAIRS + "--save_steps 50 --validation_steps 9", "here --save_every 50; --validation_steps: unknown; here --"),
    (PAIRS + "--height 512", "here --target_pixels 512x512"), (PAIRS + "--deepspeed", "here --fsdp"),
    ("train.py --config config.yaml", "tools/import_data.py config.yaml OUT prints"),
    ("train.py --data s3://bucket/photos", "an address; copy what is there into a folder"),
    ("predict.py --image photos --prompt x", "a dataset, with its targets; give photos/control, or --jobs photos"),
    (PHOTO + "--lora sdxl.safetensors", "looks like a UNet (Stable Diffusion, SDXL)"),
    (PHOTO + "--out_dir edited.jpg", "give --out edited.png"), (PHOTO + "--model Qwen/Qwen-Image-Edit-2512",
                                                                "may be no model: give Qwen/Qwen-Image-Edit-2511"),
    (PAIRS + "--quantize 4bit --blocks_to_swap 20", "nearest; --blocks_to_swap: unknown; here --offload 20"),
    (f"tools/prune.py {RUN}/checkpoint-000200", f"a run's checkpoint: rm -r {RUN}/checkpoint-000200"),
    (PAIRS + "--rank 100000", "here --lora_rank (100000 is out of range; give 1 to 3072)"),
    (PAIRS + "--train_batch_size 4", "here --batch_size 4"),
    ("predict.py --image photos/control --prompt x --out_dir photos", "--out_dir photos: a dataset; leave it out"),
    ("tools/doctor.py config.yaml", "tools/import_data.py config.yaml OUT"),
    ("tools/doctor.py photos photos", "given twice; give each once"),
    ("tools/import_data.py pairs config.yaml", "tools/import_data.py config.yaml pairs"),
    ("tools/import_data.py config.yaml pairs --hold_out 20%", "give one, such as 10"),
    ("tools/import_data.py --target after --control before pairs",
     "tools/import_data.py pairs --target after --control before"),
    ("tools/import_data.py pairs --target after --control_path before", "here --control before"),
    (f"tools/measure.py {RUN} photos", f"predict.py --lora {RUN} --jobs photos --out_dir edited"),
    ("tools/measure.py edited photos", "edited: no folder of results"),
    (f"tools/prune.py {RUN}", "--keep N keeps fewer"), ("tools/gpu_check.py", "take one that has, or give cpu"),
    # a flag without its value, or a value without need
    ("predict.py --image photo.jpg", "no instruction; give --prompt"), ("predict.py --prompt x", "give --image"),
    ("predict.py --prompt x --jobs y", "give --image with --prompt, or --jobs"),
    ("predict.py --image photo.jpg --prompt", "give one: the instruction"),
    ("train.py --data", "give one: dataset fol"),
    ("predict.py --image '' --prompt x", "--image: empty"), ("train.py --val_data ''", "--val_data: empty"),
    ("train.py --model=", "--model: empty"), ("cache.py --data x ''", "--data: empty"),
    ("train.py --cache_dir ''", "--cache_dir: empty"), ("tools/measure.py a b --json ''", "--json: empty"),
    ("tools/doctor.py photos --align", "give one: new folder"), (PAIRS + "--quantize", "give none, int8, fp8 or nf4"),
    (PAIRS + "--offload", "give all, or a number of blocks"), (PAIRS + "--offload half", "give all, or a number"),
    (PAIRS + "--gradient_checkpointing", "automatic here; leave it out, or give a number of blocks (0: off)"),
    (PAIRS + "--gradient_checkpointing true", "automatic here; leave it out"),
    (PAIRS + "--use_cache true", "leave true out; or give --no-use_cache"), (PAIRS + "--resume yes", "leave yes out"),
    (PAIRS + "--use_cache=false", "give --no-use_cache alone"),
    (PAIRS + f"--resume {RUN}", f"give --resume --out_dir {RUN}"),
    (PAIRS + "--lora_args use_rslora", "as in use_rslora=true"),
    ("train.py --data a --data=b", "put all values behind"),
    # what a script needs
    ("tools/doctor.py", "python tools/doctor.py photos"), ("tools/page.py", "python tools/page.py out/RUN"),
    ("tools/convert_lora.py", "python tools/convert_lora.py out/RUN --to comfyui --out snow.safetensors"),
    (f"tools/convert_lora.py {RUN}", "--to, --out: missing; for instance: python"),
    ("tools/import_data.py config.yaml", "out: missing; for instance: python tools/import_data.py SOURCE OUT"),
    ("tools/measure.py out/predict", "python tools/measure.py out/predict tiny/val"),
    ("tools/prune.py", "for instance: python tools/prune.py cache"),
    # names of files and folders
    ("predict.py --image photo.JPG --prompt x", "give photo.jpg"), ("predict.py --image photo --prompt x", "photo.jpg"),
    ("predict.py --image photo.png --prompt x", "give photo.jpg"),
    ("predict.py --image cat --prompt x", "give cat.png"),
    ("predict.py --image Photos.jpg --prompt x", "give photo.jpg"),
    ("predict.py --image *.jpg --prompt x", "give the fo"),
    ("predict.py --image dog.png --prompt x", "no file of that name; add it"),
    ("predict.py --image https://a.org/b.jpg --prompt x", "download it first"),
    ("predict.py --jobs jobs.json", "give jobs.jsonl"), ("predict.py --jobs job.jsonl", "give jobs.jsonl"),
    (PHOTO + "--lora out/tiny-photos-01", f"give {RUN}"), (PHOTO + "--lora tiny-photos-001", f"give {RUN}"),
    (PHOTO + "--lora tiny-photos", f"give {RUN}"), (PHOTO + "--lora out", f"give {RUN}"),
    (PHOTO + f"--lora {RUN}/lora.safetensors", f"give {RUN}"), (PHOTO + "--lora out/dogs-1", "user/repo of the hub"),
    (PHOTO + f"--lora {RUN}/checkpoint-200", f"give {RUN}/checkpoint-000200"),
    (PAIRS + "--pretrained_lora out/tiny-photos-01", f"give {RUN}"),
    ("tools/convert_lora.py tiny-photos-001 --to comfyui --out x.safetensors", f"give {RUN}"),
    ("tools/page.py tiny-photos-001", f"give {RUN}"), ("tools/page.py out/tiny-photos-01", f"give {RUN}"),
    ("tools/page.py out", f"give {RUN}"), (f"tools/page.py {RUN}/log.jsonl", f"give {RUN}"),
    ("train.py --data Photos", "give photos"), ("train.py --data photos/target", "give photos"),
    ("tools/doctor.py photo", "give photos"), ("train.py --data before after", "tools/import_data.py converts"),
    ("tools/import_data.py config.yml pairs", "give config.yaml"), ("tools/prune.py cach", "give cache"),
    (PHOTO + "--out edited", "give edited.png, or --out_dir edited for a folder"),
    (PHOTO + "--out edited.jpg", "give edited.png"), (PHOTO + "--out_dir edited.png", "give --out edited.png"),
    (f"tools/convert_lora.py {RUN} --to comfyui --out x", "give x.safetensors"),
    (f"tools/page.py {RUN} --out page", "page/index.html"),
    # models and devices
    ("cache.py --model Qwen-Image-Edit-2511", "Qwen-Image-Edit-2511 is no folder; give Qwen/Qwen-Image-Edit-2511"),
    ("train.py --model=qwen-image-edit-2509", f"give {MODEL}"), (PAIRS + "--model 2509", f"give {MODEL}"),
    (PHOTO + "--model Qwen-Image-Edit@main", "give Qwen/Qwen-Image-Edit@main"),
    ("train.py --transformer Qwen-Image-Edit-2511", "Qwen-Image-Edit-2511 is no folder; give Qwen/"),
    ("train.py --model tinny", "give tiny"), (PHOTO + "--model qwen", "give Qwen/Qwen-Image-Edit-2511"),
    (PHOTO + f"--model {RUN}", "give it as --lora"), (PAIRS + f"--model {RUN}", "give it as --pretrained_lora"),
    (PHOTO + "--transformer cuda:7", "here --transformer_device cuda:7"),
    ("train.py --transformer cpu", "--device cpu"),
    (PHOTO + "--device gpu", "only cuda and cpu"), (PAIRS + "--device 0", "only cuda and cpu"),
    (PHOTO + "--transformer qwen_fp8.safetensors", "give qwen-fp8.safetensors"),
    # numbers, areas and choices in another form
    (PAIRS + "--lr 0,0001", "'0,0001' is no number; give 0.0001"), (PAIRS + "--lr 1e\u22124", "give 1e-4"),
    (PAIRS + "--lr 1*10^-4", "give 0.0001"), (PAIRS + "--lr fast", "'fast' is no number; give one, such as 0."),
    (PAIRS + "--max_steps 2,000", "give 2000"), (PAIRS + "--max_steps 2e3", "give 2000"),
    (PAIRS + "--max_steps 1k", "give 1000"), (PHOTO + "--width 1000px", "give 1000"),
    (PHOTO + "--num_inference_steps 20.0", "give 20"), (PHOTO + "--true_cfg_scale 4,5", "give 4.5"),
    (PHOTO + f"--lora {RUN} --lora_scale 80%", "give 0.8"), (PHOTO + f"--lora {RUN} --scales 0,0.5,1", "give 0 0.5 1"),
    (PHOTO + "--seed random", "no whole number; give one, such as 0"), (PHOTO + "--seed -1", "give 0 to 4294967295"),
    (PHOTO + "--true_cfg_scale -1", "give 0 to"), (PAIRS + "--max_grad_norm 0", "inf turns it off"),
    ("tools/gpu_check.py --minutes 5m", "give one, such as 10"),
    ("train.py --target_pixels 512", "--target_pixels: 512 is a side; give 512x512"),
    ("train.py --target_pixels native 768", "give 768x768"), ("cache.py --control_pixels 2048", "2048x2048"),
    ("train.py --target_pixels 1024,1024", "give 1024x1024"), ("train.py --target_pixels 768X768px", "give 768x768"),
    ("train.py --target_pixels 10x10", "10x10 is too small; give 1024x1024"),
    ("train.py --target_pixels 31", "31 is too small; give 1024x1024"),
    ("train.py --target_pixels 1000000x1000000", "1000000x1000000 is too large; give 1024x1024"),
    ("predict.py --target_pixels 160000001", "160000001 is too large; give 1024x1024"),
    ("predict.py --target_pixels 1k", "'1k' is no area; give 1024x1024, 1048576 or native"),
    (PAIRS + "--dtype bf16", "give bfloat16"), (PAIRS + "--quantize int4", "give nf4"),
    (PAIRS + "--quantize true", "give fp8"),
    (PAIRS + "--timestep_sampling shift", "give qwen_shift; its shift follows the picture's size"),
    (PAIRS + "--timestep_sampling sigmoid", "give logit_normal"),
    (PAIRS + "--lr_scheduler cosine_with_restarts", "give cosine; it falls once"),
    (PAIRS + "--lr_scheduler constant_with_warmup", "give constant; --warmup_steps"),
    (PAIRS + "--optimizer AdamW8bit", "here bitsandbytes.optim.AdamW8bit"),
    (PAIRS + "--optimizer adamw", "here torch.optim.AdamW"), (PAIRS + "--optimizer adafactor", "torch.optim.Adafactor"),
    (f"tools/convert_lora.py {RUN} --to comfy --out x.safetensors", "give comfyui"),
    (f"tools/convert_lora.py {RUN} --to kohya --out x.safetensors", "give comfyui"),
    ("tools/gpu_check.py --stages all", "give claims, numbers, fit, speed or nccl"),
    # another spelling of a flag, or another shell's mark
    ("train.py --lora-rank=3", "here --lora_rank 3"), ("train.py --modle x", "here --model x"),
    (PAIRS + "-max_steps 5", "here --max_steps 5"), (PAIRS + "--Max_Steps 5", "here --max_steps 5"),
    (PAIRS + "--caption_dropout 0.1", "here --caption_dropout_rate 0.1"), ("predict.py --images x", "here --image x"),
    ("predict.py -i photo.jpg -p x", "here --image photo.jpg; -p: unknown; here --prompt"),
    ("tools/page.py x --hardset 3", "here --hardest 3"), ("tools/gpu_check.py --stage speed", "here --stages speed"),
    ("train.py --l 1", "--l: unknown; leave it out, or see train.py -h"), ("cache.py --zzz", "see cache.py -h"),
    ("predict.py --image photo.jpg \u2014prompt x", "type --prompt"),
    (PAIRS + "'\\'", "in bash, ` in PowerShell, ^ in"),
    (PAIRS + "` --lr 1", "in PowerShell"),
    # a flag where none is needed, or of another script of ours
    ("tools/doctor.py --data photos", "doctor.py photos"), ("tools/prune.py --cache_dir cache", "prune.py cache"),
    ("tools/doctor.py photos --val_data photos_val", "doctor.py photos photos_val"),
    (f"tools/page.py --run {RUN}", f"page.py {RUN}"), ("tools/import_data.py --source a --out b", "import_data.py a b"),
    ("tools/measure.py --results out/predict --data photos", "measure.py out/predict photos"),
    (f"tools/convert_lora.py --lora {RUN} --to comfyui --out x.safetensors", f"convert_lora.py {RUN} --to"),
    ("tools/import_data.py pairs --before before --after after", "here --control; --after: unknown; here --target"),
    ("tools/import_data.py pairs --targets after --controls before", "here --target after; --controls: unknown; here"),
    ("predict.py --data photos", "here --jobs photos"), (PAIRS + f"--lora {RUN}", f"here --pretrained_lora {RUN}"),
    (PHOTO + "--max_steps 20", "a flag of train.py, leave it out"), ("cache.py --data photos --seed 3", "of train.py"),
    (PAIRS + "--prompt 'make it warm'", "into the captions"), (PAIRS + "--image photo.jpg", "--data takes the folder"),
    ("cache.py --data photos --out_dir x", "here --cache_dir x"), ("tools/doctor.py photos --repair x", "--align DIR"),
    # other trainers' flags
    (PHOTO + "--output edited", "here --out_dir edited"), (PHOTO + "--output edited.png", "here --out edited.png"),
    (PAIRS + "--output_dir x", "here --out_dir x"), (PAIRS + "--out x", "here --out_dir x"),
    ("tools/doctor.py photos --output x", "here --out x"), ("tools/doctor.py photos --out_dir x", "here --out x"),
    (f"tools/convert_lora.py {RUN} --to comfyui --output x.safetensors", "here --out x.safetensors"),
    ("tools/doctor.py photos --target 160x160", "here --target_pixels 160x160"),
    ("tools/doctor.py photos --resolution 512", "here --target_pixels 512x512"),
    (PAIRS + "--resolution 1024,1024", "here --target_pixels 1024x1024"),
    (PHOTO + "--size 512", "--target_pixels 512x51"),
    (PAIRS + "--learning_rate 1e-4", "here --lr 1e-4"), (PAIRS + "--rank 32", "here --lora_rank 32"),
    (PAIRS + "--network_dim 32 --network_alpha 16",
     "here --lora_rank 32; --network_alpha: unknown; here --lora_alpha 16"),
    (PAIRS + "--train_batch_size 2", "here --batch_size"), (PAIRS + "--gradient_accumulation_steps 4", "--batch_size"),
    (PAIRS + "--num_train_epochs 10", "count in steps: --max_steps"),
    (PAIRS + "--validation_epochs 1", "--sample_every"),
    (PAIRS + "--alpha 3 --max_train_steps 5", "here --lora_alpha 3; --max_train_steps: unknown; here --max_steps 5"),
    (PAIRS + "--mixed_precision bf16", "here --dtype bfloat16"), (PAIRS + "--bf16", "here --dtype bfloat16"),
    (PAIRS + "--blocks_to_swap 30", "here --offload 30"), (PAIRS + "--fp8_base --fp8_scaled", "here --quantize fp8"),
    (PAIRS + "--low_vram", "here --offload all"),
    (PAIRS + "--use_8bit_adam", "--optimizer bitsandbytes.optim.AdamW8bit"),
    (PAIRS + "--optimizer_type adamw8bit", "here --optimizer bitsandbytes.optim.AdamW8bit"),
    (PAIRS + "--val photos_val", "here --val_data photos_val"), (PAIRS + "--report_to wandb", "here --tracker wandb"),
    (PAIRS + "--use_gradient_checkpointing", "automatic here; leave it out"), (PAIRS + "--dry_run", "here --plan"),
    (PAIRS + "--model_type lora --network_module x", "--network_module: unknown; not needed"),
    (PAIRS + "--dataloader_num_workers 4", "not needed here"), (PAIRS + "--enable_xformers", "see train.py -h"),
    (PAIRS + "--validation_prompt x", "validations draw the pairs of --val_data"), (PAIRS + "--sdpa", "fastest kernel"),
    (PAIRS + "--instance_prompt x", "write it into the captions"), (PAIRS + "--push_to_hub", "hf upload"),
    (PAIRS + "--random_flip", "mirror.diff"), (PAIRS + "--num_gpus 2", "torchrun --nproc_per_node=N"),
    (PAIRS + "--noise_offset 0.1", "leave it out"), (PAIRS + "--betas 0.9 0.99", "--optimizer_args betas"),
    ("train.py --dataset_base_path photos", "here --data photos"), ("train.py --config c.yaml", "no config files"),
    ("train.py --dataset_config c.toml", "tools/import_data.py c.toml OUT"),
    (PAIRS + "--save_lora x", "OUT_DIR/pytorch_lora"),
    (PAIRS + "--load_lora x", "here --pretrained_lora x"), (PAIRS + "--diff_output_preservation", "here --preserve"),
    (PAIRS + "--quantize_te x --qtype x", "here --quantize_text_encoder; --qtype: unknown; here --quantize"),
    (PHOTO + "--steps 20 --cfg 4 --strength 0.8",
     "here --num_inference_steps 20; --cfg: unknown; here --true_cfg_scale 4;"
     " --strength: unknown; here --lora_scale 0.8"),
    ("predict.py --input photo.jpg --prompt x", "here --image photo.jpg"), (PHOTO + "--vae x", "--vae_device"),
    (PHOTO + "--lora_weight x", "here --lora x"), (PHOTO + "--lora_weight 0.8", "here --lora_scale 0.8"),
    (PHOTO + "--num_images 4", "--seed 0 1 2 makes three"), (PHOTO + "--sampler euler", "the model's own"),
]

@pytest.fixture(scope="module")
def first_hour(tmp_path_factory):
    """-> a folder as after a first hour: pairs, pictures, another trainer's config, a run with a checkpoint."""
    home = tmp_path_factory.mktemp("home")
    for name in ("photos", "photos_val"):
        add_item(home / name, "a")
    for name in ("photo.jpg", "cat.png", "before/a.png", "after/a.png"):
        save(paint_picture(), home / name)
    for place in (home / RUN, home / RUN / "checkpoint-000200"):
        place.mkdir(parents=True)
        lora_file(place, lora_tensors())
    for name in (f"{RUN}/log.jsonl", "config.yaml", "jobs.jsonl", "qwen-fp8.safetensors"):
        (home / name).write_text("{}\n", "utf-8")
    (home / "cache").mkdir()
    name = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q.lora_down.weight"
    save_file({name: torch.zeros(4, 4)}, home / "sdxl.safetensors")
    return home

@pytest.mark.parametrize("typed, helps", MISSES)
def test_a_near_miss_is_one_line_that_says_what_to_type(first_hour, typed, helps):
    """As a beginner types it; nothing is trained, drawn or written."""
    before = sorted(first_hour.rglob("*"))
    result = run_script(*shlex.split(typed), folder=first_hour)
    assert result.status and len(result.err.splitlines()) == 1 and is_one_line(result.errors[0], helps), result.err
    assert sorted(path for path in first_hour.rglob("*") if "cache" not in path.parts) == [
        path for path in before if "cache" not in path.parts]

# flags of the script, and at the end a value that it never takes
ODD = {
    "train.py": "--data --lr --resume --target_pixels --quantize --lora_args --repeats --offload --optimizer --seed zz",
    "predict.py": "--image --prompt --out --out_dir --lora --scales --jobs --sigmas --transformer --height zz",
    "tools/doctor.py": "--out --mask --align --target_pixels zz", "tools/convert_lora.py": "--to --scale --rank zz"}
WORDS = ["", "x", "photo.jpg", "photos", RUN, "-1", "0,5", "512", "--", "-", "=", "a=b", "a b", "\u201cq\u201d", "\\",
         "*", "~", "'", "1,000", "%", "10^", "\udcff", "--rank", "--output", "--resolution", "--run", "--nope", "-i",
         "--=", "--x=1", "--lora", "--dataset", "--fp8_base", "--data=photos", "--n"]

@pytest.mark.parametrize("script", ODD)
def test_no_order_of_odd_words_ends_in_a_traceback(first_hour, script):
    """One line for each, whatever is misspelt at the same time."""
    rng, (*flags, value) = random.Random(1), ODD[script].split()
    for _ in range(60):
        words = rng.choices([*flags, *WORDS], k=rng.randint(0, 8))
        result = run_script(script, *words, flags[-1], value, folder=first_hour)
        assert result.status in (1, 2) and len(result.err.splitlines()) == 1, (words, result.err)
        assert is_one_line(result.errors[0]), (words, result.err)

def test_every_script_of_a_first_hour_has_its_near_misses():
    """48 at least, by the measurement that asked for them."""
    scripts = {typed.split()[0] for typed, _ in MISSES}
    assert len(MISSES) >= 48 and scripts >= {"train.py", "cache.py", "predict.py", *(
        f"tools/{name}.py" for name in "doctor import_data page convert_lora measure gpu_check prune".split())}

# ---- folders ---------------------------------------------------------------------------------------------------------

@pytest.fixture
def two(tmp_path):
    """-> a folder with the datasets photos and photos_val."""
    for name in ("photos", "photos_val"):
        add_item(tmp_path / name, "a")
    save(paint_picture(), tmp_path / "photo.jpg")
    return tmp_path

@pytest.mark.parametrize("typed, meant", [("photo", "photos"), ("photo_val", "photos_val"), ("photoz", "photos")])
def test_a_dataset_that_is_not_there_is_answered_with_the_nearest_one(two, typed, meant):
    for script, *flags in (["train.py", "--data"], ["train.py", "--data", two / "photos", "--val_data"],
                           ["cache.py", "--data"], ["tools/doctor.py"]):
        assert f"{two / typed}: does not exist; give {two / meant}" in answer(script, *flags, two / typed, status=1)
    assert f"does not exist; give {two / meant}" in answer("tools/import_data.py", two / typed, two / "x", status=1)
    line = answer("tools/import_data.py", two / "x", "--target", two / typed, "--alone", status=1)
    assert f"give {two / meant}" in line

def test_what_is_near_nothing_is_to_be_checked(two):
    for name in ("cats", "photo.jsonl", "no/photo"):
        assert "does not exist; check the name" in answer("cache.py", "--data", two / name, status=1)

def test_a_part_of_a_dataset_is_answered_with_the_dataset(two):
    for part in ("target", "control", "target/a.png"):
        assert f"give {two / 'photos'}" in answer("train.py", "--data", two / "photos" / part, status=1)
    assert "a picture" in answer("train.py", "--data", two / "photos/target/a.png", status=1)
    line = answer("train.py", "--data", two / "photo.jpg", status=1)
    assert "a picture" in line and "give" not in line and dataset.LAYOUT in line
    (two / "other/target").mkdir(parents=True) # a name alone makes no dataset
    assert f"give {two / 'other'}" not in answer("train.py", "--data", two / "other/target", status=1)

# ---- flags -----------------------------------------------------------------------------------------------------------

def test_areas_have_limits_that_are_allowed():
    assert flag_types.pixels("32x32") == 1024 and flag_types.pixels("12500*12800") == common.MAX_PIXELS
    assert flag_types.pixels("native") == "native" and flag_types.pixels("4097") == 4097

def test_a_model_that_is_here_needs_no_user(tmp_path, monkeypatch):
    """Nor does a hub's, or one file of a transformer."""
    (tmp_path / "Qwen-Image-Edit").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("Qwen-Image-Edit", "tiny", "Qwen/Qwen-Image-Edit", "qwen-image-edit-2511.gguf", "gpt2"):
        assert near_misses.near_model(name) is None, name

def test_predict_without_flags_prints_how_it_is_used():
    result = run_script("predict.py")
    lines = result.err.splitlines()
    assert result.status == 2 and len(lines) == 5 and not result.out
    assert lines[0].startswith("usage: ") and "-h" in lines[0]
    assert all(line.startswith("$ python predict.py ") for line in lines[1:])
    assert any(line.startswith("$ python predict.py --image") or " --image " in line for line in lines)

def test_import_data_needs_no_source_beside_control(tmp_path):
    """The line is the command that is meant, also in another order."""
    for flags in (["src", "out", "--control", "a", "b"], ["src", "out", "--mask", "c", "--control", "a", "b"]):
        line = answer("tools/import_data.py", *flags, status=2)
        assert "there is no SOURCE" in line and "import_data.py out --target src --control a b" in line
    line = answer("tools/import_data.py", "src", "out", "--target", "t", "--control", "a", status=2)
    assert "src: " in line and "--target" in line and "put a text in quotes" not in line

def test_a_published_models_nearest_name_is_in_the_line_about_the_hub():
    def fetch():
        raise OSError("no network")
    with refused("Qwen/Qwen-Image-Edit-2512", "; give Qwen/Qwen-Image-Edit-2511, check the name and the network"):
        hub.from_hub("--model Qwen/Qwen-Image-Edit-2512", fetch)
    with refused("; check the name and the network"):
        hub.from_hub("--model Qwen/Qwen-Image-Edit-2511", fetch)

def test_no_reason_is_cut_within_a_word():
    """A line of CUDA's may be long; what it says next is about other things."""
    error = RuntimeError("Found no NVIDIA driver on your system. " * 20 + "\nCUDA kernel errors")
    for line in (common.first_line(error), common.first_words(error)):
        assert set(line.split()) <= {*str(error).split(), "[...]"} and "kernel" not in line and 200 < len(line) <= 300

# ---- warnings of sizes -----------------------------------------------------------------------------------------------

def warned(tmp_path, size, *flags):
    """The warnings of predict.py for a picture of this size."""
    save(paint_picture(size), tmp_path / "p.png")
    result = run_script("predict.py", "--image", tmp_path / "p.png", "--prompt", "x", "--out_dir", tmp_path / "o",
                        "--num_inference_steps", 2, "--true_cfg_scale", 1, *flags)
    assert result.status == 0, result.err
    return [line for line in result.err.splitlines() if line.startswith("warning: ")]

def test_both_sides_of_another_shape_are_a_warning(tmp_path):
    line, = warned(tmp_path, (96, 64), "--width", 64, "--height", 64)
    assert line == ("warning: p: --width and --height change its shape from 1.50 to 1.00; give --width 64 --height 43, "
                    "or leave one out")
    assert not warned(tmp_path, (96, 64), "--width", 144, "--height", 96)

@pytest.mark.parametrize("flags, remedy", [
    (["--width", 384, "--height", 384], "give a smaller --width and --height"),
    (["--height", 384, "--target_pixels", "384x384"], "give --target_pixels 160x160"),
    (["--target_pixels", "384x384"], "give --target_pixels 160x160"),
    (["--control_pixels", "384x384"], "give --control_pixels 160x160"),
    (["--target_pixels", "384x384", "--control_pixels", "384x384"],
     "give --target_pixels 160x160 --control_pixels 160x160")])
def test_slow_sizes_of_tiny_are_answered_with_the_flags_that_make_them_smaller(tmp_path, flags, remedy):
    line, = [line for line in warned(tmp_path, (64, 64), *flags) if "slow" in line]
    assert line.endswith(f"; {remedy}"), line

# ---- many lines ------------------------------------------------------------------------------------------------------

def test_lines_that_differ_only_in_the_file_are_one(tmp_path):
    for n in range(25):
        add_item(tmp_path / "photos", f"IMG_{n:02}")
        (tmp_path / f"photos/target/IMG_{n:02}.txt").unlink()
    save(paint_picture(), tmp_path / "photos/target/alone.png")
    for result in (run_script("train.py", "--data", tmp_path / "photos"),
                   run_script("cache.py", "--data", tmp_path / "photos", "--cache_dir", tmp_path / "cache")):
        folded, alone = result.errors
        assert "IMG_00.png: no caption; expected" in folded and "; and 24 others likewise: IMG_01.png, IMG_02" in folded
        assert "alone.png: no control" in alone
    result = run_script("tools/import_data.py", tmp_path / "out", "--target", tmp_path / "photos/target", "--control",
                        tmp_path / "photos/control")
    assert len(result.errors) == 2 and "and 24 others likewise" in result.err

def test_few_lines_and_other_reasons_stay_apart():
    lines = [f"error: d/{name}.png: no caption; expected d/{name}.txt" for name in ("a", "b (1)", "caption")]
    assert common.fold(lines) == lines
    more = [*lines, "error: d/x.png: no caption; expected d/y.txt", "error: d/e: other; z"]
    assert common.fold(more) == more
    four = [*lines, "error: d/.x.png: no caption; expected d/.x.txt"]
    assert common.fold(four) == [f"{lines[0]}; and 3 others likewise: b (1).png, caption.png, .x.png"]
    assert len(common.fold([f"error: m.jsonl:{n}: no field 'target'; want it" for n in range(9)])) == 1
    long, = common.fold([f"error: {n:0200}.png: no; do" for n in range(9)])
    assert len(long) < 700

# ---- at once ---------------------------------------------------------------------------------------------------------

SLOW = """import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as e:
        status = e.code
    print(bool(status), *{"torch", "diffusers", "transformers", "peft", "huggingface_hub"} & set(sys.modules))
"""
NO_CARD = ["train.py --data photos --model Qwen/Qwen-Image-Edit-2512", "tools/gpu_check.py",
           "cache.py --data photos --device cuda:1"]
AT_ONCE = [
    "predict.py", "predict.py --input x", "train.py --data photo", "cache.py --model Qwen-Image-Edit",
    "train.py --target_pixels 512", "tools/doctor.py photo",
    "predict.py --image gone.jpg --prompt x", "predict.py --image empty/text.jpg --prompt x",
    "predict.py --image photos/target/a.png gone.jpg --prompt x", "predict.py --jobs gone.jsonl",
    "predict.py --jobs bad.jsonl", "predict.py --jobs empty", "predict.py --image empty --prompt x",
    "predict.py --image photos --prompt x --out_dir photos/out", "predict.py --image photos empty --prompt x",
    "predict.py --image photo.jpg --prompt=", "predict.py --image photo.jpg --prompt x --device gpu",
    "predict.py --image photo.jpg --prompt x --lora out/tiny-b", "tools/prune.py cach", "tools/page.py out/tiny-a",
    "tools/convert_lora.py out/tiny-b --to comfyui --out x.safetensors", "tools/measure.py photos photo"]

def test_a_near_miss_imports_nothing_slow(two):
    """Also where a run of tiny is there, whose LoRA predict.py would take. Among what is answered at once is a list
    with bad lines only, a folder whose pictures cannot be read, and what a machine without a card cannot do."""
    save(paint_picture(), two / "out/tiny-a-001" / lora_paths.LORA_FILE, format="PNG")
    (two / "empty").mkdir()
    (two / "empty/text.jpg").write_text("x", "utf-8")
    (two / "bad.jsonl").write_text('{"image": "photo.jpg"}\n{"image": "gone.jpg", "prompt": "x"}\n', "utf-8")
    commands = AT_ONCE + (NO_CARD if environment.no_card() else [])
    words = [[str(HERE / script), *flags] for script, *flags in map(str.split, commands)]
    env = os.environ | dict(PYTHONPATH=str(HERE))
    result = subprocess.run([sys.executable, "-c", SLOW, json.dumps(words)], cwd=two, env=env, capture_output=True,
                            encoding="utf-8")
    found = dict(zip(commands, result.stdout.splitlines()))
    assert found == dict.fromkeys(commands, "True"), (found, result.stderr)
