"""What a person should know of samples and flags before hours are spent on them."""
import inspect
import re
from pathlib import Path

from common import InputError
from library.cli.near_misses import is_given
from library.data import dataset
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
    for role in dataset.overlay_roles():
        if count := sum(role in s.overlays for s in samples):
            lines.append(f"{role}: {count} of {len(samples)} pairs")
    if auto := sum("mask" in s.encodings[0] for s in samples):
        lines.append(f"--mask auto looks for the edit in {auto} pairs; tools/doctor.py DATA --mask auto shows what it "
                     "finds")
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

def results_without_cfg(samples, settings, negative_prompt):
    """Of results; each line of --jobs may have settings of its own."""
    without = []
    for sample, wanted in zip(samples, settings):
        own = is_given("--negative_prompt") or wanted.negative_prompt != negative_prompt
        if own and wanted.true_cfg_scale <= 1:
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

def bend_of(samples, settings):
    """The target whose aspect changes most, if that is by more than 10 %, at one of its sizes."""
    bends = [] # (by how much, the new aspect, the sample's place)
    for place, sample in enumerate(samples):
        width, height = sample.sizes[0]
        for encoding in sample.encodings:
            _, h, w = encoding["img_shapes"][0]
            bends.append((abs(w / h * height / width - 1), w / h, place))
    bend, aspect, place = max(bends, key=lambda one: one[0])
    if bend <= 0.1:
        return
    sample = samples[place]
    own = [] # sides that a person has given
    if settings:
        own = [side for side in ("height", "width") if getattr(settings[place], side)]
    if len(own) > 1:
        (width, height), wide = sample.sizes[0], settings[place].width
        yield (f"{sample.name}: --width and --height change its shape from {width / height:.2f} to {aspect:.2f}; give "
               f"--width {wide} --height {round(wide * height / width)}, or leave one out")
    elif own:
        yield f"{sample.name}: {own[0]} alone changes its aspect by {bend:.1%}; give --height and --width"
    else:
        yield f"{sample.name}: sides rounded to 32 change its aspect by {bend:.1%}; a larger area bends it less"

def size_for_tiny(samples, settings, model):
    """tiny was made for pictures of 160x160: a photograph of 12 megapixels would take it minutes a step."""
    large, remedies = [], set()
    for place, sample in enumerate(samples if hub.is_tiny(model) else []):
        both = settings and settings[place].width and settings[place].height # one alone keeps the area
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

def warnings(args, samples, val_samples=(), settings=()):
    """What a person may not expect of these flags and planned samples -> lines; InputError for what cannot be meant. A
    script that lacks a flag, as tools/lean_train.py does, misses the warnings that read it. settings: predict.Settings
    of each sample, of results."""
    known, lines = vars(args) | dict(samples=samples, val_samples=val_samples, settings=settings), []
    if not samples: # all have errors, which are listed
        return []
    for flag, functions in WARNINGS.items():
        for warn in functions:
            read = inspect.signature(warn).parameters
            if known.keys() >= {flag, *read}:
                lines += warn(*[known[name] for name in read]) or ()
    return [f"warning: {line}" for line in lines]
