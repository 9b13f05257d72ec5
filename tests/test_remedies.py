"""
Every remedy that an error line of train.py, training/resume.py or training/optimizers.py names is tried: what was
wrong, the line, the command with the remedy, what happens then. Those of common.py's flags that train.py shares are
here, too.

Not tried here, and why. Elsewhere, as they want several processes: --fsdp under torchrun (test_quantization.py),
processes that part (test_optimizers.py) or differ (test_identity.py). Elsewhere, as they want a full disk or a missing
file: checkpoints that cannot be written (test_loop_ends.py), an extra that was deleted (test_house.py). A run in a
folder at which another one works: test_faults.py. Nowhere: `pip install` of a missing package; a validation of several
processes without memory, whose remedy is that of a step, below.

$ python -m pytest -q tests/test_remedies.py    # half a minute
"""
import shlex
import shutil

import pytest
import torch

from library.files import tensor_files
import predict
import rope_patch
from tests.harness import (EXACT, add_item, as_strangers, copy_model, damage_tensors, is_one_line, log_of,
                           run_script, works)

@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """What the commands of the table name: datasets and their cache, an index, LoRAs, runs that are only read."""
    folder = tmp_path_factory.mktemp("remedies")
    for n in range(3):
        add_item(folder / "data", f"{n}", [(64, 64), (64, 64)])
    shared = ["--cache_dir", folder / "cache", "--val_data", *EXACT, "--device", "cpu"]
    common_flags = ["--max_steps", 1, "--batch_size", 2, "--lr_scheduler", "constant", "--warmup_steps", 0]
    d = shlex.join(map(str, ["--data", folder / "data", *shared, *common_flags]))
    assert run_script("cache.py", "--data", folder / "data", *shared).status == 0
    names = dict(f=folder, d=d, i=d.replace(f"{folder}/data", f"{folder}/cache/tiny-data.json"),
                 model=as_strangers(copy_model(folder / "tiny")), run=folder / "run",
                 zeros=folder / "zeros.safetensors")
    works("train.py", *shlex.split(d), "--max_steps", 2, "--save_every", 1, "--out_dir", folder / "run")
    tensors, meta = tensor_files.read_tensors(folder / "run" / predict.LORA_FILE, "lora_adapter_metadata")
    tensor_files.write_tensors(names["zeros"], {k: 0 * v for k, v in tensors.items()}, meta, "lora_adapter_metadata")
    return names

