"""
Which validation of a run is its best so far, by the loss and by the PSNR of the held-out pairs. train.py prints it
after each validation, keeps that step's checkpoint, and names it at the end; tools/page.py shows it.

Steps are compared at the digits that are printed: 27.0 dB is not better than 27.0 dB, and of equal steps the first is
the best. With --resume other --val_data, --val_pictures or flags of sampling may be given; then the comparison begins
anew: each validation in the log has a `val_key`, a hash of all these, and is compared with those that have the same.
"""
import contextlib
import json
import math
import os

DECIMALS = {"validation loss": 4, "mean PSNR": 1} # {measure: the decimals that are printed}
MEASURES = tuple(DECIMALS)
KINDS = "input", "base", "lora", "vae" # what is compared with the target, in the log's order
ENOUGH = 8 # with fewer held-out pairs another choice of them would often name another step

# ---- the lines of a log, which may come from anywhere ----------------------------------------------------------------

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
    """An exception of any kind if a line of a log is no validation as train.py writes it."""
    psnrs = []
    # A foreign line may have other things than these lists and objects: then this fails by itself.
    for picture in record["pictures"]:
        os.fsencode(picture["file"]) # fails for what can be no file's name, but for one with NUL
        if "\0" in picture["file"] or not isinstance(picture["prompt"], str):
            raise ValueError("no file, or no prompt")
        if not is_count(picture["controls"], 100) or len(picture["psnr"]) != 4:
            raise ValueError("no number of controls, or not four PSNRs")
        psnrs += picture["psnr"]
    for means in record["psnr"].values():
        psnrs += [means[kind] for kind in KINDS]
    if not all(is_number(psnr, 1e6) for psnr in psnrs) or not is_number(record["val_loss"]):
        raise ValueError("no numbers")
    if not is_count(record["step"], 10**12) or not is_count(record["pairs"], 10**12):
        raise ValueError("no step, or no number of pairs")
    lost = record.get("not_finite", [])
    if not isinstance(lost, list) or not all(isinstance(name, str) for name in lost):
        raise ValueError("no names of pictures that are not finite")
    if not isinstance(record["pictures"], list) or not isinstance(record.get("flags", {}), dict):
        raise ValueError("no list of pictures, or no flags")
    if not isinstance(record["val_key"], str) or not is_shallow(record):
        raise ValueError("no val_key, or too deep")

def read_validations(out_dir):
    """-> the validations in a run's log, in order, as train.py wrote them; other lines are left out. [] without a log,
    which only the first process has."""
    validations = []
    log = out_dir / "log.jsonl"
    if not log.is_file():
        return validations
    for line in log.read_text("utf-8", "replace").split("\n"):
        if '"val_loss"' in line: # few of a long log
            with contextlib.suppress(Exception): # a foreign log can fail in any way
                record = read_line(line)
                check_validation(record)
                validations.append(record)
    return validations

# ---- which one is the best? ------------------------------------------------------------------------------------------
# validations: as read_validations returns them. A measure is one of MEASURES.

def mean_psnr(validation):
    """-> {kind: dB} for the KINDS: the mean PSNRs to the target over all pictures of a validation; {} without any."""
    rows = [picture["psnr"] for picture in validation["pictures"]]
    return {kind: sum(column) / len(column) for kind, column in zip(KINDS, zip(*rows))}

def value_of(validation, measure):
    """-> its loss, or the mean PSNR of what the LoRA makes, at the digits that are printed."""
    value = validation["val_loss"]
    if measure == "mean PSNR":
        value = mean_psnr(validation)["lora"]
    return round(value, DECIMALS[measure])

def in_words(value, measure):
    """-> 0.5432, or 24.1 dB."""
    if not math.isfinite(value):
        return "NaN or Inf"
    unit = " dB" if measure == "mean PSNR" else ""
    return f"{value:.{DECIMALS[measure]}f}{unit}"

def comparable(validations, measure):
    """-> those that have this measure (without pictures there is no PSNR), and are compared with the newest one."""
    compared = [validation for validation in validations if validation["val_key"] == validations[-1]["val_key"]]
    if measure == "mean PSNR":
        compared = [validation for validation in compared if validation["pictures"]]
    return compared

def best_of(compared, measure):
    """-> of what comparable() returns the validation with the least loss, or the greatest PSNR, of equal ones the
    first; None if no value is finite."""
    sign = 1
    if measure == "mean PSNR":
        sign = -1
    finite = [validation for validation in compared if math.isfinite(value_of(validation, measure))]
    return min(finite, key=lambda validation: sign * value_of(validation, measure), default=None)

def best_steps(validations):
    """-> {measure: the best step so far}, as far as there is one."""
    best = {}
    for measure in MEASURES:
        validation = best_of(comparable(validations, measure), measure)
        if validation:
            best[measure] = validation["step"]
    return best

def steps_to_keep(validations):
    """-> the steps whose checkpoints --keep does not delete: the best ones by each val_key, as a later --resume may
    return to the --val_data of an earlier one."""
    steps = set()
    for key in {validation["val_key"] for validation in validations}:
        of_key = [validation for validation in validations if validation["val_key"] == key]
        steps.update(best_steps(of_key).values())
    return steps

def better_steps(validations):
    """-> {step: the measures by which it is better than the newest validation}."""
    better = {}
    for measure, step in best_steps(validations).items():
        compared = comparable(validations, measure)
        if value_of(best_of(compared, measure), measure) != value_of(compared[-1], measure):
            better.setdefault(step, []).append(measure)
    return better

def verdict(compared, measure):
    """-> ("step 20", "25.0 dB; the last, step 40, has 1.5 dB") of what comparable() returns; None if no value is
    finite."""
    best = best_of(compared, measure)
    if best is None:
        return None
    newest = compared[-1]
    remark = in_words(value_of(best, measure), measure)
    if newest["step"] != best["step"]:
        remark += f"; the last, step {newest['step']:,}, has {in_words(value_of(newest, measure), measure)}"
    return f"step {best['step']:,}", remark

def few_pairs(validations):
    """-> a line if the newest validation has so few held-out pairs that they cannot tell steps apart, else None.
    (Statistics do not help: of two pairs a t-test calls everything equal, also a loss that has doubled.)"""
    for newest in validations[-1:]:
        pairs = min(newest["pairs"], len(newest["pictures"]) or newest["pairs"])
        if pairs < ENOUGH:
            return (f"too few held-out pairs to tell steps apart: {pairs}; give {ENOUGH} or more (--val_data, "
                    "--val_pictures)")

def describe(validations):
    """-> lines: "best so far: step 200 by validation loss (0.5432), step 300 by mean PSNR (24.1 dB)", and few_pairs."""
    words = []
    for measure in MEASURES:
        found = verdict(comparable(validations, measure), measure)
        if found:
            step, remark = found
            words.append(f"{step} by {measure} ({remark})")
    lines = [f"best so far: {', '.join(words) or 'none'}"]
    left_out = len(validations) - len(comparable(validations, "validation loss"))
    if left_out:
        lines[0] += f"; not compared: {left_out} with other --val_data or flags of pictures"
    if few := few_pairs(validations):
        lines.append(few)
    return lines
