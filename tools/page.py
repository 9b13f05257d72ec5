"""
Makes a web page of a training: does it learn? The page shows which step is the best, the validation pictures of this
and of any other step, the curves, training pairs whose losses stand out, the flags, and commands to continue or use the
run. The curves of several runs share one chart.

Reads run folders of train.py, or copies of them; writes index.html into the (first) run's folder. The page needs no
server and no network. It refers to the pictures in samples/, so copy the page together with its folder. A run may come
from someone else: of its folder nothing is read that lies elsewhere, and no command is offered that train.py would not
know.

$ python tools/page.py out/RUN --data photos            # the datasets that were trained, for pictures of odd pairs
$ python tools/page.py out/RUN --watch          # while it trains: keeps the page, and browsers that show it, up to date
$ python tools/page.py out/RUN out/OTHER --out both.html
"""
import contextlib
import json
import math
import os
import re
import shlex
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import library # first, so that no other folder is taken for one of our modules
import numpy as np

import common
from common import InputError, tell
from library.cli import flag_types
from library.cli.command_line import Parser
from library.cli.flag_types import natural
from library.data import dataset, index_file
from library.lora import lora_paths
from training import best_step
from tools.page_common import (PAGE, area_words, card, chapters, detail, fold, link, node, save_page, section, size_of,
                               table, thumbnail, tile)

COLUMNS = 300 # a curve with more points shows the least, the mean and the greatest value of each column
SMOOTH = 30 # a smoothed value is the mean of 1/30 of the run
SHOWN = 6 # cards of pictures that are not folded
SEEN, STANDS_OUT = 3, 2 # a pair that was seen so often, and has more than so many times the median loss, is named
WATCH, HOUR = 20, 3600 # seconds; --watch looks for news so often, and so does a browser that shows the page
# {measure: (its chart's title, its lines: name, key in a validation, style, which lacks the colour if that is the
# run's own)}; the first line is the measure itself
LINES = {"validation loss": ("Validation loss", [("held-out pairs", "val_loss", "dots"),
                                                 ("training pairs", "train_loss", "dash")]),
         "mean PSNR": ("PSNR to the target (dB)", [("LoRA", "lora", "dots"), ("base", "base", "dash ink"),
                                                   ("VAE alone", "vae", "dash mute")])}
FROM_ZERO = "Gradient norm", "Learning rate", "Tokens per second" # charts whose axis begins there
NOT_COMPARED = {"out_dir", "plan", "resume"} # flags that do not tell how a run was trained
# what a stranger's log may give to a command that a person pastes: --optimizer imports, --tracker may send
HARMLESS = {"--optimizer": r"(torch\.optim|bitsandbytes\.optim|prodigyopt|schedulefree|prodigyplus)\.[A-Z]\w*",
            "--tracker": "none|tensorboard"}

# ---- the log ---------------------------------------------------------------------------------------------------------

def read_log(folder):
    """-> SimpleNamespace(folder, name, done, written, flags, command, versions, steps, validations). steps and
    validations are lists of records; before step 1 there are none. written: when the log was; its last line may be
    incomplete: the run is writing it, or was killed."""
    log = folder / "log.jsonl"
    if not common.is_inside(log, folder):
        raise InputError(f"{log}: a link out of its run's folder; copy the file there")
    if log.exists() and log.stat().st_size > common.LONG_TEXT:
        raise InputError(f"{log}: over {common.LONG_TEXT:,} bytes, which is no log of a training; give another run")
    try:
        lines = log.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except Exception as e: # a foreign file can fail in any way
        raise InputError(f"{log}: cannot be read ({common.first_words(e)}); give a run folder of train.py")
    begin, steps, validations = {}, {}, {} # by step, as a resumed run may log a step again
    for n, line in enumerate(lines, 1):
        try:
            record = best_step.read_line(line)
            if not isinstance(record, dict):
                raise ValueError("no object")
            if "val_loss" in record:
                best_step.check_validation(record)
                check_numbers(record)
                # one step may have been validated with several --val_data
                validations[record["step"], json.dumps([record.get(key) for key in best_step.MEASURES.values()])] = record
            elif "loss" in record:
                check_step(record)
                steps[record["step"]] = record
            elif best_step.is_shallow(record):
                begin |= record
        except Exception: # a foreign file can fail in any way
            if n < len(lines):
                raise InputError(f"{log}:{n}: train.py does not write such a line; delete it")
    flags, command = begin.pop("flags", {} if steps else None), begin.pop("command", ["train.py"])
    if not isinstance(flags, dict):
        raise InputError(f"{log}: does not begin with flags, as a log of train.py does; give a run folder of train.py")
    for name in ("max_steps", "sample_every"): # these are computed with
        if not best_step.is_count(flags.get(name), 10**12):
            flags.pop(name, None)
    return SimpleNamespace(folder=folder, name=folder.resolve().name, done=is_done(folder), flags=flags,
                           written=time.localtime(log.stat().st_mtime), command=command,
                           versions=begin, steps=list(steps.values()), validations=list(validations.values()))

