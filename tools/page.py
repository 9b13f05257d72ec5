"""
Makes a web page of a training: does it learn? The page shows which step is the best, the validation pictures of this
and of any other step, the curves of the loss and of the PSNR, and the flags.

Reads a run folder of train.py, or a copy of one; writes index.html into it. The page needs no server and no network. It
refers to the pictures in samples/, so copy the page together with its folder. The run may come from someone else:
nothing is read that lies outside of its folder, and the texts in its log stay texts.

$ python tools/page.py out/RUN
$ python tools/page.py out/RUN --watch          # while it trains: keeps the page, and browsers that show it, up to date
"""
import contextlib
import json
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import library # first, so that no other folder is taken for one of our modules
import numpy as np

import common
from common import InputError, tell
from library.cli.command_line import Parser
from library.data.picture_files import open_image
from library.lora import lora_paths
from training import best_step
from tools.page_common import (PAGE, area_words, card, chapters, detail, fold, link, node, save_page, section, table,
                               tile)

COLUMNS = 60 # the curve of the training loss has at most so many points: each is the mean of some steps
SHOWN = 6 # cards of pictures that are not folded
WATCH = 20 # seconds; --watch looks for news so often, and so does a browser that shows the page
# {measure: (its chart's title, its lines: name, key in a validation, style)}; the first line is the measure itself
LINES = {"validation loss": ("Validation loss", [("held-out pairs", "val_loss", "dots c0")]),
         "mean PSNR": ("PSNR to the target (dB)", [("LoRA", "lora", "dots c0"), ("base", "base", "dash ink"),
                                                   ("VAE alone", "vae", "dash mute")])}

# ---- the log ---------------------------------------------------------------------------------------------------------

def read_log(folder):
    """-> the run in this folder, as a SimpleNamespace:
    folder, done    its place; whether train.py has finished it
    written         seconds since 1970 at which the log was written
    flags, command  train.py's flags {name: value}; the words of its command line
    versions        what else the log begins with {name: value}
    steps           the log's records of steps, before step 1 none
    validations     the log's records of validations
    compared        {measure: the validations that are compared with the newest one}
    best            {measure: the step of the best of these}, as far as there is one

    A line that train.py has not written is skipped, and a warning says so. The last line may be incomplete: the run is
    writing it, or was killed. InputError if no line is train.py's."""
    log = folder / "log.jsonl"
    if not common.is_inside(log, folder):
        raise InputError(f"{log}: a link out of its run's folder; copy the file there")
    if log.stat().st_size > common.LONG_TEXT:
        raise InputError(f"{log}: over {common.LONG_TEXT:,} bytes, which is no log of a training; give another run")
    try:
        lines = log.read_text("utf-8", "replace").removesuffix("\n").split("\n")
    except OSError as e:
        raise InputError(f"{log}: cannot be read ({common.first_words(e)}); give a run folder of train.py")
    begin, steps, validations, skipped = {}, [], [], []
    for number, line in enumerate(lines, 1):
        try:
            record = best_step.read_line(line)
            check_record(record)
        except Exception: # a foreign line can fail in any way
            skipped.append(number)
            continue
        if "val_loss" in record:
            validations.append(record)
        elif "loss" in record:
            steps.append(record)
        else:
            begin |= record # a resumed run may have other flags, and its newest ones count
    if len(skipped) == len(lines):
        raise InputError(f"{log}: no line is train.py's; give a run folder of train.py")
    if skipped and skipped[0] < len(lines):
        common.warn_once(f"warning: {log}: line {skipped[0]:,} is not train.py's; such lines are skipped")
    compared = {measure: best_step.comparable(validations, measure) for measure in best_step.MEASURES}
    return SimpleNamespace(folder=folder, done=is_done(folder), written=log.stat().st_mtime,
                           flags=begin.pop("flags", {}), command=begin.pop("command", []), versions=begin,
                           steps=steps, validations=validations, compared=compared,
                           best=best_step.best_steps(validations))

def is_done(folder):
    """Whether train.py has finished this run."""
    return (folder / "DONE").is_file() and common.is_inside(folder / "DONE", folder)

def check_record(record):
    """An exception of any kind if a line of the log is none that train.py writes, as far as the page reads it."""
    if "val_loss" in record:
        best_step.check_validation(record)
    elif "loss" in record:
        if not best_step.is_count(record["step"], 10**12) or not best_step.is_number(record["loss"]):
            raise ValueError("no step, or no loss")
    elif not (isinstance(record.get("flags", {}), dict) and isinstance(record.get("command", []), list)
              and best_step.is_shallow(record)):
        raise ValueError("no flags, no command, or too deep")

