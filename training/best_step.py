"""
Which validation of a run is its best so far. train.py says it after each one and keeps that step's checkpoint; at the
end next_commands recommends it.

Of two steps none is called better if what was held out cannot tell them apart: see are_equal.

Only what was made of the same things is compared: with --resume other --val_data, --val_pictures or flags of sampling
may be given. So a validation's line in the log says what its loss and its pictures were made of: `loss_of`, `psnr_of`.
Lines of an older train.py do not, and are compared with each other.
"""
import contextlib
import json
import math
import os
import statistics

import common
from common import LONG_TEXT, content_key, warn_once
from library.cli import flag_types
from library.data.dataset import pictures_of
from library.lora import lora_paths
from library.lora.lora_paths import checkpoints, number_of, numbered
from library.results import code_hash
from training import run_folder

MEASURES = {"validation loss": "loss_of", "mean PSNR": "psnr_of"} # what a log's line says that each was made of
# Student's t at 95 %, of 2, 3, ... pairs; the last value serves for all larger numbers, for which it falls to 2
STUDENT = 12.7, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.2, 2.1
KINDS = "input", "base", "lora", "vae" # what is compared with the target, in the log's order


def short_key(what):
    return content_key(what=what)[:16]


def loss_of(samples, args):
    """-> what the loss of a validation on these planned samples is made of, as the log has it. Their order counts: the
    noise depends on it. What --resume cannot change, such as the model, is left out."""
    files = [[s.encodings[0]["file"].stem, s.texts[s.prompts[0], True]["file"].stem] for s in samples]
    return dict(val_data=short_key(files), samples=len(samples), mask_foreground_weight=args.mask_foreground_weight,
                mask_background_weight=args.mask_background_weight, code=code_hash.training(code_hash.LOSS))


def psnr_of(samples, settings, loras, seed, from_latents):
    """-> what the mean PSNR of these planned samples is made of, likewise: their pictures at their sizes, their
    prompts, the flags of sampling, hashes of --sample_lora; and of how many the original target was not here."""
    contents = []
    for s in samples:
        pictures = [s.contents.get(path) for path in pictures_of(s)]
        contents.append([pictures, s.encodings[0]["img_shapes"], s.prompts[0]])
    flags = settings | dict(sample_lora=[content[:16] for content in loras], seed=seed, from_latents=from_latents)
    if settings["true_cfg_scale"] <= 1: # then it has no effect
        del flags["negative_prompt"]
    return dict(val_data=short_key(contents), val_pictures=len(samples), **flags)


def read_line(text):
    """A line of a log: its numbers fit into a float, as those of a foreign log need not."""
    def parse_int(digits):
        return int(digits) if len(digits) < 20 else float(digits)
    return json.loads(text, parse_int=parse_int)


def is_number(value, most=math.inf):
    """Whether it is a number, from -most to most. (Without a limit NaN is one, too: the loss of a run that went
    wrong.)"""
    is_one = type(value) in (int, float) # no bool
    return is_one and (most == math.inf or abs(value) <= most)


def is_count(value, most):
    return type(value) is int and 0 <= value <= most


def is_shallow(value, levels=6):
    """Whether JSON is nested so little that no reader of it, nor str(), runs out of stack."""
    parts = value
    if isinstance(value, dict):
        parts = value.values()
    elif not isinstance(value, list):
        return True
    return levels > 0 and all(is_shallow(part, levels - 1) for part in parts)


def check_validation(record):
    """An exception of any kind if a log's line is no validation as train.py writes it: a log may come from anywhere."""
    pictures, groups = record.get("pictures", []), record.get("psnr", {})
    psnrs = []
    for picture in pictures:
        os.fsencode(picture["file"]) # fails for what can be no file's name, but for one with NUL
        if "\0" in picture["file"] or not isinstance(picture["prompt"], str):
            raise ValueError("no file, or no prompt")
        if not is_count(picture["controls"], 100) or len(picture["psnr"]) != 4:
            raise ValueError("no number of controls, or not four PSNRs")
        psnrs += picture["psnr"]
    for means in groups.values():
        psnrs += [means[kind] for kind in KINDS]
    if not all(is_number(psnr, 1e6) for psnr in psnrs) or not is_number(record["val_loss"]):
        raise ValueError("no numbers")
    if not all(map(is_number, record.get("val_losses", []))):
        raise ValueError("no losses of samples")
    lost = record.get("not_finite", [])
    if not isinstance(lost, list) or not all(isinstance(name, str) for name in lost):
        raise ValueError("no names of pictures that are not finite")
    if not isinstance(pictures, list) or not is_count(record["step"], 10**12) or not is_shallow(record):
        raise ValueError("no list of pictures, or no step")
    if not all(isinstance(record.get(name, {}), dict) for name in ("loss_of", "psnr_of", "flags")):
        raise ValueError("no objects")