def is_done(folder):
    """Whether train.py has finished this run."""
    return (folder / "DONE").is_file() and common.is_inside(folder / "DONE", folder)

def check_numbers(record):
    """ValueError if a log's line has another thing than a number for one. Adds `speed`, where it can be computed."""
    for name in ("lr", "grad_norm", "seconds", "tokens", "memory", "train_loss"):
        if name in record and not best_step.is_number(record[name]):
            raise ValueError(f"{name} is no number")
    seconds = record.get("seconds", 0)
    if not 0 <= seconds <= 1e6: # their sum is a timedelta, which has a limit, too
        raise ValueError("no seconds")
    if seconds:
        record["speed"] = record.get("tokens", 0) / seconds

def check_step(record):
    """ValueError, or another exception, if a log's line is no step as train.py writes it."""
    check_numbers(record)
    if not best_step.is_count(record["step"], 10**12) or not best_step.is_number(record["loss"]):
        raise ValueError("no step, or no loss")
    names, timesteps, losses = [record.get(name, []) for name in ("samples", "timesteps", "losses")]
    if not all(isinstance(values, list) for values in (names, timesteps, losses)):
        raise ValueError("no lists")
    if not all(isinstance(name, str) for name in names):
        raise ValueError("a sample's name is no text")
    if not all(best_step.is_number(number, 1e30) for number in [*timesteps, *losses]) or min(timesteps, default=0) < 0:
        raise ValueError("no timestep, or no loss")

def seconds_left(run):
    """-> the seconds that a run still needs, by the mean of its last 100 steps and, if the log has their seconds, of
    its validations; None if it is done, has just begun, or has written nothing for an hour."""
    age, seconds = time.time() - time.mktime(run.written), column(run.steps, "seconds")[1][-100:]
    most, validating = run.flags.get("max_steps"), column(run.validations, "seconds")[1]
    if run.done or not len(seconds) or not most or age > HOUR:
        return None
    validations = max(0, math.ceil(most / (run.flags.get("sample_every") or most)) - len(run.validations))
    left = seconds.mean() * (most - run.steps[-1]["step"]) + validations * validating.sum() / max(1, len(validating))
    return round(left - age)

def column(records, name):
    """-> (steps, values) of the records that contain this number. What no training reaches is left out, as NaN is: such
    numbers have no sums."""
    points = [(r["step"], r[name]) for r in records if best_step.is_number(r.get(name)) and abs(r[name]) < 1e30]
    values = np.array(points, float).reshape(-1, 2).T
    values[abs(values) < 1e-30] = 0
    return values