def column(records, name):
    """-> (steps, values) of the records that contain this number. What no training reaches is left out, as NaN is: such
    numbers have no sums."""
    points = [(r["step"], r[name]) for r in records if best_step.is_number(r.get(name)) and abs(r[name]) < 1e30]
    values = np.array(points, float).reshape(-1, 2).T
    values[abs(values) < 1e-30] = 0
    return values

# ---- curves ----------------------------------------------------------------------------------------------------------

def thin(x, y):
    """Splits the points into at most COLUMNS parts -> the x of each part's last point, and the least, mean and greatest
    y of the part."""
    # all parts but the last have this many points: with other numbers the band would seem to change
    size = max(1, math.ceil(len(x) / COLUMNS))
    starts = np.arange(0, len(x), size)
    ends = np.minimum(starts + size, len(x))
    least, total, greatest = [what.reduceat(y, starts) for what in (np.minimum, np.add, np.maximum)]
    return x[ends - 1], least, total / (ends - starts), greatest

def short(value):
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

def ticks(low, high, most):
    """-> round numbers between low and high, about `most` of them."""
    exact = (high - low) / most
    power = 10 ** math.floor(math.log10(exact))
    pitch = next(power * n for n in (1, 2, 5, 10) if power * n >= exact * 0.999)
    return np.arange(math.ceil(low / pitch), math.floor(high / pitch) + 1) * pitch

def chart(title, lines):
    """-> a figure with curves; None if none has two points. lines: (name, style, x, y). style: line, dash or dots; dots
    peak, for points that stand out; or raw, the outline of a band; and a colour. The SVG has the units of the data, and
    the browser stretches it to the width of the page."""
    if not any(len(x) > 1 for _, _, x, _ in lines):
        return None
    lines = [line for line in lines if len(line[2])]
    right = max(x.max() for _, _, x, _ in lines)
    # the axis covers 90 % of a band, so that rare outliers do not flatten the rest
    seen = np.concatenate([np.percentile(y, [5, 95]) if "raw" in style else y for _, style, _, y in lines])
    low, high = seen.min(), seen.max()
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1
    # it begins at 0, unless that is far from all values
    low = min(low, 0) if low <= high / 2 else low - margin
    high += margin
    paths, keys, ends = [], [], []
    for name, style, x, y in lines:
        d = "M" + " ".join(f"{a:.7g},{-b:.7g}" for a, b in zip(x, y)) # an SVG's y axis points down
        paths.append(node("path", class_=style, data_name=name, d=d))
        if "dots" in style: # a stroke of no length with a round cap is a dot
            paths.append(node("path", class_=f"dot {style}", d=d.replace(" ", "h0M") + "h0"))
        if "raw" not in style:
            ends.append(f"{name} ends at {short(y[-1])}")
        keys.append(node("span", name, class_=f"key {style}"))
    svg = node("svg", *paths, viewBox=f"0 {-high} {right} {high - low}", preserveAspectRatio="none", role="img",
               aria_label=f"{title}: {', '.join(ends)}")
    marks = []
    for y in ticks(low, high, 5):
        marks.append(node("span", short(y), class_="y", style=f"top:{(high - y) / (high - low):.2%}"))
    rounds = [x for x in ticks(0, right, 4) if x < 0.82 * right] # the last step is marked, and needs room
    for x in [*rounds, right]:
        marks.append(node("span", short(x), class_="x", style=f"left:{x / right:.2%}"))
    plot = node("div", *marks, svg, node("i", class_="cursor"), node("i", class_="now"), class_="plot",
                data_right=right)
    return node("figure", node("figcaption", node("strong", title), *keys, node("output")), plot, class_="chart")

def curves(run):
    """-> the section with the charts."""
    x, least, mean, greatest = thin(*column(run.steps, "loss"))
    # the band's outline goes along its lower edge, and back along the upper one
    band = "range", "raw", np.append(x, x[::-1]), np.append(least, greatest[::-1])
    figures = [chart("Training loss", [band, ("mean", "line ink", x, mean)])]
    for measure, (title, lines) in LINES.items():
        values = [record | best_step.mean_psnr(record) for record in run.compared[measure]]
        shown = [(name, style, *column(values, key)) for name, key, style in lines]
        best = [record for record in values if record["step"] == run.best.get(measure)]
        figures.append(chart(title, [*shown, ("best", "dots peak c0", *column(best, lines[0][1]))]))
    if any(figure is not None for figure in figures):
        return section("Curves", detail("Do not compare the losses of training and of validation: their noise levels "
                                        "differ, as a step draws them at random, and a validation always has the same "
                                        "four."), node("div", *figures, class_="charts"))

