"""What a person should know of samples and flags before hours are spent on them."""
import re
from pathlib import Path

from common import InputError
from library.cli.command_line import is_given

def how_many(samples):
    """-> "19 samples", and how many prompts, if that is another number."""
    prompts = sum(len(s.prompts) for s in samples)
    return f"{len(samples)} samples" + (f" with {prompts} prompts" if prompts != len(samples) else "")

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
    # encoded files are named after the content: a prompt's, which sees the controls, is the same with another mask
    trained = set().union(*map(common_names, samples))
    if shared := [s.name for s in val_samples if trained & common_names(s)]:
        lines.append(f"warning: {len(shared)} of {len(val_samples)} samples of --val_data have pictures that are also "
                     f"trained, for instance {shared[0]}: they do not tell what the LoRA makes of others; move such "
                     "pairs, do not copy them")
    return lines

def common_names(sample):
    """-> the names of those encoded files of a sample that another one has only if it has the same pictures."""
    texts = [text["file"].stem for (_, with_pictures), text in sample.texts.items() if with_pictures]
    return {encoding["file"].stem for encoding in sample.encodings}.union(texts if sample.controls else [])

def training_warnings(args, samples, val_samples):
    """What a person may not expect of a training of these planned samples -> lines; InputError for what cannot be
    meant. args: train.py's flags, or those that cache.py and tools/lean_train.py have of them."""
    lines = distortion(samples) + placeholders(samples)
    if not samples or "max_steps" not in args: # all samples have errors, which are listed; or nothing is trained
        return [f"warning: {line}" for line in lines]
    # one sample alone is a pass, however long it is
    length, name = max((tokens_of(sample), sample.name) for sample in samples)
    if length > args.max_tokens:
        lines.append(f"--max_tokens {args.max_tokens}: {name} has {length} by itself, and is computed all the same")
    if base := distilled(args):
        lines.append(f"{base}; train on the model that it was made from, and put the LoRA on both")
    weights = args.mask_foreground_weight, args.mask_background_weight
    if not any(weights):
        raise InputError("--mask_foreground_weight: both mask weights are 0, so nothing would be learned; give one")
    if weights != (2, 1) and not any(has_mask(sample) for sample in samples): # these are the defaults
        lines.append("--mask_foreground_weight, --mask_background_weight: there is no mask; add mask/, or give --mask "
                     "auto")
    if args.warmup_steps >= args.max_steps and is_given("--warmup_steps"): # (tiny has a default)
        lines.append(f"--warmup_steps {args.warmup_steps}: the run has {args.max_steps} steps, so its learning rate "
                     f"only rises, to {args.lr * args.max_steps / args.warmup_steps:.1e} in the last; lower it, or "
                     "raise --max_steps")
    if is_given("--sample_every") and args.sample_every and not val_samples: # (tiny has a default)
        lines.append("--sample_every: nothing will be generated; give pairs that are not trained as --val_data")
    lines += without_guidance(args)
    if args.preserve:
        lines += preserve_warnings(args, samples)
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

def preserve_warnings(args, samples):
    """What --preserve is of all samples, as only those with controls can be asked of the base -> lines."""
    with_controls = sum(sample.repeats for sample in samples if sample.controls)
    epoch = sum(sample.repeats for sample in samples)
    if with_controls < epoch:
        return [f"--preserve {args.preserve:g}: is {args.preserve * with_controls / epoch:.3g} of all samples, as "
                "those without a control are always trained; raise it for a larger share"]
    if args.preserve == 1 and not args.pretrained_lora:
        return ["--preserve 1: all samples learn what the base answers, which a new LoRA already does; lower it, or "
                "give a --pretrained_lora"]
    return []

NO_EFFECT = "has no effect at a CFG scale of 1 or below; raise --true_cfg_scale, or leave it out"

def without_guidance(args):
    """-> lines about flags that guidance alone reads."""
    given = filter(is_given, ("--negative_prompt", "--no-cfg_norm"))
    return [f"{flag}: {NO_EFFECT}" for flag in given if args.true_cfg_scale <= 1]

def result_warnings(args, requests):
    """The same of predict.py's flags and its pairs of a planned sample and its Settings."""
    samples = [sample for sample, _ in requests]
    lines = distortion(samples) + placeholders(samples)
    if (base := distilled(args)) and any(settings.true_cfg_scale > 1 for _, settings in requests):
        lines.append(f"{base}, and is for a CFG scale of 1; give --true_cfg_scale 1")
    place = args.out_dir.resolve()
    targets = {Path(sample.target).resolve().parent for sample in samples if sample.target}
    if args.jobs and targets & {place, *place.parents}: # a dataset's folders are read as a whole
        raise InputError(f"--out_dir {args.out_dir}: lies among the dataset's targets; give another folder")
    if args.image and len(args.image) > 3: # the published models take up to three
        lines.append(f"--image: {len(args.image)} pictures make one result; give their folder to edit each")
    if several := [sample.name for sample in samples if len(sample.prompts) > 1]:
        lines.append(f"{several[0]}: of several prompts only the first is used{others(several)}")
    # each line of --jobs may have a negative prompt of its own
    without = []
    for sample, settings in requests:
        own = is_given("--negative_prompt") or settings.negative_prompt != args.negative_prompt
        if own and settings.true_cfg_scale <= 1:
            without.append(sample.name)
    if without:
        lines.append(f"{without[0]}: its negative prompt {NO_EFFECT}{others(without)}")
    return [f"warning: {line}" for line in lines]

def others(names):
    return f" ({len(names) - 1} others likewise)" if len(names) > 1 else ""

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
    32, or by --height and --width."""
    changes = []
    for sample in samples:
        width, height = sample.sizes[0]
        for encoding in sample.encodings:
            _, h, w = encoding["img_shapes"][0]
            changes.append((abs(w / h * height / width - 1), sample.name, f"{16 * w}x{16 * h}"))
    change, name, size = max(changes, default=(0, "", ""))
    if change <= 0.1:
        return []
    return [f"{name}: {size} changes its aspect by {change:.1%}; give a larger area, or --height and --width of its "
            "shape"]
