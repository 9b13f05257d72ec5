"""What a person should know of samples and flags before hours are spent on them."""
import sys
from pathlib import Path

import numpy as np
from PIL import Image

import common
from common import InputError, first_words, open_tensors
from library.cli.command_line import is_given
from library.data import dataset, mask_files

def how_many(samples):
    """-> "19 samples", and how many prompts, if that is another number."""
    prompts = sum(len(s.prompts) for s in samples)
    return f"{len(samples)} samples" + (f" with {prompts} prompts" if prompts != len(samples) else "")

def describe(samples, val_samples):
    """-> lines: what will be trained, how many of it have a mask, and how much of it is validated, too."""
    lines = [how_many(samples)]
    if alone := sum(not s.controls for s in samples):
        lines[0] += f", {alone} of them without a control: text-to-image"
    if line := count_masks(samples):
        lines.append(line)
    for role in dataset.other_roles():
        if count := sum(role in s.others for s in samples if role != "mask"):
            lines.append(f"{role}: {count} of {len(samples)} pairs")
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
    lines = []
    if not samples or "max_steps" not in args: # all samples have errors, which are listed; or nothing is trained
        return lines
    length, name = max((tokens_of(sample), sample.name) for sample in samples)
    if length > args.max_tokens:
        lines.append(f"--max_tokens {args.max_tokens}: {name} has {length} by itself, and is computed all the same")
    weights = args.mask_foreground_weight, args.mask_background_weight
    if not any(weights):
        raise InputError("--mask_foreground_weight: both mask weights are 0, so nothing would be learned; give one")
    if weights != (2, 1) and not any(has_mask(sample) for sample in samples):
        lines.append("--mask_foreground_weight, --mask_background_weight: there is no mask; add mask/, or give --mask "
                     "auto")
    if args.warmup_steps >= args.max_steps and is_given("--warmup_steps"): # (tiny has a default)
        lines.append(f"--warmup_steps {args.warmup_steps}: the run has {args.max_steps} steps, so its learning rate "
                     f"only rises, to {args.lr * args.max_steps / args.warmup_steps:.1e} in the last; lower it, or "
                     "raise --max_steps")
    if is_given("--sample_every") and args.sample_every and not val_samples: # (tiny has a default)
        lines.append("--sample_every: nothing will be generated; give pairs that are not trained as --val_data")
    if is_given("--negative_prompt") and args.true_cfg_scale <= 1:
        lines.append(f"--negative_prompt: {NO_EFFECT}")
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

def result_warnings(args, samples):
    """The same of predict.py's flags and planned samples, each of which may have settings of its own."""
    lines = []
    place = args.out_dir.resolve()
    targets = {Path(sample.target).resolve().parent for sample in samples if sample.target}
    if args.jobs and targets & {place, *place.parents}: # a dataset's folders are read as a whole
        raise InputError(f"--out_dir {args.out_dir}: lies among the dataset's targets; give another folder")
    if args.image and len(args.image) > 3:
        lines.append(f"--image: {len(args.image)} pictures make one result; give their folder to edit each")
    if several := [sample.name for sample in samples if len(sample.prompts) > 1]:
        lines.append(f"{several[0]}: of several prompts only the first is used{others(several)}")
    without = []
    for sample in samples:
        own = is_given("--negative_prompt") or sample.settings["negative_prompt"] != args.negative_prompt
        if own and sample.settings["true_cfg_scale"] <= 1:
            without.append(sample.name)
    if without:
        lines.append(f"{without[0]}: its negative prompt {NO_EFFECT}{others(without)}")
    return [f"warning: {line}" for line in lines]

def others(names):
    return f" ({len(names) - 1} others likewise)" if len(names) > 1 else ""

def count_masks(samples):
    """-> a line: how many of these planned samples have a mask, by hand or of --mask auto, as far as they are encoded;
    "" if none should have one."""
    by_hand = sum(bool(sample.mask) for sample in samples)
    files = [sample.encodings[0]["file"] for sample in samples if "mask" in sample.encodings[0]]
    if not by_hand and not files:
        return ""
    if not all(file.is_file() for file in files): # --plan, --no-use_cache
        return f"masks: {by_hand} of {len(samples)} pairs by hand; --mask auto makes others when it encodes them"
    made = sum("edit_mask" in open_tensors(file).keys() for file in files)
    line = f"masks: {by_hand + made} of {len(samples)} pairs"
    if made < len(files):
        line += (f" ({len(files) - made} differ nowhere or nearly everywhere, are recoloured, or have two shapes; "
                 "tools/doctor.py DATA --mask auto shows them)")
    return line

def check_weights(args, samples, val_samples):
    """-> (samples, validation samples): planned ones, and encoded as far as they will be, without those whose mask
    leaves no token a weight in train.py's flow_loss, whose loss of them would be 0 in silence. If there are any, they
    are named, and end the script, without --skip_bad. The same on every process."""
    weights = [getattr(args, f"mask_{part}_weight", 1.0) for part in ("foreground", "background")] # cache.py has none
    if min(weights) > 1e-30: # (in fp32 a smaller one may be 0)
        return samples, val_samples
    problems, *kept = common.on_first_process(lambda: split_weightless(samples, val_samples, weights))
    if common.rank() == 0:
        common.print_problems(problems)
    if problems and not args.skip_bad:
        sys.exit("correct these masks, or go on without these samples: --skip_bad" if common.rank() == 0 else 1)
    if not kept[0]:
        raise InputError(f"{' '.join(args.data)}: no sample is left; correct the masks that are listed above")
    return kept

def split_weightless(samples, val_samples, weights):
    """-> (a line for each mask that leaves nothing, the other samples, the other validation samples)."""
    problems, kept = [], ([], [])
    for all_of, good in zip((samples, val_samples), kept):
        for sample in common.progress("masks", all_of, unit="sample"):
            with common.collect_errors(problems):
                for encoding in sample.encodings:
                    check_weight(sample, encoding, *weights)
                good.append(sample)
    return problems, *kept

def check_weight(sample, encoding, foreground, background):
    """InputError if this encoding's mask leaves no token a weight."""
    _, h, w = encoding["img_shapes"][0]
    mask_I = edit_mask_of(sample, encoding["file"], (w, h))
    if mask_I is not None and (foreground * mask_I + background * (1 - mask_I)).sum() == 0: # as load_item has it
        part = "foreground" if foreground < background else "background"
        raise InputError(f"{sample.mask or sample.name}: this mask leaves no token a weight in the loss at {16 * w}x"
                         f"{16 * h}; correct it, or raise --mask_{part}_weight")

def edit_mask_of(sample, file, size):
    """-> the edited share of each of (width, height) tokens, fp32, as cache.encode_latents has it: read from the
    encoded file alone, or of a mask that will be encoded later. None without a mask, or for a later one of auto_mask,
    which has both parts. InputError names a damaged file."""
    if file.is_file():
        try:
            with open_tensors(file, "np") as f:
                return f.get_tensor("edit_mask") if "edit_mask" in f.keys() else None
        except Exception as e: # it is damaged, which can fail in any way
            raise InputError(f"{file}: cannot be read ({first_words(e)}); cache.py --verify encodes it again")
    if not sample.mask:
        return None
    mask = mask_files.read_mask(sample.mask, sample.contents[sample.mask]).resize(size, Image.BOX)
    return np.asarray(mask).flatten() / np.float32(255)