def find_hardest(steps):
    """-> [(name, ratio, times seen)] of the samples that were seen SEEN times or more in the second half of the run,
    the hardest first. A sample's loss is here the mean of its losses in that half, each divided by the mean loss of all
    samples at similar timesteps; the ratio is this loss divided by the median sample's."""
    complete = [r for r in steps[len(steps) // 2:] if {"samples", "timesteps", "losses"} <= r.keys()]
    seen = [row for r in complete for row in zip(r["samples"], r["timesteps"], r["losses"])]
    tenths = np.array([min(int(s * 10), 9) for _, s, _ in seen], int) # the tenth of (0, 1) with the timestep
    counts, sums = np.bincount(tenths, minlength=10), np.bincount(tenths, [loss for *_, loss in seen], 10)
    losses = {}
    for (name, _, loss), tenth in zip(seen, tenths):
        if counts[tenth] >= 5: # a mean of fewer samples says little
            losses.setdefault(str(name), []).append(loss / max(sums[tenth] / counts[tenth], 1e-12))
    rows = [(name, np.mean(values), len(values)) for name, values in losses.items() if len(values) >= SEEN]
    median = np.median([loss for _, loss, _ in rows] or 1)
    return sorted([(name, loss / max(median, 1e-12), times) for name, loss, times in rows], key=lambda row: -row[1])

# ---- curves ----------------------------------------------------------------------------------------------------------

def smooth(x, y):
    """-> x, and the mean, the least and the greatest of the values around it, 1/SMOOTH of all. Near the beginning the
    window shrinks, and stays centred, so that a steep curve does not lift its mean; at the end it has only one side."""
    x, least, mean, greatest = thin(x, y)
    half = round(len(x) / (2 * SMOOTH))
    windows = [slice(n - min(n, half), n + min(n, half) + 1) for n in range(len(x))]

    def of_windows(what, values):
        return np.array([what(values[window]) for window in windows])
    return x, of_windows(np.mean, mean), of_windows(np.min, least), of_windows(np.max, greatest)

def thin(x, y):
    """Splits the points into at most COLUMNS parts -> their mean x (the first and the last point stay where they are),
    and the least, mean and greatest y of each part."""
    # all parts but the last have this many points: others would look like a change
    size = max(1, math.ceil(len(x) / COLUMNS))

    def of_parts(what, values):
        return np.array([what(values[start:start + size]) for start in range(0, len(values), size)])
    middles = of_parts(np.mean, x)
    middles[:1], middles[-1:] = x[:1], x[-1:]
    return middles, of_parts(np.min, y), of_parts(np.mean, y), of_parts(np.max, y)

def short(value):
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

def ticks(low, high, most):
    """-> round numbers between low and high, about `most` of them."""
    exact = (high - low) / most
    power = 10 ** math.floor(math.log10(exact))
    pitch = next(power * n for n in (1, 2, 5, 10) if power * n >= exact * 0.999)
    return np.arange(math.ceil(low / pitch), math.floor(high / pitch) + 1) * pitch

def path(x, y):
    """-> the d of an SVG path, whose y axis points down."""
    return "M" + " ".join(f"{a:.7g},{-b:.7g}" for a, b in zip(x, y))

def chart(title, lines, zero):
    """-> a figure with curves; None if none has two points. lines: (name, style, x, y); style: line, dash or dots; dots
    peak, for points that stand out; or raw, a band whose y is (least, greatest); and a colour. zero: the axis has to
    begin there, although this flattens what is far from it. The SVG has the units of the data, and the browser
    stretches it to the width of the page. The axis covers 90 % of the band, so that rare outliers do not flatten the
    rest."""
    if not any(len(x) > 1 for _, style, x, _ in lines if "dash" not in style):
        return None
    lines = [line for line in lines if len(line[2])]
    right = max(x.max() for _, _, x, _ in lines)
    seen = np.concatenate([np.percentile(y, [5, 95]) if "raw" in style else y for _, style, _, y in lines])
    low, high = seen.min(), seen.max()
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1
    low = min(low, 0) if zero or low <= high / 2 else low - margin
    high += margin
    paths, keys, ends = [], [], []
    for name, style, x, y in lines:
        if "raw" in style:
            d = path(np.append(x, x[::-1]), np.append(y[0], y[1][::-1])) + "Z"
        else:
            thin_x, _, mean, _ = thin(x, y)
            d = path(thin_x, mean)
            ends.append(f"{name} ends at {short(y[-1])}")
        paths.append(node("path", class_=style, data_name=name, d=d))
        if "dots" in style:
            paths.append(node("path", class_=f"dot {style}", d=d.replace(" ", "h0M") + "h0"))
        keys.append(node("span", name, class_=f"key {style}"))
    svg = node("svg", *paths, viewBox=f"0 {-high} {right} {high - low}", preserveAspectRatio="none", role="img",
               aria_label=f"{title}: {', '.join(ends)}")
    marks = [node("span", short(y), class_="y", style=f"top:{(high - y) / (high - low):.2%}")
             for y in ticks(low, high, 5)]
    rounds = [x for x in ticks(0, right, 4) if x < 0.82 * right] # the last step is marked, and needs room
    marks += [node("span", short(x), class_="x", style=f"left:{x / right:.2%}") for x in [*rounds, right]]
    lines = node("i", class_="cursor"), node("i", class_="now")
    plot = node("div", *marks, svg, *lines, class_="plot", data_right=right)
    return node("figure", node("figcaption", node("strong", title), *keys, node("output")), plot, class_="chart")

def curves(runs):
    """-> the section with all charts; several runs share them."""
    several, charts, said = len(runs) > 1, {}, [] # {title: lines}

    def add(run, title, name, style, x, y):
        charts.setdefault(title, []).append((f"{name}, {run.name}" if several else name, style, x, y))

    def add_steps(run, title, key):
        x, mean, least, greatest = smooth(*column(run.steps, key))
        if not several:
            add(run, title, "range", "raw", x, np.stack([least, greatest]))
        add(run, title, "smoothed", f"line {run.colour}", x, mean)
    if any(run.validations for run in runs):
        said.append("Do not compare the losses of training and of validation: their noise levels differ, as a step "
                    "draws them at random, and a validation always has the same four.")
    if any("train_loss" in record for run in runs for record in run.validations):
        said.append("But both lines of the validation loss are at the same levels: the gap between them is "
                    "overfitting.")
    differ = {}
    for measure in best_step.MEASURES:
        newest = [records[-1] for run in runs if (records := best_step.comparable(run.validations, measure))]
        differ[measure] = best_step.differences(newest, measure) if newest else []
        if differ[measure]:
            said.append(f"Do not compare these runs by {measure}: their validations had other "
                        f"{', '.join(differ[measure])}.")
    for run in runs:
        add_steps(run, "Training loss", "loss")
        for measure, (title, lines) in LINES.items():
            # the base is the same for all runs that were validated on the same
            own = lines[:1] if measure == "mean PSNR" and title in charts and not differ[measure] else lines
            # validations that were made of other things get lines of their own
            for number, records in enumerate(reversed(best_step.sets_of(run.validations, measure))):
                earlier, colour = (f" (earlier set {number})", "mute") if number else ("", run.accent)
                values = [record | best_step.mean_psnr(record) for record in records]
                for name, key, style in own if not number else lines:
                    style = {"dots": f"dots {colour}", "dash": f"dash {run.colour}"}.get(style, style)
                    add(run, title, f"{name}{earlier}", style, *column(values, key))
                if not number:
                    peaks = [record | best_step.mean_psnr(record) for record in best_step.leading(records, measure)]
                    add(run, title, "best", f"dots peak {colour}", *column(peaks, lines[0][1]))
        add_steps(run, "Gradient norm", "grad_norm")
        add(run, "Learning rate", "at each step", f"line {run.colour}", *column(run.steps, "lr"))
        add_steps(run, "Tokens per second", "speed")
    figures = [chart(title, lines, title in FROM_ZERO) for title, lines in charts.items()]
    if any(figure is not None for figure in figures):
        return section("Curves", detail(" ".join(said)), node("div", *figures, class_="charts"))

# ---- the other parts of the page -------------------------------------------------------------------------------------

def how_far(run):
    """-> a run's state in a few words."""
    state = "running or stopped, last step" if run.steps else "no step is done yet; begun"
    written = time.strftime("%d %b %Y, %H:%M", run.written)
    return f"of {short(run.flags.get('max_steps', math.nan))}; {'finished' if run.done else state} {written}"

def psnrs(run):
    """-> {name: text}: the mean PSNRs of the newest validation; of all its pictures first, and of each group."""
    values = {}
    for record in best_step.comparable(run.validations, "mean PSNR")[-1:]:
        of_groups = record.get("psnr", {})
        means = {"to the target": best_step.mean_psnr(record)} | (of_groups if len(of_groups) > 1 else {})
        for name, mean in means.items():
            values[f"Mean PSNR {name}"] = ("{base:.1f} \u2192 {lora:.1f} dB (base \u2192 LoRA; VAE alone {vae:.1f}, "
                                           "input {input:.1f})".format(**mean))
    return values

def measures(run):
    """-> {name: text}: whether it learns, and which step is the best, as train.py says it, too."""
    values = dict(list(psnrs(run).items())[:1])
    for name in best_step.MEASURES:
        value, *remarks = best_step.verdict(best_step.comparable(run.validations, name), name) or ["none"]
        remarks += best_step.not_compared(run.validations, name)
        if lost := best_step.lost_steps(run.validations, name):
            more = f" and {len(lost) - 3} others" if len(lost) > 3 else ""
            remarks.append(f"not ranked, as NaN or Inf was computed: step {', '.join(map(short, lost[:3]))}{more}")
        if remarks:
            values[f"Best by {name}"] = f"{value} ({'; '.join(remarks)})"
    return values

def counts(run):
    """-> {name: text}: what the training took."""
    values = {"Steps": f"{run.steps[-1]['step'] if run.steps else 0:,} {how_far(run)}"}
    seconds, tokens, memory = [column(run.steps, name)[1] for name in ("seconds", "tokens", "memory")]
    if seconds.size and memory.size:
        values["Seconds a step"] = (
            f"{short(seconds.mean())}; {timedelta(seconds=round(seconds.sum()))} of training, without validations; "
            f"{short(tokens.sum() / seconds.sum())} tokens a second; {memory.max():.1f} GiB at most")
    if names := [name for r in run.steps for name in r.get("samples", [])]:
        pairs = len(set(names))
        values["Samples"] = f"{len(names):,}, of {pairs:,} pairs, each {short(len(names) / pairs)} times on average"
    return values

def headline(runs, title):
    """-> what the page begins with: which run, how far it is, whether it learns, which step is the best."""
    flags, lines = runs[0].flags, []
    about = f"{flags.get('model', '')}, trained on {' '.join(flag_words('data', flags.get('data', '?')))}"
    for run in runs:
        said = [f"{name}{run.title}: {text}" for name, text in measures(run).items()]
        if len(runs) == 1:
            about += f"; step {counts(run)['Steps']}"
        else: # pictures come next: there is room for one line a run, the best step by PSNR. Numbers has the others
            said = said[-1:]
        lines += [node("p", text, class_="verdict") for text in said]
    return [node("h1", title), node("p", about), *lines]

def numbers(runs):
    """-> the section with what each run reached and took, and with the flags that differ."""
    rows, of_runs = [], [measures(run) | psnrs(run) | counts(run) for run in runs]
    for name in dict.fromkeys(name for values in of_runs for name in values):
        rows.append([name, *[values.get(name) for values in of_runs]])
    for name in sorted(set().union(*[run.flags for run in runs]) - NOT_COMPARED):
        values = [shlex.join(flag_words(name, run.flags.get(name))) for run in runs]
        if len(set(values)) > 1:
            rows.append([node("code", f"--{name}"), *values])
    remark = ("PSNRs are those of the last validation; equal pictures have 99 dB. Two steps are called equal if their "
              "values print alike, or if other held-out pairs could turn their difference around (Student's t-test of "
              "the pairs' differences, at 95 %).")
    head = ["", *[node("span", run.name, class_=f"key {run.colour}") for run in runs]]
    return section("Numbers", table(rows, head if runs[1:] else None), detail(remark))

def is_of_run(picture, folder):
    """Whether a picture that a log names lies in its run's samples/, and these in the run."""
    return common.is_inside(picture, folder / "samples") and common.is_inside(picture, folder)

def sizes_of(folder):
    """-> {place in samples/, as "base/val/000.png": (width, height)} of all pictures there. A log may name a million
    that are not: asking the disk for each would take minutes. What a link leads to counts if it is the run's."""
    samples, found = folder / "samples", {}
    for place, _, names in os.walk(samples) if is_of_run(samples, folder) else []:
        for path in [Path(place, name) for name in names]:
            if (not path.is_symlink() or is_of_run(path, folder)) and (size := size_of(path)):
                found[path.relative_to(samples).as_posix()] = size
    return found

def pictures(runs, page):
    """-> the section with each validation picture, and what the base and the LoRAs made of it: at the slider's step, in
    which several runs are compared; of a single run at its best step, too. An earlier set of validations is left out:
    the base's pictures and the targets in samples/ are of the newest set."""
    shown, steps, best_steps, left_out = {}, set(), set(), "" # {(heading, remark): {name of a tile: its pictures}}
    for run in runs:
        lora = f"LoRA {run.name}" if len(runs) > 1 else "LoRA"
        sizes = sizes_of(run.folder)
        records = best_step.comparable(run.validations, "mean PSNR")
        for measure in best_step.MEASURES:
            best_steps |= {r["step"] for r in best_step.leading(best_step.comparable(run.validations, measure), measure)}
        greatest = best_step.best_of(records, "mean PSNR")
        first = [greatest] if len(runs) == 1 and greatest and greatest is not records[-1] else []
        for line in best_step.not_compared(run.validations, "mean PSNR"):
            left_out += f" {line}{run.title}, and not shown."
        for record in [r for r in run.validations if r.get("not_finite")][-1:]:
            left_out += (f" Step {record['step']:,}{run.title} is not shown, as NaN or Inf was computed instead of "
                         f"pictures: {', '.join(record['not_finite'][:3])}.")
        for record, picture in [(r, p) for r in [*first, *records] for p in r.get("pictures", [])]:
            step, file, (of_input, of_base, of_lora, of_vae) = record["step"], picture["file"], picture["psnr"]
            tiles = shown.setdefault((picture["prompt"], file), {})
            # name, folder in samples/, step (0: the same at all steps) and number of each picture
            further = [(f"control {n + 1}", f"control_{n}", 0, None) for n in range(1, picture["controls"])
                       if f"control_{n}/{file}" in sizes]
            of_step = f"step_{step:06d}", step, f"step {step:,}: {of_lora:.1f} dB"
            rows = [("control", "control", 0, f"{of_input:.1f} dB"), *further, ("base", "base", 0, f"{of_base:.1f} dB"),
                    *[(name, *of_step) for name in (["LoRA, best", lora] if record in first else [lora])],
                    ("target", "target", 0, f"VAE alone {of_vae:.1f} dB")]
            for name, folder, at, number in rows:
                t = tiles.setdefault(name, SimpleNamespace(links={}, values={}, size=None))
                size = sizes.get(f"{folder}/{file}") # a log may name pictures that are not its run's
                if size and at not in t.links:
                    t.links[at], t.size = link(run.folder / "samples" / folder / file, page), size
                    if number is not None:
                        t.values[at] = number
                    steps.add(at)
            tiles["target"] = tiles.pop("target") # it comes last, behind the LoRAs of all runs
    cards = []
    for (heading, remark), tiles in shown.items():
        row = [tile(name, t.links, heading, t.values, t.size, wipe=bool(t.values)) for name, t in tiles.items()]
        cards.append(card(heading, remark, row))
    steps, bar = sorted(steps - {0}), None
    at = f"; the LoRA's are of step {max(steps, default=0):,}, the only one: more with --sample_every N"
    if len(steps) > 1:
        bar = node("div", class_="bar", data_steps=json.dumps(steps), data_best=json.dumps(sorted(best_steps)))
        at = "; the arrow keys, a step's name and a click on a curve change the step"
    remark = f"PSNR to the target in dB. Click a picture to compare it with another one{at}.{left_out}"
    if left_out and not cards:
        remark = f"There are none.{left_out}"
    elif not cards and any(run.flags.get("val_data") for run in runs):
        remark = "There are none yet: validations draw them, each --sample_every steps and at the end."
    elif not cards:
        remark = ("There are none: train with --val_data DIR, a dataset of pairs that are not trained, to see "
                  "what the LoRA makes of them. predict.py --image draws any picture with it.")
    rest = fold(f"{len(cards) - SHOWN} more pictures", *cards[SHOWN:]) if cards[SHOWN:] else None
    return section("Validation pictures", bar, *cards[:SHOWN], rest, detail(remark), id="pictures")

def find_samples(roots):
    """-> {"root/name": Sample} of these datasets."""
    by_name = {}
    for root in roots:
        read = index_file.read_index if flag_types.is_index(root) else dataset.read_dataset
        samples, *_ = read(root)
        by_name |= {f"{s.root}/{s.name}": s for s in samples}
    return by_name

def hardest_pairs(run, most, roots):
    """-> (lines to print, the section that says the same): the samples that stand out, at most so many, with their
    pictures, as far as these are in the datasets `roots`. Those that the log names are not opened: it may name any
    folder."""
    pairs, cards = find_hardest(run.steps), []
    hardest = [pair for pair in pairs if pair[1] > STANDS_OUT]
    said = f"The run is too short to tell: no pair was seen {SEEN} times in its second half."
    above = f"more than {STANDS_OUT} times the median pair's loss at the same noise levels"
    if pairs:
        said = f"No pair stands out with {above}: the largest has {pairs[0][1]:.2f} times, {pairs[0][0]}."
    if hardest:
        said = f"{len(hardest)} of {len(pairs)} pairs stand out with {above}. Look at them: a target may be wrong."
    lines, samples = [f"{run.folder}: {said}"], find_samples(roots) if hardest else {}
    for name, ratio, times in hardest[:most]:
        lines.append(f"{common.printable(name)}: {ratio:.2f} times the median, seen {times} times in the second half of "
                     "the run")
        s = samples.get(name, dataset.Sample(name, "", [], [name]))
        named = [("control", path) for path in s.controls] + [("target", s.target)]
        # an index may come from anywhere, and name any picture: it must have its hash (a folder's pictures have none)
        contents = getattr(s, "contents", {})
        copies = [(kind, path and thumbnail(path, contents.get(path))) for kind, path in named]
        cards.append(card(s.prompts[0], lines[-1], [tile(kind, {0: copy}, name) for kind, copy in copies if copy]))
    hint = "--data DIR, the datasets that were trained, adds their pictures." if hardest and not roots else None
    return lines, section(f"Hardest training pairs{run.title}", detail(said), hint and detail(hint),
                          node("div", *cards, class_="pairs"))

def to_share(word):
    """A word of a command -> the same without paths of this disk, as others may see the page: a path below the folder
    in which you are begins there, and of another only its name is left."""
    word = str(word)
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word) # --data=/home/me/photos
    path = Path(os.path.abspath(value))
    if not value.startswith("..") and not Path(value).is_absolute():
        return word
    return flag + equals + str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path.name)