# (the command, what its line says, the commands that apply its remedies). {i}: an index with the flags of a short run,
# {d}: the dataset, {o}: an --out_dir of its own for each command.
OWN, OTHER = "{i} --out_dir {o} ", "{d} --out_dir {o} "
DOTTED = "--optimizer tests.test_optimizers."
TABLE = [
    # flags that contradict each other
    (OWN + "--pretrained_lora {run} --lora_rank 4", "leave out --lora_rank", [OWN + "--pretrained_lora {run}"]),
    (OWN + "--lora_args r=4", "(--lora_rank, ", [OWN + "--lora_rank 4"]),
    (OWN + "--lora_args lora_alpha=4", "--lora_alpha", [OWN + "--lora_alpha 4"]),
    (OTHER + "--dtype float16", "use bfloat16", [OTHER + "--dtype bfloat16"]),
    (OWN + "--model {model} --num_inference_steps 1", "give one, or 2 or more", [
        OWN + "--model {model} --num_inference_steps 1 --shift 3", OWN + "--model {model} --num_inference_steps 2"]),
    (OWN + "--negative_prompt '<|x|>'", "leave it out", [OWN]),
    (OWN + "--no-use_cache", "leave out --no-use_cache", [OWN]),
    (OTHER + "--no-use_cache --skip_bad", "leave out --no-use_cache", [OTHER + "--skip_bad", OTHER + "--no-use_cache"]),
    (OWN + "--optimizer_args lr=1", "give --lr", [OWN + "--lr 1e-3"]),
    (OWN + "--optimizer AdamW", "torch.optim.AdamW", [OWN + "--optimizer torch.optim.AdamW"]),
    (OWN + "--optimizer torch.optim.AdamZ", "torch.optim.AdamW", [OWN + "--optimizer torch.optim.AdamW"]),
    (OWN + "--mask auto", "without --mask", [OWN]), (OWN + "--repeats 2", "without --mask and --repeats", [OWN]),
    (OTHER + "--repeats 2 3", "one number each", [OTHER + "--repeats 2"]),
    (OTHER + "--preserve_prompts keep", "give both", [OTHER + "--preserve_prompts keep --preserve 0.5"]),
    (OTHER + "--preserve_prompts 'add a red border' --preserve 0.5", "leave it out", [OTHER + "--preserve 0.5"]),
    (OTHER + "--preserve 1", "or less than --preserve 1", [
        OTHER + "--preserve 0.6", OTHER + "--preserve 1 --pretrained_lora {run}"]),
    (OWN + "--mask_foreground_weight 0 --mask_background_weight 0", "give one", [OWN + "--mask_foreground_weight 0"]),
    (OWN + "--lora_rank 4000", "give 1 to 3072", [OWN + "--lora_rank 16"]),
    # what peft or an optimizer refuses
    (OWN + "--lora_args no_such=1", "give use_rslora=true", [OWN + "--lora_args use_rslora=true"]),
    (OWN + "--lora_args bias=all", "rank_pattern or alpha_pattern", [OWN]),
    (OWN + "--lora_rank 3 --lora_args init_lora_weights=orthogonal", "give other --lora_args, or another --lora_rank", [
        OWN + "--lora_rank 4 --lora_args init_lora_weights=orthogonal", OWN + "--lora_rank 3"]),
    (OWN + "--lora_targets nosuch", "there are to_q", [OWN + "--lora_targets to_q"]),
    (OWN + "--optimizer_args beta=3", "give a class and its arguments", [OWN + "--optimizer_args ns_steps=4"]),
    (OWN + DOTTED + "Attribute", "such as torch.optim.AdamW", [OWN + "--optimizer torch.optim.AdamW"]),
    (OWN + "--optimizer tests.test_averages.ScheduleFreeSGD --ema 0.9", "leave out --ema", [
        OWN + "--optimizer tests.test_averages.ScheduleFreeSGD --lr 1", OWN + "--ema 0.9"]),
    (OWN + DOTTED + "ObjectInState", "such as torch.optim.AdamW", [OWN + "--optimizer torch.optim.AdamW"]),
    # LoRAs and folders
    (OWN + "--pretrained_lora {f}/none", "a folder with pytorch_lora_weights.safetensors or checkpoints", [
        OWN + "--pretrained_lora {run}", OWN + "--pretrained_lora {run}/checkpoint-000001",
        OWN + "--pretrained_lora {run}/pytorch_lora_weights.safetensors"]),
    (OWN + "--sample_lora {f}/none", "give a .safetensors file", [OWN + "--sample_lora {run}"]),
    (OWN + "--pretrained_lora {zeros}", "another --pretrained_lora than one of zeros", [
        OWN + "--pretrained_lora {run}"]),
    ("{d} --out_dir {run}", "with --resume, or give another folder", [
        "{d} --max_steps 3 --resume --out_dir {copy:run}", OTHER]),
    ("{d} --resume --out_dir {f}/data", "give the right --out_dir", [
        "{d} --max_steps 3 --resume --out_dir {copy:run}", OTHER + "--resume"]),
    # training/resume.py
    ("{d} --max_steps 3 --resume --out_dir {run} --lr 1", "give the old ones, or start a new run", [
        "{d} --max_steps 3 --resume --out_dir {copy:run}", OTHER + "--lr 1"]),
    ("{d} --max_steps 3 --resume --out_dir {run} --control_pixels 32*32", "give the old ones, or start a new run", [
        "{d} --max_steps 3 --resume --out_dir {copy:run}", OTHER + "--control_pixels 32*32"]),
    ("{d} --max_steps 1 --resume --out_dir {undone:run}", "to finish it there, or more", [
        "{d} --max_steps 2 --resume --out_dir {undone:run}", "{d} --max_steps 3 --resume --out_dir {undone:run}"]),
    ("{d} --max_steps 3 --resume --out_dir {damaged:run}", "or begin a new run in another, without --resume", [
        "{d} --max_steps 3 --resume --out_dir {copy:run}", OTHER]),
]

def change(folder, how):
    """It makes a copied run one that was stopped, or is damaged."""
    (folder / "DONE").unlink()
    for path in folder.glob("checkpoint-*/optimizer.safetensors"):
        if how == "damaged":
            damage_tensors(path)

def command(text, places, folder):
    """It returns the words of a command of the table, whose {o} is a new folder, and {copy:run} a copy."""
    for how in ("copy", "undone", "damaged"):
        if f"{{{how}:run}}" in text:
            run = shutil.copytree(places["run"], folder / how)
            text = text.replace(f"{{{how}:run}}", str(run))
            if how != "copy":
                change(run, how)
    return shlex.split(text.format(o=folder / "out", **places))

