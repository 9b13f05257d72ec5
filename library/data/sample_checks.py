"""What a person should know of samples and flags before hours are spent on them."""
import re
from pathlib import Path

from common import InputError
from library.cli.command_line import is_given

def how_many(samples):
    """-> "19 samples", and how many prompts, if that is another number."""
    prompts = sum(len(s.prompts) for s in samples)
    words = f"{len(samples)} samples"
    if prompts != len(samples):
        words += f" with {prompts} prompts"
    return words

def describe(samples, val_samples):
    """-> lines: what will be trained, how many of it have a mask, and how much of it is validated, too."""
    lines = [how_many(samples)]
    if alone := sum(not s.controls for s in samples):
        lines[0] += f", {alone} of them without a control: text-to-image"
    for role in sorted(set().union(*[s.overlays for s in samples])):
        count = sum(role in s.overlays for s in samples)
        lines.append(f"{role}: {count} of {len(samples)} pairs")
    if auto := sum("mask" in s.encodings[0] for s in samples):
        lines.append(f"--mask auto looks for the edit in {auto} pairs; tools/doctor.py DATA --mask auto shows what it "
                     "finds")
    trained = set().union(*map(photographs_of, samples))
    shared = [s.name for s in val_samples if trained & photographs_of(s)]
    if shared:
        lines.append(f"warning: {len(shared)} of {len(val_samples)} samples of --val_data have pictures that are also "
                     f"trained, for instance {shared[0]}: they do not tell what the LoRA makes of others; move such "
                     "pairs, do not copy them")
    return lines

def photographs_of(sample):
    """-> hashes of a sample's target and first control, as a copy may have another name. (None of an imported cache,
    which names no pictures.)"""
    return {sample.contents.get(path) for path in [sample.target, *sample.controls[:1]]} - {None}

def training_warnings(args, samples, val_samples):
    """What a person may not expect of a training of these planned samples -> lines; InputError for what cannot be
    meant. args: train.py's flags, or those that cache.py and tools/lean_train.py have of them."""
    if not samples or "max_steps" not in args: # all samples have errors, which are listed; or nothing is trained
        return []
    lines = distortion(samples) + placeholders(samples)
    # one sample alone is a pass, however long it is
    length, name = max((tokens_of(sample), sample.name) for sample in samples)
    if length > args.max_tokens:
        lines.append(f"--max_tokens {args.max_tokens}: {name} has {length} by itself, and is computed all the same")
    if base := distilled(args):
        lines.append(f"{base}; train on the model that it was made from, and put the LoRA on both")
    weights = args.mask_foreground_weight, args.mask_background_weight
    if not any(weights):
        raise InputError("--mask_foreground_weight: both mask weights are 0, so nothing would be learned; give one")
    if weights != (2, 1) and not any(map(has_mask, samples)): # these are the defaults
        lines.append("--mask_foreground_weight, --mask_background_weight: there is no mask; add mask/, or give --mask "
                     "auto")
    is_sampled = is_given("--sample_every") and args.sample_every # (tiny has a default)
    if is_sampled and not val_samples:
        lines.append("--sample_every: nothing will be generated; give pairs that are not trained as --val_data")
    if "true_cfg_scale" in args: # cache.py and lean_train.py draw nothing
        lines += without_guidance([args.true_cfg_scale])
    return [f"warning: {line}" for line in lines]

def tokens_of(sample):
    """-> image + text tokens of a planned sample at its largest size, with its longest prompt."""
    text = max(text["tokens"] for text in sample.texts.values())
    images = 0
    for encoding in sample.encodings:
        images = max(images, sum(h * w for _, h, w in encoding["img_shapes"]))
    return images + text

def has_mask(sample):
    return bool(sample.mask) or any("mask" in encoding for encoding in sample.encodings)

def without_guidance(scales):
    """-> a line about the flag that guidance alone reads. scales: of CFG, all that are used."""
    if not scales or max(scales) > 1 or not is_given("--negative_prompt"):
        return []
    return ["--negative_prompt: has no effect at a CFG scale of 1 or below; raise --true_cfg_scale, or leave it out"]

def result_warnings(args, requests):
    """The same of predict.py's flags and its pairs of a planned sample and its Settings."""
    samples = [sample for sample, _ in requests]
    scales = [settings.true_cfg_scale for _, settings in requests]
    lines = distortion(samples) + placeholders(samples) + without_guidance(scales)
    base = distilled(args)
    if base and max(scales, default=1) > 1:
        lines.append(f"{base}, and is for a CFG scale of 1; give --true_cfg_scale 1")
    place = args.out_dir.resolve()
    targets = {Path(sample.target).resolve().parent for sample in samples if sample.target}
    if args.jobs and targets & {place, *place.parents}: # a dataset's folders are read as a whole
        raise InputError(f"--out_dir {args.out_dir}: lies among the dataset's targets; give another folder")
    if args.image and len(args.image) > 3: # the published models take up to three
        lines.append(f"--image: {len(args.image)} pictures make one result; give their folder to edit each")
    if several := [sample.name for sample in samples if len(sample.prompts) > 1]:
        lines.append(f"{several[0]}: of several prompts only the first is used ({len(several)} samples have some)")
    return [f"warning: {line}" for line in lines]

def distilled(args):
    """-> in words, that the base is one for few steps, such as Lightning's, as far as its name tells; or ""."""
    flag = "transformer" if args.transformer else "model"
    name = Path(getattr(args, flag)).name
    if not re.search(r"(?i)lightning|turbo|rapid|(?<!\d)[48][-_ ]?steps?", name):
        return ""
    return f"--{flag} {name}: is distilled to few steps, by its name"

# what other programs replace before they read a prompt: <image>, <lora:NAME:1>, {one|other}, {caption}, __color__
PLACEHOLDERS = re.compile(r"<(image|img|video|lora|lyco|hypernet)[^<>]{0,99}>|\{\w{1,99}\}|\{[^{}|]*\|[^{}]*\}|"
                          r"(?<!\w)__[\w/-]{1,99}__(?!\w)|\[file(name|words)\]", re.IGNORECASE)

def placeholders(samples):
    """-> a line about prompts that were written for another program."""
    found = [prompt for sample in samples for prompt in sample.prompts if PLACEHOLDERS.search(prompt)]
    if not found:
        return []
    return [f"{len(found)} prompts hold what another program replaces, and here is read as it stands, for instance "
            f"{PLACEHOLDERS.search(found[0])[0]!r:.60} in {found[0]!r:.99}; write the words themselves"]

def distortion(samples):
    """-> a line about the target whose aspect changes most, if that is by more than 10 %: by sides that are rounded to
    32, or by those that are given."""
    changes = []
    for sample in samples:
        width, height = sample.sizes[0]
        for encoding in sample.encodings:
            _, h, w = encoding["img_shapes"][0]
            changes.append((abs(w / h * height / width - 1), sample.name, f"{16 * w}x{16 * h}"))
    change, name, size = max(changes, default=(0, "", ""))
    if change <= 0.1:
        return []
    return [f"{name}: {size} changes its aspect by {change:.1%}; give a larger picture or area, or sides of its shape"]
