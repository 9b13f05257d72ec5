"""What a person should know of samples and flags before hours are spent on them."""
import inspect
import re
import sys
from pathlib import Path

import numpy as np
from PIL import Image

import common
from common import InputError, first_words, open_tensors
from library.cli.near_misses import is_given
from library.data import dataset, mask_files
from library.models import hub

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
    trained = {file.stem for s in samples for file in common_files(s)}
    if shared := [s.name for s in val_samples if not trained.isdisjoint(f.stem for f in common_files(s))]:
        lines.append(f"warning: {len(shared)} of {len(val_samples)} samples of --val_data have pictures that are also "
                     f"trained, for instance {shared[0]}: they do not tell what the LoRA makes of others; move such "
                     "pairs, do not copy them")
    return lines

def common_files(sample):
    """Those files of a sample that another one has only if it has the same pictures."""
    texts = [text["file"] for (_, with_pictures), text in sample.texts.items() if with_pictures]
    return [encoding["file"] for encoding in sample.encodings] + (texts if sample.controls else [])

def overwritten(samples, jobs, out_dir):
    """InputError if the results of a dataset, whose folders are read as a whole, would lie among its targets."""
    place, folders = out_dir.resolve(), {Path(s.target).resolve().parent for s in samples if s.target}
    if jobs and folders & {place, *place.parents}:
        raise InputError(f"--out_dir {out_dir}: lies among the dataset's targets; give another folder")

def no_pictures(val_samples, sample_every):
    if sample_every and not val_samples and is_given("--sample_every"): # (tiny has a default)
        yield "--sample_every: nothing will be generated; give pairs that are not trained as --val_data"

def only_rises(warmup_steps, max_steps, lr):
    if warmup_steps >= max_steps and is_given("--warmup_steps"): # (tiny has a default)
        yield (f"--warmup_steps {warmup_steps}: the run has {max_steps} steps, so its learning rate only rises, to "
               f"{lr * max_steps / warmup_steps:.1e} in the last; lower it, or raise --max_steps")

def preserved(samples, preserve, pretrained_lora):
    """What --preserve is of all samples, as only those with controls can be asked of the base."""
    with_controls = sum(sample.repeats for sample in samples if sample.controls)
    epoch = sum(sample.repeats for sample in samples)
    if preserve == 1 and with_controls == epoch and not pretrained_lora:
        yield ("--preserve 1: all samples learn what the base answers, which a new LoRA already does; lower it, or "
               "give a --pretrained_lora")
    if preserve and with_controls < epoch:
        yield (f"--preserve {preserve:g}: is {preserve * with_controls / epoch:.3g} of all samples, as those without a "
               "control are always trained; raise it for a larger share")

NO_EFFECT = "has no effect at a CFG scale of 1 or below; raise --true_cfg_scale, or leave it out"

def without_cfg(true_cfg_scale):
    """Of a training's validation pictures."""
    if is_given("--negative_prompt") and true_cfg_scale <= 1:
        yield f"--negative_prompt: {NO_EFFECT}"

def results_without_cfg(samples, negative_prompt):
    """Of results; each line of --jobs may have settings of its own."""
    without = []
    for sample in samples:
        own = is_given("--negative_prompt") or sample.settings["negative_prompt"] != negative_prompt
        if own and sample.settings["true_cfg_scale"] <= 1:
            without.append(sample.name)
    if without:
        yield f"{without[0]}: its negative prompt {NO_EFFECT}{others(without)}"

def one_result(samples, image):
    """Of several pictures, of several prompts."""
    if image and len(image) > 3:
        yield f"--image: {len(image)} pictures make one result; give their folder to edit each"
    if several := [sample.name for sample in samples if len(sample.prompts) > 1]:
        yield f"{several[0]}: of several prompts only the first is used{others(several)}"

def others(names):
    return f" ({len(names) - 1} others likewise)" if len(names) > 1 else ""

MARKUP = re.compile(r"#+ |[-*+] |\d+\. |\*\*|```|[{}\[\]]|\"\w+\": ") # how lines of Markdown and JSON begin

