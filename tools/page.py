"""
Makes a web page of a training: does it learn? The page shows the validation pictures, the curves, the training pairs
with the largest losses, the flags, and commands to continue or use the run. The curves of several runs share one chart.

Reads run folders of train.py, or copies of them; writes index.html into the (first) run's folder. The page needs no
server and no network. It refers to the pictures in samples/, so copy the page together with its folder.

$ python tools/page.py out/RUN
$ python tools/page.py out/RUN --watch          # rewrites it at each validation (every 100 steps before the first one)
$ python tools/page.py out/RUN out/OTHER --out both.html
"""
import contextlib
import json
import math
import os
import shlex
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np

import common
from common import InputError, Parser, natural
from tools.page_common import PAGE, card, link, node, save_page, section, size_of, table, thumbnail, tile

COLUMNS = 300 # a curve with more points shows the least, the mean and the greatest value of each column
SMOOTH = 20 # a smoothed value is the mean of the last 1/20 of the run
LEVELS = "Loss by noise level (1: noise alone)"
CLOSE = "Loss", "PSNR" # charts whose axis need not begin at zero
NOT_COMPARED = {"out_dir", "plan", "resume"} # flags that do not tell how a run was trained

# ---- the log ---------------------------------------------------------------------------------------------------------

def read_log(folder):
    """-> SimpleNamespace(folder, name, flags, command, versions, steps, validations). The last two are lists of
    records, one for each step. The log's last line may be incomplete: the run is writing it, or was killed."""
    log = folder / "log.jsonl"
    try:
        lines = log.read_text().splitlines()
    except Exception as e: # a foreign file can fail in any way
        raise InputError(f"{log}: cannot be read ({common.first_words(e)}); give a run folder of train.py")
    begin, steps, validations = {}, {}, {} # by step, as a resumed run may log a step again
    for n, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            step = record.get("step")
            if record.get("seconds"):
                record["speed"] = record.get("tokens", 0) / record["seconds"]
            if "val_loss" in record:
                validations[int(step)] = record | dict(val_loss=float(record["val_loss"]))
            elif "loss" in record:
                steps[int(step)] = record | dict(loss=float(record["loss"]))
            else:
                begin |= record
        except Exception: # a foreign file can fail in any way
            if n < len(lines):
                raise InputError(f"{log}:{n}: train.py does not write such a line; delete it")
    if not steps:
        raise InputError(f"{log}: no steps yet; try again later, or give --watch")
    return SimpleNamespace(folder=folder, name=folder.resolve().name, flags=begin.pop("flags", {}),
                           command=begin.pop("command", ["train.py"]), versions=begin, steps=list(steps.values()),
                           validations=list(validations.values()))

def column(records, name):
    """-> (steps, values) of the records that contain this number."""
    points = [(r["step"], r[name]) for r in records if isinstance(r.get(name), (int, float)) and math.isfinite(r[name])]
    return np.array(points, float).reshape(-1, 2).T

def by_timestep(steps):
    """-> (names, losses, tenths, means, counts). The first three are for each sample in these records: its name, its
    loss, and the tenth of (0, 1) that contains its timestep. The last two are for each tenth: the mean loss and the
    number of samples."""
    complete = [r for r in steps if {"samples", "timesteps", "losses"} <= r.keys()]

    def all_of(key):
        return np.array([x for r in complete for x in r[key]])
    names, losses = all_of("samples"), all_of("losses")
    tenths = np.minimum(all_of("timesteps") * 10, 9).astype(int)
    counts = np.bincount(tenths, minlength=10)
    return names, losses, tenths, np.bincount(tenths, losses, 10) / np.maximum(counts, 1), counts