@pytest.mark.parametrize("wrong, line, remedies", TABLE, ids=[f"{n} {line}" for n, (_, line, _) in enumerate(TABLE)])
def test_what_an_error_line_names_helps(tmp_path, places, wrong, line, remedies):
    """The command fails with the line, and each of its remedies makes a whole run of it."""
    result = run_script("train.py", *command(wrong, places, tmp_path / "wrong"))
    assert result.status in (1, 2) and is_one_line(result.errors[0], line), result.err
    assert "Traceback" not in result.err
    for n, remedy in enumerate(remedies):
        words = command(remedy, places, tmp_path / f"{n}")
        result = run_script("train.py", *words)
        assert result.status == 0 and "trained for" in result.out, (remedy, result.err)

def test_a_damaged_file_of_the_cache_is_encoded_again_and_the_run_goes_on(places, tmp_path):
    cache = shutil.copytree(places["f"] / "cache", tmp_path / "cache")
    flags = [*shlex.split(places["d"].replace(str(places["f"] / "cache"), str(cache))), "--out_dir", tmp_path / "run"]
    for file in cache.glob("latents/*"):
        damage_tensors(file)
    result = run_script("train.py", *flags)
    assert result.status == 1 and is_one_line(result.errors[0], "cache.py --verify encodes it again"), result.err
    own = flags[:flags.index("--max_steps")]
    assert run_script("cache.py", *own, "--verify").status == 0
    result = run_script("train.py", *flags, "--resume")
    assert result.status == 0 and len(log_of(tmp_path / "run")) == 1, result.err

@pytest.mark.parametrize("samples, flags, named, remedy", [
    (2, [], ["lower --max_tokens", "or raise --offload, then --resume"], ["--resume", "--max_tokens", 50]),
    (1, ["--gradient_checkpointing", 1], ["give --gradient_checkpointing", "then --resume"],
     ["--resume", "--gradient_checkpointing", 9]),
    (1, ["--gradient_checkpointing", 9], ["; raise --offload, then --resume; or begin a new run"],
     ["--resume", "--offload", 9]),
    (1, ["--gradient_checkpointing", 9, "--offload", 9],
     ["; begin a new run with smaller --", "--pretrained_lora {run}"],
     ["--target_pixels", "32*32", "--pretrained_lora", "{run}", "--out_dir", "{run}-new"])])
def test_what_helps_after_memory_ran_out_is_allowed_and_not_at_its_end(places, tmp_path, monkeypatch, samples, flags,
                                                                      named, remedy):
    """On this card the second step's pass of so many samples is too large."""
    real, passes, run = rope_patch.run_packed, [], str(tmp_path / "run")

    def run_packed(model, latents, *more):
        passes.append(latents)
        if len(latents) >= samples and len(passes) > 1:
            raise torch.OutOfMemoryError
        return real(model, latents, *more)
    flags = [*shlex.split(places["d"]), "--max_steps", 2, "--batch_size", samples, *flags, "--out_dir", run]
    with monkeypatch.context() as patch:
        patch.setattr(rope_patch, "run_packed", run_packed)
        result = run_script("train.py", *flags)
    assert result.status == 1, result.err
    assert is_one_line(result.errors[0], *[words.replace("{run}", run) for words in named]), result.errors
    works("train.py", *flags, *[str(word).replace("{run}", run) for word in remedy])

def test_after_a_loss_that_is_no_number_a_new_run_from_a_checkpoint_at_a_lower_rate_goes_on(places, tmp_path):
    flags = [*shlex.split(places["d"]), "--save_every", 1, "--max_steps", 9]
    layers = ["--lora_targets", "all-linear", "proj_out"]
    result = run_script("train.py", *flags, *layers, "--lr", 1e5, "--out_dir", tmp_path / "nan")
    assert result.status == 1 and is_one_line(result.errors[-1], "a lower --lr (--pretrained_lora takes"), result.err
    for more in (layers, ["--pretrained_lora", places["run"]]):
        works("train.py", *flags, "--lr", 1e-4, *more, "--out_dir", tmp_path / more[0])

def test_the_command_for_a_state_of_another_optimizer_goes_on_from_its_lora(places, tmp_path):
    run = shutil.copytree(places["run"], tmp_path / "run")
    for path in run.glob("checkpoint-*/optimizer.safetensors"):
        tensors, info = tensor_files.read_tensors(path)
        info["optimizer"]["state"]["momentum"] = {"dict": []}
        tensor_files.write_tensors(path, tensors, info)
    result = run_script("train.py", *shlex.split(places["d"]), "--max_steps", 3, "--out_dir", run, "--resume")
    assert result.status == 1 and is_one_line(result.errors[-1], "is not what Muon keeps"), result.err
    python, script, *flags = shlex.split(result.errors[-1].split("its LoRA: ")[1])
    result = run_script(script, *flags, "--out_dir", tmp_path / "new")
    assert (python, result.status) == ("python", 0) and len(log_of(tmp_path / "new")) == 3, result.err