def flag_words(name, value):
    """A flag's value -> the words that give it on a command line; a list of two within a list is [KEY, VALUE]. An area
    is written as its sides."""
    words = []
    for item in value if isinstance(value, list) else [value]:
        pair = isinstance(item, list) and len(item) == 2
        words.append(f"{item[0]}={json.dumps(item[1])}" if pair else to_share(item))
        if name.endswith("_pixels"):
            words[-1] = area_words(item)
    return words

def command_words(run):
    """-> the words of the log's command; [] if it has none."""
    words = run.command if isinstance(run.command, list) else []
    return [word for word in words if isinstance(word, str)]

def flags_of_train():
    """-> train.py's flags, by its text and that of the shared ones: to import train.py would train."""
    places = [Path(common.__file__).parent / name for name in ("train.py", "library/cli/command_line.py")]
    text = "".join(place.read_text("utf-8") for place in places)
    sampling = [f"--{name}" for name in flag_types.SAMPLING if name in flag_types.SAMPLE_FLAGS]
    return {*sampling, *re.findall(r'flag\((?:flag, )?"(--[a-z_]+)"', text)}

def resume_command(run):
    """-> the words that continue a run, made of train.py's flags in its log. ValueError says why there are none."""
    script, *words = command_words(run) or [""]
    if Path(script).name != "train.py" or len(words) + 1 < len(run.command):
        raise ValueError("it is not train.py's")
    again, flag, known = ["python", "train.py"], "", flags_of_train()
    for word in words:
        value = word
        if word.startswith("--"):
            flag, _, value = word.partition("=") # (of --flag VALUE this value is "", and the next word is one)
            if flag.replace("--no-", "--") not in known:
                raise ValueError(f"train.py has no {flag}")
        elif not flag or re.match(r"-(?![\d.])", word):
            raise ValueError(f"{word} belongs to no flag")
        if value and not re.fullmatch(HARMLESS.get(flag, "(?s).*"), value):
            raise ValueError(f"{flag} {value} is left to you")
        if flag not in ("--resume", "--out_dir"):
            again.append(word)
    if not any(word.startswith("--batch_size") for word in words) and "batch_size" in run.flags:
        again += best_step.option("batch_size", run.flags["batch_size"]) # whose default depends on the number of processes
    return [*again, "--resume", "--out_dir", run.folder]