# ---- the other parts of the page -------------------------------------------------------------------------------------

def headline(run, title, watched):
    """-> the elements that the page begins with: which run it is, how far it is, whether it learns, which step is the
    best. watched: browsers load the page again and again."""
    state = "running or stopped, last step" if run.steps else "no step is done yet; begun"
    if run.done:
        state = "finished"
    step = run.steps[-1]["step"] if run.steps else 0
    model, data, most = [flag_words(name, run.flags.get(name, "?")) for name in ("model", "data", "max_steps")]
    written = time.strftime("%d %b %Y, %H:%M", time.localtime(run.written))
    about = f"{model}, trained on {data}; step {step} of {most}; {state} {written}"
    said = []
    for newest in run.compared["mean PSNR"][-1:]:
        said.append("Mean PSNR to the target: {base:.1f} \u2192 {lora:.1f} dB (base \u2192 LoRA; VAE alone {vae:.1f}, "
                    "input {input:.1f})".format(**best_step.mean_psnr(newest)))
    for measure, compared in run.compared.items():
        if words := best_step.verdict(compared, measure):
            said.append(f"Best by {measure}: {words[0]} ({words[1]})")
    lost = [r["step"] for r in run.validations if r.get("not_finite") or not math.isfinite(r["val_loss"])]
    if lost:
        said.append(f"Steps at which NaN or Inf was computed: {', '.join(map(short, lost))}")
    live = None
    if not run.done: # the browser turns this into how long ago that was
        live = node("p", class_="live", data_made=round(time.time()), data_reload=WATCH if watched else None)
    return [node("h1", title), node("p", about), *[node("p", text, class_="verdict") for text in said], live]

def sizes_of(folder):
    """-> {place in samples/, as "base/val/000.png": (width, height)} of all pictures there. A log may name a million
    that are not: asking the disk for each would take minutes. What a link leads to counts if it is in samples/, and
    that in the run."""
    samples, sizes = folder / "samples", {}
    for path in samples.rglob("*.png") if common.is_inside(samples, folder) else []:
        if common.is_inside(path, samples):
            with contextlib.suppress(InputError), open_image(path) as image:
                sizes[path.relative_to(samples).as_posix()] = image.size
    return sizes

def pair_card(run, page, sizes, drawn):
    """-> the card of a held-out pair: its pictures, and what the base and the LoRA made of it, at the best step and at
    the slider's. sizes: as sizes_of returns them; other pictures, which a log may name, are not shown. drawn: {step:
    what the log's validation says of this pair}."""
    newest = drawn[max(drawn)]
    file, (of_input, of_base, _, of_vae) = newest["file"], newest["psnr"]
    of_steps, psnrs = {}, {}
    for step, picture in drawn.items():
        of_steps[step] = f"step_{step:06d}"
        psnrs[step] = f"step {step:,}: {picture['psnr'][2]:.1f} dB"
    # the name of each tile; its folders in samples/ by step, of which 0 stands for all steps; the number below it
    rows = [("control", {0: "control"}, {0: f"{of_input:.1f} dB"})]
    for number in range(1, newest["controls"]):
        rows.append((f"control {number + 1}", {0: f"control_{number}"}, {}))
    rows.append(("base", {0: "base"}, {0: f"{of_base:.1f} dB"}))
    best = run.best.get("mean PSNR")
    if best in drawn and best != max(drawn):
        rows.append(("LoRA, best", {best: of_steps[best]}, psnrs))
    rows += [("LoRA", of_steps, psnrs), ("target", {0: "target"}, {0: f"VAE alone {of_vae:.1f} dB"})]
    tiles = []
    for name, folders, texts in rows:
        links = {step: link(run.folder / "samples" / folder / file, page) for step, folder in folders.items()
                 if f"{folder}/{file}" in sizes}
        if links: # a further control has no number
            values = {step: texts[step] for step in links if texts}
            tiles.append(tile(name, links, newest["prompt"], sizes[f"{folders[max(links)]}/{file}"], values))
    return card(newest["prompt"], file, tiles)