def read_validations(out_dir):
    """-> the validations in a run's log, as train.py wrote them; other lines are left out. Of a log that is too large
    to be read there are none, and a line says so."""
    log, lines, found = out_dir / "log.jsonl", [], []
    if log.is_file(): # only the first process has one
        if log.stat().st_size > LONG_TEXT:
            warn_once(f"warning: {log}: over {LONG_TEXT:,} bytes, and left aside: no validation is called the best, "
                      "and --keep keeps the newest checkpoints")
        else:
            lines = log.read_text("utf-8", "replace").split("\n")
    for line in lines:
        if '"val_loss"' in line: # few of a long log
            with contextlib.suppress(Exception): # a foreign log can fail in any way
                record = read_line(line)
                check_validation(record)
                found.append(record)
    return found


def lost_steps(records, measure):
    """-> the steps of those validations that have NaN or Inf instead of a loss, or of a picture: they are not ranked by
    this measure."""
    if measure == "mean PSNR":
        return [record["step"] for record in records if record.get("not_finite")]
    return [record["step"] for record in records if not math.isfinite(record["val_loss"])]


def mean_psnr(record):
    """-> {kind: dB} for the KINDS: the mean PSNRs to the target of a validation's pictures; {} if there are none. This
    is the mean of psnr[group] over the groups, weighted by their numbers of pictures. (A log that does not name the
    pictures weighs all groups alike.)"""
    rows = [picture["psnr"] for picture in record.get("pictures", [])]
    rows = rows or [[means[kind] for kind in KINDS] for means in record.get("psnr", {}).values()]
    return {kind: sum(column) / len(column) for kind, column in zip(KINDS, zip(*rows))}


def values_of(record):
    """-> {measure: value} of a validation: its loss, and the LoRA's mean PSNR over all pictures, if it has any."""
    values, means = {"validation loss": record["val_loss"]}, mean_psnr(record)
    if means:
        values["mean PSNR"] = means["lora"]
    return values


def sets_of(records, measure):
    """-> lists of those of these validations that have this measure, each made of the same things; last the newest
    one's."""
    sets = {}
    for record in records:
        if measure in values_of(record):
            made_of = json.dumps(record.get(MEASURES[measure]), sort_keys=True)
            sets[made_of] = sets.pop(made_of, []) # it moves behind the others
            sets[made_of].append(record)
    return list(sets.values())


def comparable(records, measure):
    """-> those of these validations that were made of what the newest one with this measure was made of."""
    return (sets_of(records, measure) or [[]])[-1]


def in_words(measure, value):
    """A value with the digits that a person is shown: 0.543, or 24.1 dB."""
    if not math.isfinite(value):
        return "NaN or Inf"
    return f"{value:.1f} dB" if measure == "mean PSNR" else f"{value:.3g}"


def of_pairs(record, measure):
    """-> {held-out pair: what the measure is the mean of}; {} if the log does not have it, as older ones have not."""
    if measure == "mean PSNR":
        return {p["file"]: p["psnr"][KINDS.index("lora")] for p in record.get("pictures", [])}
    return dict(enumerate(record.get("val_losses", [])))


def are_equal(one, other, measure):
    """Whether two validations made of the same things cannot be told apart by this measure: they print alike; or, as
    pairs differ in what they gain, other held-out pairs could turn the difference around. This is Student's t-test of
    the pairs' differences, at 95 %. (Where no pairs are known, or one, only the digits tell.)"""
    if in_words(measure, values_of(one)[measure]) == in_words(measure, values_of(other)[measure]):
        return True
    before, after = of_pairs(one, measure), of_pairs(other, measure)
    gains = [after[pair] - before[pair] for pair in before.keys() & after.keys()]
    gains = [gain for gain in gains if is_number(gain, 1e30)] # a stranger's log may have any number
    if len(gains) < 2:
        return False
    t = STUDENT[min(len(gains) - 2, len(STUDENT) - 1)]
    return abs(statistics.fmean(gains)) < t * statistics.stdev(gains) / math.sqrt(len(gains))


def leading(records, measure):
    """-> of these validations the best one, and behind it the newest one if this is another step's and equal to it; []
    if there is no finite one."""
    best = best_of(records, measure)
    if best is None:
        return []
    if best["step"] != records[-1]["step"] and are_equal(best, records[-1], measure):
        return [best, records[-1]]
    return [best]


def verdict(records, measure):
    """-> ("step 20", "25.0 dB; the last, step 40, has 1.5 dB"), or ("step 20 and step 40", their values and that they
    are equal); None if there is no finite one. records: of one set, as `comparable` returns them."""
    best = leading(records, measure)
    if not best:
        return None
    newest = records[-1]
    value, last = [in_words(measure, values_of(record)[measure]) for record in (best[0], newest)]
    remark = value
    if len(best) > 1 and value == last:
        remark += ", equal"
    elif len(best) > 1:
        remark += f" and {last}, equal as far as {len(of_pairs(newest, measure))} held-out pairs can tell"
    elif best[0]["step"] != newest["step"]:
        remark += f"; the last, step {newest['step']:,}, has {last}"
    return " and ".join(f"step {record['step']:,}" for record in best), remark