def predict_command(run):
    """-> the words that edit a picture with a run's LoRA. ValueError says why there are none."""
    # the flags of its newest pictures, as --resume may have changed them
    given, flags = {word.split("=")[0] for word in command_words(run)}, run.flags
    for newest in run.validations[-1:]:
        flags = flags | newest.get("flags", {})
    words = ["python", "predict.py"]
    for name in best_step.DRAWING:
        value = flags.get(name, "tiny" if name == "model" else None)
        changed = name == "model" or f"--{name}" in given or value != run.flags.get(name)
        if not changed or value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ValueError(f"--{name} is neither text nor number")
        words += best_step.option(name, value)
    loras = flags.get("sample_lora", [])
    if not isinstance(loras, list) or not all(isinstance(path, str) and path[:1] != "-" for path in loras):
        raise ValueError("--sample_lora has no names")
    words += ["--lora", run.folder, *loras]
    image, prompt = "CONTROL.png", "..."
    for picture in [picture for r in run.validations[-1:] for picture in r.get("pictures", [])][:1]:
        prompt, path = picture["prompt"], run.folder / "samples/control" / picture["file"]
        if is_of_run(path, run.folder):
            image = path
    return [*words, "--image", image, *best_step.option("prompt", prompt)]

def convert_command(run):
    return ["python", "tools/convert_lora.py", run.folder, "--to", "comfyui", "--out", f"{run.name}.safetensors"]