def find_hardest(steps):
    """-> [(name, ratio, times seen)] of all samples, the hardest first. The ratio is the mean of a sample's losses in
    the second half of the run, each divided by the mean loss of all samples at similar timesteps."""
    names, losses, tenths, means, counts = by_timestep(steps[len(steps) // 2:])
    ratios = {}
    for name, loss, tenth in zip(names, losses, tenths):
        if counts[tenth] >= 5: # a mean of fewer samples says little
            ratios.setdefault(str(name), []).append(loss / max(means[tenth], 1e-12))
    rows = [(name, float(np.mean(r)), len(r)) for name, r in ratios.items()]
    return sorted(rows, key=lambda row: -row[1])

# ---- curves ----------------------------------------------------------------------------------------------------------

def smooth(x, y):
    """-> x, and the means of y over the last n values, where n is 1/SMOOTH of all; the first n - 1 points drop out."""
    n = max(1, len(y) // SMOOTH)
    sums = np.insert(np.cumsum(y), 0, 0)
    return x[n - 1:], (sums[n:] - sums[:-n]) / n

def thin(x, y):
    """Splits the points into at most COLUMNS parts -> the mean x, and the least, mean and greatest y of each part."""
    size = math.ceil(len(x) / COLUMNS) # all parts but the last have this many points: others would look like a change

    def of_parts(what, values):
        return np.array([what(values[start:start + size]) for start in range(0, len(values), size)])
    return of_parts(np.mean, x), of_parts(np.min, y), of_parts(np.mean, y), of_parts(np.max, y)

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

def chart(title, lines):
    """-> a figure with curves; None if they are empty. lines: (name, style, x, y); style: raw (the range of many
    points), line, dash or dots, and a colour. The SVG has the units of the data, and the browser stretches it to the
    width of the page. The axis covers 90 % of the raw points, so that rare outliers do not flatten the rest."""
    lines = [line for line in lines if len(line[2])]
    if not lines:
        return None
    right = max(x.max() for _, _, x, _ in lines)
    seen = np.concatenate([np.percentile(y, [5, 95]) if "raw" in style else y for _, style, _, y in lines])
    low, high = seen.min(), seen.max()
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1
    low = low - margin if title.startswith(CLOSE) and low > high / 2 else min(low, 0)
    high += margin
    paths, keys, ends = [], [], []
    for name, style, x, y in lines:
        thin_x, least, mean, greatest = thin(x, y)
        d = path(thin_x, mean)
        if "raw" in style:
            d = path(np.append(thin_x, thin_x[::-1]), np.append(least, greatest[::-1])) + "Z"
        paths.append(node("path", class_=style, data_name=name, d=d))
        if "dots" in style:
            paths.append(node("path", class_=f"dot {style}", d=d.replace(" ", "h0M") + "h0"))
        keys.append(node("span", name, class_=f"key {style}"))
        ends.append(f"{name} ends at {short(y[-1])}")
    svg = node("svg", *paths, viewBox=f"0 {-high} {right} {high - low}", preserveAspectRatio="none", role="img",
               aria_label=f"{title}: {', '.join(ends)}")
    marks = [node("span", short(y), class_="y", style=f"top:{(high - y) / (high - low):.2%}")
             for y in ticks(low, high, 5)]
    marks += [node("span", short(x), class_="x", style=f"left:{x / right:.2%}") for x in ticks(0, right, 4)]
    plot = node("div", *marks, svg, node("i", class_="cursor"), node("i", class_="now"), class_="plot",
                data_right=right, data_unit="noise level" if title == LEVELS else "step")
    return node("figure", node("figcaption", node("strong", title), *keys, node("output")), plot, class_="chart")

def curves(runs):
    """-> the section with all charts; several runs share them."""
    several, charts = len(runs) > 1, {} # {title: lines}

    def add(run, title, name, style, x, y):
        charts.setdefault(title, []).append((f"{name}, {run.name}" if several else name, style, x, y))

    def add_steps(run, title, key):
        x, y = column(run.steps, key)
        if not several:
            add(run, title, "each step", "raw", x, y)
        add(run, title, "smoothed", f"line {run.colour}", *smooth(x, y))
    for run in runs:
        add_steps(run, "Loss", "loss")
        add(run, "Loss", "validation", f"dots {run.accent}", *column(run.validations, "val_loss"))
        for group in dict.fromkeys(name for r in run.validations for name in r.get("psnr", {})):
            title = f"PSNR to the target (dB), {group}"
            records = [r["psnr"][group] | dict(step=r["step"]) for r in run.validations if group in r.get("psnr", {})]
            first = title not in charts
            add(run, title, "LoRA", f"dots {run.accent}", *column(records, "lora"))
            if first: # base and VAE alone are the same for all runs and steps, so their lines begin at 0
                for name, key, style in (("base", "base", "dash ink"), ("VAE alone", "vae", "dash mute")):
                    x, y = column(records, key)
                    if len(y):
                        add(run, title, name, style, np.insert(x, 0, 0), np.insert(y, 0, y[0]))
        quarter = max(1, len(run.steps) // 4)
        parts = [("last quarter", f"line {run.accent}", run.steps[-quarter:])]
        if not several:
            parts.insert(0, ("first quarter", "line mute", run.steps[:quarter]))
        for name, style, part in parts:
            *_, means, counts = by_timestep(part)
            tenths = np.flatnonzero(counts)
            edges = np.stack([tenths, tenths + 1], 1).ravel() / 10
            add(run, LEVELS, name, style, edges, np.repeat(means[tenths], 2))
        add_steps(run, "Gradient norm", "grad_norm")
        add(run, "Learning rate", "at each step", f"line {run.colour}", *column(run.steps, "lr"))
        add_steps(run, "Tokens per second", "speed")
        add(run, "Memory (GiB)", "at each step", f"line {run.colour}", *column(run.steps, "memory"))
    return section("Curves", node("div", *[chart(*item) for item in charts.items()], class_="charts"))

# ---- the other parts of the page -------------------------------------------------------------------------------------

def measures(run):
    """-> {name: (value, remark)}: the figures that tell at a glance how far a run is, and whether it learns."""
    values, (steps, loss) = {}, smooth(*column(run.steps, "loss"))
    if run.validations:
        first, last = run.validations[0], run.validations[-1]
        values["Validation loss"] = short(last["val_loss"]), f"{short(first['val_loss'])} at step {first['step']:,}"
        for group, mean in last.get("psnr", {}).items():
            remark = "base \u2192 LoRA; input {input:.1f}, VAE alone {vae:.1f}".format(**mean)
            values[f"PSNR (dB), {group}"] = "{base:.1f} \u2192 {lora:.1f}".format(**mean), remark
    values["Training loss"] = short(loss[-1]), f"smoothed; {short(loss[0])} at step {steps[0]:,.0f}"
    seconds, tokens, memory = [column(run.steps, name)[1] for name in ("seconds", "tokens", "memory")]
    written = time.strftime("%d %b %Y, %H:%M", time.localtime((run.folder / "log.jsonl").stat().st_mtime))
    state = "finished" if (run.folder / "DONE").exists() else "running or stopped, last step"
    max_steps = run.flags.get("max_steps", math.nan)
    values["Steps"] = f"{run.steps[-1]['step']:,}", f"of {short(max_steps)}; {state} {written}"
    if seconds.size and memory.size:
        duration = timedelta(seconds=round(seconds.sum()))
        values["Time of training"] = str(duration), f"{short(seconds.mean())} s a step, without validations"
        values["Tokens per second"] = short(tokens.sum() / seconds.sum()), f"{memory.max():.1f} GiB of memory at most"
    return values

def figures(runs):
    """-> the headline: a row of numbers for one run; for several runs a table, which also has the flags that differ."""
    of_runs = [measures(run) for run in runs]
    if len(runs) == 1:
        cells = [node("div", node("dt", name), node("dd", value), node("dd", remark, class_="remark"))
                 for name, (value, remark) in of_runs[0].items()]
        return node("dl", *cells, class_="figures")
    rows = []
    for name in dict.fromkeys(name for values in of_runs for name in values):
        rows.append([name, *[values.get(name, [""])[0] for values in of_runs]])
    for name in sorted(set().union(*[run.flags for run in runs]) - NOT_COMPARED):
        values = [shlex.join(flag_words(run.flags.get(name))) for run in runs]
        if len(set(values)) > 1:
            rows.append([node("code", f"--{name}"), *values])
    return table(rows, ["", *[node("span", run.name, class_=f"key {run.colour}") for run in runs]])

def pictures(runs, page):
    """-> the section with each validation picture, and what the base and the LoRAs made of it. Runs of older versions
    have contact sheets instead."""
    shown, steps = {}, set() # {(heading, remark): {name of a tile: its pictures}}

    def show(where, name, path, step=0, number=None):
        """Adds a picture, if its file exists. Step 0 means that it is the same at all steps."""
        t = shown.setdefault(where, {}).setdefault(name, SimpleNamespace(links={}, values={}, size=None))
        if step not in t.links and (size := size_of(path)):
            t.links[step], t.size = link(path, page), size
            if number is not None:
                t.values[step] = f"{number:.1f} dB"
            steps.add(step)
    for run in runs:
        lora = f"LoRA {run.name}" if len(runs) > 1 else "LoRA"
        for record, picture in [(r, picture) for r in run.validations for picture in r.get("pictures", [])]:
            file, step, samples = picture["file"], record["step"], run.folder / "samples"
            of_input, of_base, of_lora, of_vae = picture["psnr"]
            where = picture["prompt"], file
            show(where, "control", samples / "control" / file, number=of_input)
            for n in range(1, picture["controls"]):
                show(where, f"control {n + 1}", samples / f"control_{n}" / file)
            show(where, "base", samples / "base" / file, number=of_base)
            show(where, lora, samples / f"step_{step:06d}" / file, step, of_lora)
            show(where, "target", samples / "target" / file, number=of_vae)
            shown[where]["target"] = shown[where].pop("target") # it comes last, behind the LoRAs of all runs
    if not shown:
        for run in runs:
            for path in sorted((run.folder / "samples").glob("step_*_*.png")):
                step, name = path.stem.split("_", 2)[1:]
                show((f"{run.name}: {name}", "contact sheets"), "sheet", path, int(step))
    cards = []
    for (heading, remark), tiles in shown.items():
        row = [tile(name, t.links, heading, t.values, t.size, wipe=not name.startswith("control "))
               for name, t in tiles.items()]
        cards.append(card(heading, remark, row))
    steps = sorted(steps - {0})
    slider = node("label", node("span", "step"), node("input", type="range", class_="step", value=len(steps) - 1,
                  max=len(steps) - 1, data_steps=json.dumps(steps)), node("output"), class_="bar")
    remark = node("p", "PSNR to the target in dB; the number under the target is what the VAE alone reaches. Click a "
                  "picture to compare it with another one; the arrow keys change the step.", class_="detail")
    if not cards:
        remark = node("p", "There are none: train with --val_data DIR, a dataset of pairs that are not trained, to see "
                      "what the LoRA makes of them. predict.py --image draws any picture with it.", class_="detail")
        return section("Validation pictures", remark)
    return section("Validation pictures", remark, slider, *cards)

def find_samples(roots):
    """-> {"root/name": Sample} of those datasets that are on this machine."""
    import cache # takes seconds; -h does not need it
    by_name = {}
    for root in roots:
        with contextlib.suppress(InputError):
            samples = cache.read_index(root)[0] if cache.is_index(root) else common.read_dataset(root)[0]
            by_name |= {f"{s.root}/{s.name}": s for s in samples}
    return by_name

def hardest_pairs(run, most):
    """Prints the hardest samples -> the section with their pictures, as far as these are on this machine."""
    hardest, samples, cards = find_hardest(run.steps)[:most], find_samples(run.flags.get("data") or []), []
    none = "" if hardest else " none, the run is too short to tell"
    print(f"hardest samples of {run.folder}, by their loss relative to the mean at the same timesteps:{none}")
    for name, ratio, times in hardest:
        print(f"{ratio:6.2f}  {name}  (seen {times} times)")
        s = samples.get(name, common.Sample(name, "", [], [name]))
        copies = [("control", thumbnail(path)) for path in s.controls] + [("target", s.target and thumbnail(s.target))]
        detail = f"{name}: {ratio:.2f} times the mean loss at its noise levels, seen {times} times in the second half"
        cards.append(card(s.prompts[0], detail, [tile(kind, {0: copy}, name) for kind, copy in copies if copy]))
    remark = "These have the largest losses for their noise levels. Look at them: a target may be wrong."
    return section(f"Hardest training pairs{run.title}", node("p", remark, class_="detail"),
                   node("div", *cards, class_="pairs")) if cards else None

def to_share(word):
    """A word of a command -> the same without paths of this disk, as others may see the page: a path below the folder
    in which you are begins there, and of another only its name is left."""
    word = str(word)
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word) # --data=/home/me/photos
    path = Path(os.path.abspath(value))
    if not value.startswith("..") and not Path(value).is_absolute():
        return word
    return flag + equals + str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path.name)

def flag_words(value):
    """A flag's value -> the words that give it on a command line; a list within a list is [KEY, VALUE]."""
    items = value if isinstance(value, list) else [value]
    return [f"{item[0]}={json.dumps(item[1])}" if isinstance(item, list) else to_share(item) for item in items]

def commands(run):
    """-> {what it does: words of a shell command}."""
    resume = ["python", *[word for word in run.command if word != "--resume"], "--resume"]
    if not any(word.split("=")[0] == "--out_dir" for word in resume):
        resume += ["--out_dir", run.folder]
    # the flags of its newest pictures, as --resume may have changed them
    given, flags = {word.split("=")[0] for word in run.command}, run.flags
    for validation in run.validations[-1:]:
        flags = flags | validation.get("flags", {})
    predict = ["python", "predict.py", "--model", flags.get("model", "tiny")]
    for name in ("transformer", "quantize", "quantize_text_encoder", "offload", "negative_prompt",
                 "num_inference_steps", "true_cfg_scale", "shift"):
        changed = f"--{name}" in given or flags.get(name) != run.flags.get(name)
        if changed and flags.get(name) is not None:
            predict += [f"--{name}", "all" if flags[name] == common.ALL_BLOCKS else flags[name]]
    predict += ["--lora", run.folder, *flags.get("sample_lora", [])]
    image, prompt = "CONTROL.png", "..."
    for picture in [picture for r in run.validations for picture in r.get("pictures", [])][:1]:
        image, prompt = run.folder / "samples/control" / picture["file"], picture["prompt"]
    return {"Continue it (if it is finished: give a larger --max_steps; its learning rate must be constant)": resume,
            "Edit a picture with it": [*predict, "--image", image, "--prompt", prompt],
            "Convert it for ComfyUI (a finished run's LoRA works there as it is)": [
                "python", "tools/convert_lora.py", run.folder, "--to", "comfyui", "--out", f"{run.name}.safetensors"]}

def settings(run):
    """-> the section with commands, flags and versions."""
    lines = []
    for title, words in commands(run).items():
        spans = [node("span", shlex.quote(to_share(word)), " ") for word in words]
        lines += [node("h3", title), node("pre", *spans)]
    given = {word.split("=")[0].replace("--no-", "--") for word in run.command}
    rows = {True: [], False: []} # True: the command gave the flag
    for name, value in run.flags.items():
        rows[f"--{name}" in given].append([node("code", f"--{name}"), shlex.join(flag_words(value))])
    usual = node("details", node("summary", f"{len(rows[False])} flags that were not given"), table(rows[False]))
    versions = [[name, str(value)] for name, value in run.versions.items() if name != "started"]
    return section(f"Commands and flags{run.title}", *lines, node("h3", "Flags"), table(rows[True]), usual,
                   node("h3", "Versions"), table(versions))

# ---- command line ----------------------------------------------------------------------------------------------------

def make_page(folders, page, most):
    """Reads the runs, writes their page, prints the hardest samples."""
    runs = [read_log(folder) for folder in folders]
    names = [run.name for run in runs]
    for n, run in enumerate(runs):
        run.colour, run.accent, run.title = "ink", "c0", ""
        if names.count(run.name) > 1:
            run.name = os.path.relpath(run.folder, os.path.commonpath([os.path.abspath(r.folder) for r in runs]))
        if len(runs) > 1:
            run.colour = run.accent = f"c{n % 6}"
            run.title = f": {run.name}"
    title = " and ".join(run.name for run in runs)
    about = f"{runs[0].flags.get('model', '')}, trained on {' '.join(flag_words(runs[0].flags.get('data', '?')))}"
    head = node("header", node("h1", title), node("p", about))
    hardest = [hardest_pairs(run, most) for run in runs if most]
    save_page(page, title, [head, figures(runs), pictures(runs, page), curves(runs), *hardest, *map(settings, runs)])
    print(f"{page}: open it in a browser")

def progress(folder):
    """-> (whether the run is done, a number that changes when it is time to rewrite the page; None: no step yet)."""
    log = folder / "log.jsonl"
    text = log.read_bytes() if log.is_file() else b""
    number = text.count(b'"val_loss"') or text.count(b'"loss"') // 100
    return (folder / "DONE").exists(), number if b'"loss"' in text else None

def main():
    parser = Parser(__doc__)
    parser.add_argument("run", nargs="+", type=Path, help="run folder of train.py, or its copy")
    parser.add_argument("--out", type=Path, help="the page's file (default: index.html in the first run's folder)")
    parser.add_argument("--hardest", type=natural, default=6, metavar="N",
                        help="how many of the hardest samples to print and to show (0: none)")
    parser.add_argument("--watch", action="store_true", help="rewrite the page at each validation, until the run ends")
    args = parser.parse_args()
    if missing := [folder for folder in args.run if not folder.is_dir()]:
        raise InputError(f"{missing[0]}: no folder has this name; give a run folder of train.py")
    page, written = args.out or args.run[0] / "index.html", None
    if page.suffix != ".html":
        raise InputError(f"--out {page}: is no page; give a name that ends in .html, such as {page / 'index.html'}")
    common.refuse_to_replace(page, PAGE)
    while True:
        state = [progress(folder) for folder in args.run]
        too_early = args.watch and (False, None) in state
        if state != written and not too_early:
            make_page(args.run, page, args.hardest)
            written = state
        if not args.watch or all(done for done, _ in state):
            return
        time.sleep(5)

if __name__ == "__main__":
    main()