def one_text_in_lines(samples):
    """A caption as language models write it; each of its lines is a prompt of its own."""
    found = [sample for sample in samples if len(sample.prompts) > 1 and any(map(MARKUP.match, sample.prompts))]
    if found:
        one = found[0]
        yield (f"{one.name}: its caption has {len(one.prompts)} lines, and each is trained as a prompt of its own, for "
               f"instance {next(filter(MARKUP.match, one.prompts))!r}; write a text in one line"
               + others([sample.name for sample in found]))

def bend_of(samples):
    """The target whose aspect changes most, if that is by more than 10 %, at one of its sizes."""
    bends = [] # (by how much, the new aspect, sample)
    for sample in samples:
        width, height = sample.sizes[0]
        for encoding in sample.encodings:
            _, h, w = encoding["img_shapes"][0]
            bends.append((abs(w / h * height / width - 1), w / h, sample))
    bend, aspect, sample = max(bends, key=lambda one: one[0])
    own = [side for side in ("height", "width") if sample.settings.get(side)]
    if bend <= 0.1:
        return
    if len(own) > 1:
        (width, height), wide = sample.sizes[0], sample.settings["width"]
        yield (f"{sample.name}: --width and --height change its shape from {width / height:.2f} to {aspect:.2f}; give "
               f"--width {wide} --height {round(wide * height / width)}, or leave one out")
    elif own:
        yield f"{sample.name}: {own[0]} alone changes its aspect by {bend:.1%}; give --height and --width"
    else:
        yield f"{sample.name}: sides rounded to 32 change its aspect by {bend:.1%}; a larger area bends it less"

def size_for_tiny(samples, model):
    """tiny was made for pictures of 160x160: a photograph of 12 megapixels would take it minutes a step."""
    large, remedies = [], set()
    for sample in samples if hub.is_tiny(model) else []:
        both = sample.settings.get("width") and sample.settings.get("height") # one alone keeps the area
        of_target = "a smaller --width and --height" if both else "--target_pixels 160x160"
        for encoding in sample.encodings:
            for n, (_, h, w) in enumerate(encoding["img_shapes"]):
                if h * w > 400:
                    large.append((h * w, 16 * w, 16 * h, sample.name))
                    remedies.add("--control_pixels 160x160" if n else of_target)
    if large:
        _, width, height, name = max(large)
        yield (f"{name}: {width}x{height} is slow with the model tiny, which knows small pictures; give "
               f"{' '.join(sorted(remedies, reverse=True))}")

def longest_of(samples, max_tokens):
    """--max_tokens cannot hold for a sample that is longer by itself."""
    lengths = []
    for sample in samples:
        text = max(text["tokens"] for text in sample.texts.values())
        for encoding in sample.encodings:
            lengths.append((sum(h * w for _, h, w in encoding["img_shapes"]) + text, sample.name))
    length, name = max(lengths)
    if length > max_tokens:
        yield f"--max_tokens {max_tokens}: {name} has {length} by itself, and is computed all the same"

def of_masks(samples, mask_foreground_weight, mask_background_weight):
    """What is wrong with the weights of masks."""
    weights = mask_foreground_weight, mask_background_weight
    if not any(weights):
        raise InputError("--mask_foreground_weight: both mask weights are 0, so nothing would be learned; give one")
    masked = any(sample.mask or "mask" in encoding for sample in samples for encoding in sample.encodings)
    if weights != (2, 1) and not masked:
        yield "--mask_foreground_weight, --mask_background_weight: there is no mask; add mask/, or give --mask auto"

# {a flag that tells which script asks: its warnings, whose parameters are flags}
WARNINGS = dict(
    model=[bend_of, size_for_tiny], # of all scripts
    data=[one_text_in_lines], # of all that train or encode
    # of trainings, then of predict.py
    max_steps=[longest_of, of_masks, no_pictures, without_cfg, only_rises, preserved],
    jobs=[overwritten, one_result, results_without_cfg])

def warnings(args, samples, val_samples=()):
    """What a person may not expect of these flags and planned samples -> lines; InputError for what cannot be meant. A
    script that lacks a flag, as tools/lean_train.py does, misses the warnings that read it."""
    known, lines = vars(args) | dict(samples=samples, val_samples=val_samples), []
    if not samples: # all have errors, which are listed
        return []
    for flag, functions in WARNINGS.items():
        for warn in functions:
            read = inspect.signature(warn).parameters
            if known.keys() >= {flag, *read}:
                lines += warn(*[known[name] for name in read]) or ()
    return [f"warning: {line}" for line in lines]

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