COMMANDS = {"Continue it (behind torchrun if it was; a finished run with a larger --max_steps, if its learning rate is "
            "constant, and else as a new run with --pretrained_lora)": resume_command,
            "Edit a picture with it": predict_command,
            "Convert it for ComfyUI (a finished run's LoRA works there as it is)": convert_command}

def settings(run):
    """-> the section with commands, flags and versions."""
    lines = []
    for title, words_of in COMMANDS.items():
        lines.append(node("h3", title))
        try:
            spans = [node("span", common.shell_command([to_share(word)]), " ") for word in words_of(run)]
            lines.append(node("pre", *spans))
        except ValueError as e: # a log may come from anywhere, and a command is there to be pasted
            lines.append(detail(f"No command is offered, because of the one in the log: {e}. Type it yourself."))
    given = {word.split("=")[0].replace("--no-", "--") for word in command_words(run)}
    rows = {True: [], False: []} # True: the command gave the flag
    for name, value in run.flags.items():
        rows[f"--{name}" in given].append([node("code", f"--{name}"), shlex.join(flag_words(name, value))])
    versions = [[name, str(value)] for name, value in run.versions.items() if name != "started"]
    usual = fold("Flags that were not given, and versions", table(rows[False] + versions))
    return section(f"Commands and flags{run.title}", *lines, node("h3", "Flags"), table(rows[True]), usual)