def pictures(run, page):
    """-> the section with the validation pictures, at the slider's step and at the best one. An earlier set of
    validations is left out: the base's pictures and the targets in samples/ are of the newest set."""
    pairs, steps, sizes = {}, set(), sizes_of(run.folder) # pairs: {(prompt, file): drawn, as for pair_card}
    for record in run.compared["mean PSNR"]:
        step = record["step"]
        for picture in record["pictures"]:
            pairs.setdefault((picture["prompt"], picture["file"]), {})[step] = picture
            if f"step_{step:06d}/{picture['file']}" in sizes:
                steps.add(step)
    cards = [pair_card(run, page, sizes, drawn) for drawn in pairs.values()]
    bar, at = None, f"the LoRA's are of step {max(steps, default=0):,}, the only one: more with --sample_every N"
    if len(steps) > 1:
        bar = node("div", class_="bar", data_steps=json.dumps(sorted(steps)),
                   data_best=json.dumps([*run.best.values()]))
        at = "the arrow keys, a step's name and a click on a curve change the step"
    remark = f"PSNR to the target in dB. Click a picture to compare it with another one; {at}."
    if not cards and run.flags.get("val_data"):
        remark = "There are none yet: validations draw them, each --sample_every steps and at the end."
    elif not cards:
        remark = ("There are none: train with --val_data DIR, a dataset of pairs that are not trained, to see what the "
                  "LoRA makes of them. predict.py --image draws any picture with it.")
    if earlier := len(run.validations) - len(run.compared["validation loss"]):
        remark += f" Not compared and not shown: {earlier} earlier validations, which were made of other things."
    if few := best_step.few_pairs(run.validations):
        remark += f" {few.capitalize()}."
    rest = fold(f"{len(cards) - SHOWN} more pictures", *cards[SHOWN:]) if cards[SHOWN:] else None
    return section("Validation pictures", bar, *cards[:SHOWN], rest, detail(remark))

def flag_words(name, value):
    """-> a flag's value, as a command line gives it: a list in words, a pair within a list as KEY=VALUE, an area as its
    sides. Of a path outside of the folder in which train.py ran only the name is left, as others may see the page."""
    words = []
    for item in value if isinstance(value, list) else [value]:
        if name.endswith("_pixels"):
            words.append(area_words(item))
        elif isinstance(item, list):
            words.append("=".join(map(str, item)))
        elif str(item).startswith("..") or Path(str(item)).is_absolute():
            words.append(Path(item).name)
        else:
            words.append(str(item))
    return " ".join(words)

def flags(run):
    """-> the section with the flags and the versions."""
    given = {str(word).split("=")[0].replace("--no-", "--") for word in run.command}
    rows = {True: [], False: []} # True: the command gave the flag
    for name, value in run.flags.items():
        rows[f"--{name}" in given].append([node("code", f"--{name}"), flag_words(name, value)])
    versions = [[name, str(value)] for name, value in run.versions.items() if name != "started"]
    return section("Flags", table(rows[True]), fold("Flags that were not given, and versions",
                                                    table(rows[False] + versions)))

# ---- command line ----------------------------------------------------------------------------------------------------

def make_page(folder, page, watched=False):
    """Reads a run and writes its page. watched: browsers load it again and again, until the run is done."""
    run, title = read_log(folder), folder.resolve().name
    parts = [pictures(run, page), curves(run), flags(run)]
    save_page(page, title, [node("header", *headline(run, title, watched), chapters(parts)), *parts])

def main():
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, help="run folder of train.py, or its copy")
    flag = parser.group("flags")
    flag("--out", None, "the page's file (default: index.html in the run's folder)", type=Path)
    flag("--watch", False, "write the page again as the log grows, until the run ends; browsers then load it again")
    args = parser.parse_args()
    log, page = args.run / "log.jsonl", args.out or args.run / "index.html"
    runs = lora_paths.runs_in(args.run)
    awaited = args.watch and args.run.is_dir() and not runs # a run that has just begun has no log yet
    if not log.is_file() and not awaited:
        meant = (runs or [lora_paths.near_run(args.run)])[-1]
        give = common.shell_command([meant]) if meant else "a run folder of train.py"
        raise InputError(f"{args.run}: is no run folder, with a log.jsonl; give {give}")
    if page.suffix != ".html":
        raise InputError(f"--out {page}: is no page; give a name that ends in .html, such as {page / 'index.html'}")
    common.refuse_to_replace(page, PAGE)
    written = None
    while True:
        done = is_done(args.run)
        if log.is_file():
            newest = done, log.stat().st_size # before the log is read: it may grow meanwhile
            if newest != written:
                make_page(args.run, page, args.watch)
                if done or not written: # not each time
                    tell(f"{page}: open it in a browser")
                written = newest
        if not args.watch or done:
            return
        time.sleep(WATCH)

if __name__ == "__main__":
    main()