def best_of(records, measure):
    """-> the validation with the least loss, or with the greatest mean PSNR, of equal ones the first; None if there is
    no finite one."""
    sign = -1 if measure == "mean PSNR" else 1
    finite = [record for record in records if math.isfinite(values_of(record)[measure])]
    return min(finite, key=lambda record: sign * values_of(record)[measure], default=None)


def best_steps(out_dir):
    """-> {measure: (step, value)} by the run's log, among the validations made of what the newest one was made of, as
    tools/page.py has them. {} before the first."""
    records, steps = read_validations(out_dir), {}
    for measure in MEASURES:
        if best := best_of(comparable(records, measure), measure):
            steps[measure] = best["step"], values_of(best)[measure]
    return steps


def steps_to_keep(out_dir):
    """-> the best step of each set of validations that are compared, whose checkpoint --keep does not delete."""
    records, best = read_validations(out_dir), []
    for measure in MEASURES:
        best += [best_of(compared, measure) for compared in sets_of(records, measure)]
    return {record["step"] for record in best if record}


def remove_others(out_dir, kept):
    """Deletes all checkpoints but these and steps_to_keep, and what is left of those whose deletion has failed; nothing
    where the log cannot be read."""
    best = steps_to_keep(out_dir)
    for old in numbered(out_dir, "checkpoint"):
        if old not in kept and number_of(old) not in best:
            run_folder.remove_old(old)


def not_compared(records, measure):
    """-> ["2 earlier validations with other val_data are not compared by mean PSNR"], or [] if all are compared."""
    *earlier, newest = sets_of(records, measure) or [[]]
    number = sum(map(len, earlier))
    if not number:
        return []
    names = differences([records[0] for records in (newest, *earlier)], measure)
    noun, verb = ("validation", "is") if number == 1 else ("validations", "are")
    return [f"{number} earlier {noun} with other {', '.join(names)} {verb} not compared by {measure}"]


def differences(records, measure):
    """-> the names of what some of these validations were made of and the first one was not; [] if all are alike."""
    names = {} # in order
    first, *others = [record.get(MEASURES[measure]) or {} for record in records]
    for other in others:
        for name in first | other:
            if first.get(name) != other.get(name):
                names[name] = True
    return list(names)


def describe(out_dir):
    """-> "best so far: step 200 by validation loss (0.543); step 300 by mean PSNR (24.1 dB)"; and which earlier
    validations are not compared."""
    words, left_out, records = [], [], read_validations(out_dir)
    for measure in MEASURES:
        if found := verdict(comparable(records, measure), measure):
            words.append(f"{found[0]} by {measure} ({found[1]})")
        left_out += not_compared(records, measure)
    return "; ".join([f"best so far: {', '.join(words) or 'none'}", *left_out])


def better_checkpoints(out_dir):
    """-> {checkpoint's folder: the measures by which it is better than the newest one, and not only equal to it}, as
    far as it is still there."""
    saved = {number_of(path): path for path in checkpoints(out_dir)[:-1]}
    validations, better = read_validations(out_dir), {}
    for measure in MEASURES:
        records = comparable(validations, measure)
        best = [record["step"] for record in leading(records, measure)]
        if best and best[0] in saved and best[-1] != records[-1]["step"]:
            better.setdefault(saved[best[0]], []).append(measure)
    return better

# train.py's flags that predict.py has, too, and needs for the same pictures
DRAWING = ["model", "transformer", "quantize", "quantize_text_encoder", "offload", *flag_types.SAMPLING]

def option(name, value):
    """-> the words of a command that give a flag this value, which may look like a flag itself."""
    value = "all" if value == flag_types.ALL_BLOCKS else str(value)
    return [f"--{name}={value}"] if value.startswith("-") else [f"--{name}", value]

def next_commands(args, out_dir, default):
    """-> lines: what a person may want to do with a finished run of train.py. default(flag): its default value."""
    lines, flags = [], []
    for name in DRAWING:
        value = vars(args).get(name)
        if value != default(name):
            flags += option(name, value)
    chosen = out_dir
    for folder, names in better_checkpoints(out_dir).items():
        lines.append(f"{folder} is better than the last one by {' and '.join(names)}; compare them")
        if len(names) == len(best_steps(out_dir)): # by all measures
            chosen = folder
    draw = common.shell_command(["python", "predict.py", *flags, "--lora", chosen, *args.sample_lora])
    look = common.shell_command(["python", "tools/page.py", out_dir])
    return [*lines, "next:", f"  {draw} --image CONTROL.png --prompt \"...\"", f"  {look}",
            f"ComfyUI: copy it to models/loras; diffusers: pipe.load_lora_weights({str(chosen / lora_paths.LORA_FILE)!r})"]