# ---- command line ----------------------------------------------------------------------------------------------------

def name_beside(folder, folders):
    """-> a path as seen from what these have in common; on Windows two of them may lie on different drives."""
    shared = [above for above in folder.parents if all(other.is_relative_to(above) for other in folders)]
    return folder.relative_to(*shared[:1]).as_posix() if shared else folder.as_posix()

def make_page(folders, page, most, watched=False, roots=()):
    """Reads the runs and writes their page -> the lines to print: the hardest samples, and where the page is. watched:
    browsers load it again and again, until the runs are done. roots: the datasets that were trained."""
    runs = [read_log(folder) for folder in folders]
    names = [run.name for run in runs]
    for n, run in enumerate(runs):
        run.colour, run.accent, run.title = "ink", "c0", ""
        if names.count(run.name) > 1:
            run.name = name_beside(Path(os.path.abspath(run.folder)), [Path(os.path.abspath(r.folder)) for r in runs])
        if len(runs) > 1:
            run.colour = run.accent = f"c{n % 6}"
            run.title = f": {run.name}"
    title = " and ".join(run.name for run in runs)
    live = None
    if not all(run.done for run in runs): # the browser turns this into how long ago that was, and how much is left
        left = max([seconds for run in runs if (seconds := seconds_left(run))], default=None)
        live = node("p", f"updated {time.strftime('%d %b %Y, %H:%M')}", class_="live", data_made=round(time.time()),
                    data_left=left, data_reload=WATCH if watched else None)
    hardest = [hardest_pairs(run, most, roots) for run in runs if most and run.steps]
    parts = [pictures(runs, page), curves(runs), numbers(runs), *[part for _, part in hardest],
             *map(settings, runs)]
    save_page(page, title, [node("header", *headline(runs, title), live, chapters(parts)), *parts])
    hint = "" if live is None or watched else "; --watch keeps it up to date"
    if not roots and any(len(lines) > 1 for lines, _ in hardest):
        hint += f"; with pictures of these pairs: {common.shell_command(['python', 'tools/page.py', *folders])} --data DIR"
    return [*[line for lines, _ in hardest for line in lines], f"{page}: open it in a browser{hint}"]

