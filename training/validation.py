"""
The pictures of a validation: at most --val_pictures of --val_data are drawn without and with the trained LoRA, and
compared with their targets by their PSNR. train.py makes a Drawer before its first step and calls its draw() in each
validation, which writes into the run's samples/: the pictures of each step, what they are compared with, and a contact
sheet of each dataset.
"""
import math
import os
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

import cache
import common
import predict
from common import InputError, content_key, tell
from library.results import contact_sheets, result_files
from library.results.result_files import picture_stem
from training import best_step

# ---- which pictures, and how good is one? ----------------------------------------------------------------------------

def psnr(image, reference):
    """Peak signal-to-noise ratio in dB between two pictures of one size; equal ones have 99."""
    error = np.mean((np.asarray(image, float) - np.asarray(reference, float)) ** 2)
    return float(10 * np.log10(255**2 / max(error, 255**2 / 10**9.9)))

def choose_pictures(samples, args):
    """-> {place in samples: (the sample, predict.Settings)}, at most --val_pictures of them."""
    # spread over all samples, as neighbours are often alike
    count = min(args.val_pictures, len(samples))
    places = [n * len(samples) // count for n in range(count)]
    settings = predict.Settings(**predict.sampling_flags(args), seed=args.seed)
    return {place: (samples[place], settings) for place in places}

# ---- drawing ---------------------------------------------------------------------------------------------------------

class Drawer: # a class because the base's pictures stay from one validation to the next
    """Draws with the transformer, as it is when draw() is called, on all processes together.

    scheduler_config: of the scheduler. samples: the validation samples, planned and, but for `encoders`, encoded.
    encoders: the pipeline that encodes live, or None. sample_loras: hashes of --sample_lora's files. args: of
    train.py. val_key: a hash of the samples and of all flags that change their pictures, see training/best_step.py."""

    def __init__(self, transformer, scheduler_config, samples, encoders, model_folder, out_dir, sample_loras, args):
        self.transformer, self.scheduler_config, self.samples = transformer, scheduler_config, samples
        self.encoders, self.out_dir, self.args = encoders, out_dir, args
        self.flags = predict.sampling_flags(args)
        self.val_key = content_key(samples=cache.data_hash(samples), val_pictures=min(args.val_pictures, len(samples)),
                                   flags=self.flags, sample_loras=sample_loras)
        if encoders:
            self.vae = encoders.vae
        else:
            self.vae = cache.load_vae(model_folder / "vae", args.dtype)
        # the files that this process has saved of the pictures that are the same in each validation
        self.saved = set()

    def draw(self, step):
        """Draws, compares and saves -> (what the log says about it: psnr, pictures, flags; {dataset: contact sheet}),
        on the first process, if nothing fails when it reports; None on others. What fails before raises on all."""
        try:
            def compare_all():
                torch.cuda.empty_cache() # as cuDNN allocates outside of torch's cache (without a GPU this does nothing)
                self.vae.to(self.args.vae_device)
                base = self.base_pictures
                return [self.compare(place, base[place], picture, step)
                        for place, picture in self.generate(trained=True).items()]
            rows = common.on_all_processes(compare_all, self.args.fsdp)
            rows = sorted(sum(common.gather_objects(rows), []))
            with common.warn_on_failure("the validation's pictures"):
                return self.report(step, rows) if common.rank() == 0 else None
        finally:
            self.transformer.set_adapter("default")
            (self.vae.decoder if self.encoders else self.vae).to("cpu") # live encoding needs the VAE's encoder
            if self.args.device.startswith("cuda"):
                torch.cuda.reset_peak_memory_stats() # the log's `memory` is the training's

    @cached_property
    def base_pictures(self): # once, as the base does not change
        return self.generate(trained=False)

    def generate(self, trained):
        """{place in samples: what predict.decode returns} of at most --val_pictures, with --sample_lora's LoRAs, and
        with the trained one or without. All processes together generate them; this one returns its share."""
        # share: which of the packs of generate_samples are this process's
        share = slice(common.rank(), None, common.world())
        decoder = self.vae
        # with --fsdp every process has to join every forward pass: all generate everything, and the first one decodes
        if self.args.fsdp:
            share, decoder = slice(None), (None if common.rank() else self.vae)
        requests = choose_pictures(self.samples, self.args)
        places = [*requests]
        # with peft's adapters of these names: the trained one's is default
        self.transformer.set_adapter([name for name in self.transformer.peft_config if trained or name != "default"])
        steps = len(requests) * self.flags["num_inference_steps"]
        if not self.args.fsdp: # about this process's share
            steps //= common.world()
        with common.progress("validation pictures", total=steps, unit="step") as bar:
            images = predict.generate_samples(self.transformer, decoder, self.scheduler_config, [*requests.values()],
                                              self.args.max_tokens, self.args.device, self.encoders, share, bar)
            return {places[n]: image for n, image in images}

    def compare(self, place, base, picture, step):
        """Compares one sample's pictures, without and with the LoRA, with its target, and saves all in samples/ -> (its
        place, a record for the log with the PSNRs to the target in dB: of the input, the base, the LoRA, and the VAE
        alone, which is the upper bound). If an original is not on this machine, or was edited since it was encoded, the
        VAE decodes its latents instead. `lost` in the record: {one of these: the model that computed NaN or Inf for
        it}; then it has no PSNRs, and the other pictures are saved."""
        sample = self.samples[place]
        shapes = sample.encodings[0]["img_shapes"]
        tensors = cache.load_latents(sample, sample.encodings[0], self.encoders)
        latents = torch.cat([tensors["pixel_latent"], tensors["control_latent"]]).split([h * w for _, h, w in shapes])

        def by_vae(n):
            return predict.decode(self.vae, latents[n].to(self.args.device), [shapes[n]])

        def original(n, path):
            try:
                return cache.read_planned(sample, path), None
            except InputError as e:
                if Path(path).exists():
                    tell(f"warning: {str(e).removeprefix('error: ')} (compared with what was encoded instead)")
                return by_vae(n)
        target, control, *more = [original(n, path) for n, path in enumerate([sample.target, *sample.controls])]
        made = dict(control=control, base=base, lora=picture, vae=by_vae(0), target=target)
        lost = {name: model for name, (_, model) in made.items() if model}
        # compared at the size that was generated
        size = 16 * shapes[0][2], 16 * shapes[0][1]
        shown = {name: image.resize(size, Image.LANCZOS) for name, (image, _) in made.items() if image}
        psnrs = []
        if not lost:
            psnrs = [psnr(shown[name], shown["target"]) for name in ("control", "base", "lora", "vae")]
        for n, (image, _) in enumerate(more, 1):
            if image:
                shown[f"control_{n}"] = ImageOps.contain(image, size)
        # samples/step_000200/DATASET/NAME.png, and beside the steps what they are compared with. Each process saves
        # that once: what an earlier one has saved may be of another --val_data, or generated with other flags
        file = Path(f"{picture_stem(sample)}.png")
        if len(os.fsencode(file)) > result_files.MOST_BYTES:
            file = result_files.beside(file, f"-{place}.png") # of what begins alike each has its own
        file = f"{sample.root}/{file}"
        for name, image in shown.items():
            path = self.out_dir / "samples" / (f"step_{step:06d}" if name == "lora" else name) / file
            if name != "vae" and path not in self.saved:
                predict.save_png(image, path)
                self.saved.add(path)
        return place, dict(file=file, prompt=sample.prompts[0], controls=len(sample.controls), psnr=psnrs, lost=lost)

    def report(self, step, rows):
        """Prints each folder's mean PSNRs, and writes a contact sheet of each dataset into samples/ -> what draw
        returns. rows: what compare returns, in the order of samples. If one picture is lost, the validation has no
        PSNRs at all: a mean of the others' would be compared with means of all."""
        folder, groups, lost = self.out_dir / "samples", {}, []
        for _, record in rows:
            lost += [(name, model, record["file"]) for name, model in record.pop("lost").items()]
        if lost:
            tell(why_validation_not_finite(lost))
            rows = []
        for place, record in rows:
            sample = self.samples[place]
            groups.setdefault("/".join([sample.root, *Path(sample.name).parent.parts]), []).append(record["psnr"])
        if rows:
            tell("mean PSNR to the target in dB:")
            tell(f"{'':20} pictures   input    base    LoRA  VAE alone")
        lines = list(groups.items())
        if len(groups) > 1: # by their mean the best step is chosen
            lines.append(("all pictures", sum(groups.values(), [])))
        for name, psnrs in lines:
            numbers = " ".join(f"{mean:7.1f}" for mean in np.mean(psnrs, 0))
            tell(f"{common.printable(name):20} {len(psnrs):8} {numbers}")
        records = [record for _, record in rows]
        sheets = {}
        if rows:
            sheets = contact_sheets.validation_sheets(folder, step, records)
            tell(f"{folder}/step_{step:06d}_*.png: control, instruction, base, LoRA, target")
        for n, (name, image) in enumerate(sheets.items()):
            path = result_files.beside(folder / f"step_{step:06d}_{name}.png", ".png")
            if name not in path.stem: # it was cut, and another one may begin alike
                path = result_files.beside(path, f"-{n}.png")
            predict.save_png(image, path)
        # with the flags of sampling, which --resume may have changed
        means = {name: dict(zip(best_step.KINDS, np.mean(psnrs, 0).tolist())) for name, psnrs in groups.items()}
        logged = dict(psnr=means, pictures=records, flags=dict(self.flags, sample_lora=self.args.sample_lora))
        if lost:
            logged["not_finite"] = [f"{name} of {file}" for name, _, file in lost]
        return logged, sheets

# ---- what is printed -------------------------------------------------------------------------------------------------

def best_lines(out_dir):
    """-> the lines that say which of a run's validations is the best so far."""
    return best_step.describe(best_step.read_validations(out_dir))

def loss_line(step, loss):
    """-> the line that a validation prints of its loss."""
    if math.isfinite(loss):
        return f"step {step}: validation loss {best_step.in_words(loss, 'validation loss')}"
    return (f"warning: step {step}: the validation loss is NaN or Inf, and so is not ranked; if the next ones are, "
            "too, start a new run with a lower --lr")

def why_validation_not_finite(lost):
    """-> a warning that names pictures of a validation that are lost, and what may help. lost: [("control", "base",
    "lora", "vae" or "target", the model that computed NaN or Inf, the picture's file)]."""
    name, model, file = max(lost, key=lambda row: row[0] != "lora") # one that the training did not spoil, if any
    whose = dict(lora="with the trained LoRA", base="of the base").get(name, f"for the {name}")
    remedy = "take another copy of the model, or leave out --sample_lora"
    if name == "lora":
        remedy = "start a new run with a lower --lr"
    return (f"warning: NaN or Inf in {len(lost)} pictures, for instance in what the {model} computed {whose} ({file}); "
            f"no PSNR of this validation is computed or ranked; if that stays so, {remedy}")