def refuse_no_run(folder, watch):
    """InputError if `folder` is no run's; if it holds runs, they are listed first. watch: it may become one."""
    runs = lora_paths.runs_in(folder)
    if (folder / "log.jsonl").is_file() or watch and folder.is_dir() and not runs:
        return
    for run in runs:
        with contextlib.suppress(InputError): # another program may have a log.jsonl, too
            tell(f"{run}: {len((read := read_log(run)).steps):,} steps {how_far(read)}")
    meant = runs[-1] if runs else lora_paths.near_run(folder)
    what = "holds runs, and is none itself" if runs else "is no run folder, with a log.jsonl"
    raise InputError(f"{folder}: {what}; give {common.shell_command([meant]) if meant else 'a run folder of train.py'}")

def main():
    parser = Parser(__doc__)
    parser.add_argument("run", nargs="+", type=Path, help="run folder of train.py, or its copy")
    flag = parser.group("flags")
    flag("--out", None, "the page's file (default: index.html in the first run's folder)", type=Path)
    flag("--hardest", 6, "how many of the hardest samples to print and to show (0: none)", type=natural, metavar="N")
    flag("--data", [], "the datasets that were trained: the hardest samples are shown with their pictures", nargs="+")
    flag("--watch", False, "write the page again as the log grows, until the run ends; browsers then load it again")
    args = parser.parse_args()
    for folder in args.run:
        refuse_no_run(folder, args.watch)
    page, written = args.out or args.run[0] / "index.html", None
    if page.suffix != ".html":
        raise InputError(f"--out {page}: is no page; give a name that ends in .html, such as {page / 'index.html'}")
    common.refuse_to_replace(page, PAGE)
    while True:
        done = all(map(is_done, args.run))
        logs = [log.stat().st_size for folder in args.run if (log := folder / "log.jsonl").is_file()]
        if len(logs) == len(args.run) and [done, *logs] != written:
            lines = make_page(args.run, page, args.hardest, args.watch, args.data)
            if done or not written: # not each time
                tell(*lines)
            written = [done, *logs]
        if not args.watch or done:
            return
        time.sleep(WATCH)

if __name__ == "__main__":
    main()
