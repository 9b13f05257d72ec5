"""
A training as a page to look at: whether it learns, its held-out pictures, its curves, the pairs it finds hardest, its
flags, the commands that go on with it. Several runs are drawn over each other.

Reads run folders of train.py, or copies of them; writes index.html into the (first) run's folder. The page needs no
server and no network. It shows the pictures in samples/ as they lie there, so copy it together with its folder.

$ python tools/page.py out/RUN
$ python tools/page.py out/RUN --watch          # again at each validation (before the first one every 100 steps)
$ python tools/page.py out/RUN out/OTHER --out both.html
"""
import contextlib
import json
import math
import re
import shlex
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np

import cache
import common
from common import InputError, Parser, natural
from tools.page_common import card, link, node, save_page, section, size_of, table, thumbnail, tile

COLUMNS = 300 # of a curve: more points are drawn as their least, mean and greatest
SMOOTH = 20 # a smoothed value is the mean of the last 1/20 of the run
OWN = {"out_dir", "plan", "resume"} # flags that do not tell how a run was trained

# ---- the log ---------------------------------------------------------------------------------------------------------

def read_log(folder):
    """-> SimpleNamespace(folder, name, flags, command, versions, steps, validations): the last two are records, one for
    each step. The last line of a run that is at work, or was killed, may be cut."""
    log = folder / "log.jsonl"
    try:
        lines = log.read_text().splitlines()
    except (OSError, ValueError) as e:
        raise InputError(f"{log}: cannot be read ({common.first_words(e)}); give a run folder of train.py")
    begin, steps, validations = {}, {}, {} # by step: a resumed run may say something twice
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
        except (ValueError, TypeError, AttributeError, RecursionError):
            if n < len(lines):
                raise InputError(f"{log}:{n}: not what train.py writes; take the line out")
    if not steps:
        raise InputError(f"{log}: no steps yet; come back later, or --watch")
    flags, command = begin.pop("flags", None), begin.pop("command", None)
    steps, validations = [list(dict(sorted(found.items())).values()) for found in (steps, validations)]
    return SimpleNamespace(folder=folder, name=folder.resolve().name, flags=flags if isinstance(flags, dict) else {},
                           command=command if isinstance(command, list) else ["train.py"], versions=begin, steps=steps,
                           validations=validations)

def column(records, name):
    """-> (steps, values) of the records that have this number."""
    found = [(r["step"], r[name]) for r in records if isinstance(r.get(name), (int, float)) and math.isfinite(r[name])]
    return np.array(found, float).reshape(-1, 2).T

def by_timestep(steps):
    """-> for each sample in these records its name, its loss and the tenth of (0, 1) that its timestep is in; of each
    tenth the mean loss and the number of samples."""
    whole = [r for r in steps if {"samples", "timesteps", "losses"} <= r.keys()]

    def all_of(key):
        return np.array([x for r in whole for x in r[key]])
    names, s, losses = map(all_of, ("samples", "timesteps", "losses"))
    tenths = np.minimum(s * 10, 9).astype(int)
    counts = np.bincount(tenths, minlength=10)
    return names, losses, tenths, np.bincount(tenths, losses, 10) / np.maximum(counts, 1), counts

def find_hardest(steps):
    """-> [(name, ratio, times seen)] of all samples, the hardest first: its losses in the second half of the run, each
    divided by the mean at that timestep."""
    names, losses, tenths, means, counts = by_timestep(steps[len(steps) // 2:])
    ratios = {}
    for name, loss, tenth in zip(names, losses, tenths):
        if counts[tenth] >= 5: # fewer are nothing to compare with
            ratios.setdefault(str(name), []).append(loss / max(means[tenth], 1e-12))
    found = [(name, float(np.mean(r)), len(r)) for name, r in ratios.items()]
    return sorted(found, key=lambda row: -row[1])

# ---- curves ----------------------------------------------------------------------------------------------------------

def smooth(x, y):
    """-> x, and the mean of y there and of the values before it, as many as 1/SMOOTH of all; without those that have
    too few before them."""
    n = max(1, len(y) // SMOOTH)
    sums = np.insert(np.cumsum(y), 0, 0)
    return x[n - 1:], (sums[n:] - sums[:-n]) / n

def thin(x, y):
    """-> x, least, mean, greatest y of each of COLUMNS equal parts of the range of x."""
    if len(x) <= COLUMNS:
        return x, y, y, y
    columns = np.minimum((x - x[0]) / (x[-1] - x[0]) * COLUMNS, COLUMNS - 1).astype(int)
    first = np.flatnonzero(np.diff(columns, prepend=-1))
    counts = np.diff(first, append=len(x))
    return (np.add.reduceat(x, first) / counts, np.minimum.reduceat(y, first), np.add.reduceat(y, first) / counts,
            np.maximum.reduceat(y, first))

def short(value):
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

def ticks(low, high, most):
    """Round numbers between low and high."""
    exact = (high - low) / most
    power = 10 ** math.floor(math.log10(exact))
    pitch = next(power * n for n in (1, 2, 5, 10) if power * n >= exact * 0.999)
    return np.arange(math.ceil(low / pitch), math.floor(high / pitch) + 1) * pitch

def chart(title, lines, unit="step", zero=False, wide=False):
    """A figure of curves. lines: (name, x, y, style, colour), style: raw (the range of many points), line, dash or
    dots. zero: the axis begins there. The drawing, of 1000x1000 units, is stretched to the width that the page has; of
    raw points it leaves out the rarest."""
    lines = [row for row in lines if len(row[1])]
    if not lines:
        return None
    right = max(row[1].max() for row in lines)
    seen = np.concatenate([np.percentile(y, [5, 95]) if style == "raw" else y for *_, y, style, _ in lines])
    low, high = min(seen.min(), 0 if zero else np.inf), seen.max()
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1
    low, high = low if zero else low - margin, high + margin

    def across(x):
        return x / right * 1000

    def up(y):
        return (high - y) / (high - low) * 1000

    def path(x, y, join=" "):
        return "M" + join.join(f"{a:.5g},{b:.5g}" for a, b in zip(across(x), up(y)))
    drawn = [node("path", class_="grid", d=f"M0,{up(y):.5g}H1000") for y in ticks(low, high, 5)]
    for name, x, y, style, colour in lines:
        x, least, mean, greatest = thin(x, y)
        if style == "raw":
            d = path(np.concatenate([x, x[::-1]]), np.concatenate([least, greatest[::-1]])) + "Z"
        else:
            d = path(x, mean)
        drawn.append(node("path", class_=f"{style} {colour}", data_name=name, d=d))
        if style == "dots":
            drawn.append(node("path", class_=f"dot {colour}", d=path(x, mean, "h0M") + "h0"))
    keys = [node("span", name, class_=f"key {style} {colour}") for name, _, _, style, colour in lines]
    svg = node("svg", *drawn, viewBox="0 0 1000 1000", preserveAspectRatio="none", role="img",
               aria_label=f"{title}: " + ", ".join(f"{name} ends at {short(y[-1])}" for name, _, y, *_ in lines))
    marks = [node("span", short(y), class_="y", style=f"top:{up(y) / 10:.2f}%") for y in ticks(low, high, 5)]
    marks += [node("span", short(x), class_="x", style=f"left:{across(x) / 10:.2f}%") for x in ticks(0, right, 4)]
    plot = node("div", svg, *marks, node("i", class_="cursor"), node("i", class_="now"), class_="plot", data_unit=unit,
                data_right=right, data_low=low, data_high=high)
    return node("figure", node("figcaption", node("strong", title), *keys, node("output")), plot,
                class_="chart wide" if wide else "chart")

def curves(runs):
    several = len(runs) > 1

    def over_steps(title, field, smoothed=True, zero=True):
        lines = []
        for run in runs:
            (x, y), name = column(run.steps, field), "at each step"
            if smoothed and not several:
                lines.append(("each step", x, y, "raw", run.colour))
            if smoothed:
                (x, y), name = smooth(x, y), "smoothed"
            lines.append((run.name if several else name, x, y, "line", run.colour))
            if field == "loss":
                name = f"{run.name}, validation" if several else "validation"
                lines.append((name, *column(run.validations, "val_loss"), "dots", run.accent))
        return chart(title, lines, zero=zero, wide=field == "loss")

    def psnr(group):
        lines = []
        for run in runs:
            records = [r["psnr"][group] | dict(step=r["step"]) for r in run.validations if group in r.get("psnr", {})]
            lines.append((run.name if several else "LoRA", *column(records, "lora"), "dots", run.accent))
            if run is runs[0]:
                lines.append(("base", *column(records, "base"), "dash", "ink"))
                lines.append(("VAE alone", *column(records, "vae"), "dash", "mute"))
        return chart(f"PSNR to the target (dB), {group}", lines)

    def by_level(name, steps, colour):
        *_, means, counts = by_timestep(steps)
        tenths = np.flatnonzero(counts)
        edges = np.stack([tenths, tenths + 1], 1).ravel() / 10
        return name, edges, np.repeat(means[tenths], 2), "line", colour

    quarters = [max(1, len(run.steps) // 4) for run in runs]
    levels = [by_level(run.name if several else "last quarter of the run", run.steps[-n:], run.accent)
              for run, n in zip(runs, quarters)]
    if not several:
        levels.insert(0, by_level("first quarter", runs[0].steps[:quarters[0]], "mute"))
    groups = dict.fromkeys(name for run in runs for r in run.validations for name in r.get("psnr", {}))
    charts = [over_steps("Loss", "loss", zero=False), *map(psnr, groups),
              chart("Loss by noise level (1: noise alone)", levels, "noise level", zero=True),
              over_steps("Gradient norm", "grad_norm"), over_steps("Learning rate", "lr", smoothed=False),
              over_steps("Tokens per second", "speed"), over_steps("Memory (GiB)", "memory", smoothed=False)]
    return section("Curves", node("div", *charts, class_="charts"))

# ---- the other parts of the page -------------------------------------------------------------------------------------

def measures(run):
    """{name: (value, remark)}: what tells at once how far a run is, and whether it learns."""
    found, (steps, loss) = {}, smooth(*column(run.steps, "loss"))
    found["Training loss"] = short(loss[-1]), f"smoothed; {short(loss[0])} at step {steps[0]:,.0f}"
    if run.validations:
        first, last = run.validations[0], run.validations[-1]
        remark = f"{short(first['val_loss'])} at step {first['step']:,}"
        found = {"Validation loss": (short(last["val_loss"]), remark)}
        for group, mean in last.get("psnr", {}).items():
            remark = "base \u2192 LoRA; input {input:.1f}, VAE alone {vae:.1f}".format(**mean)
            found[f"PSNR (dB), {group}"] = "{base:.1f} \u2192 {lora:.1f}".format(**mean), remark
    seconds, tokens, memory = [column(run.steps, name)[1] for name in ("seconds", "tokens", "memory")]
    written = time.strftime("%d %b %Y, %H:%M", time.localtime((run.folder / "log.jsonl").stat().st_mtime))
    state = "finished" if (run.folder / "DONE").exists() else "at work or stopped"
    most = run.flags.get("max_steps", math.nan)
    found["Steps"] = f"{run.steps[-1]['step']:,}", f"of {short(most)}; {state} {written}"
    if seconds.size and memory.size:
        taken = timedelta(seconds=round(seconds.sum()))
        found["Hours of training"] = str(taken), f"{short(seconds.mean())} s a step, without validations"
        found["Tokens per second"] = short(tokens.sum() / seconds.sum()), f"{memory.max():.1f} GiB of memory at most"
    return found

def figures(runs):
    """The headline: of one run a row of numbers, of several a table, with the flags that differ."""
    found = [measures(run) for run in runs]
    if len(runs) == 1:
        cells = [node("div", node("dt", name), node("dd", value), node("dd", remark, class_="remark"))
                 for name, (value, remark) in found[0].items()]
        return node("dl", *cells, class_="figures")
    rows = []
    for name in dict.fromkeys(name for measure in found for name in measure):
        rows.append([name, *[measure.get(name, [""])[0] for measure in found]])
    for name in sorted(set().union(*[run.flags for run in runs]) - OWN):
        values = [shlex.join(flag_words(run.flags.get(name))) for run in runs]
        if len(set(values)) > 1:
            rows.append([node("code", f"--{name}"), *values])
    return table(rows, ["", *[node("span", run.name, class_=f"key {run.colour}") for run in runs]])

def pictures(runs, page):
    """Each held-out picture with what the base and the LoRAs made of it; of older runs the contact sheets."""
    prompts, shown, steps = {}, {}, set()
    for run in runs:
        lora = f"LoRA {run.name}" if len(runs) > 1 else "LoRA"
        for record, picture in [(r, picture) for r in run.validations for picture in r.get("pictures", [])]:
            step, file, psnr = record["step"], picture["file"], picture["psnr"]
            prompts[file] = picture["prompt"]
            kinds = [("control", "control", psnr[0])]
            kinds += [(f"control {n + 1}", f"control_{n}", None) for n in range(1, picture["controls"])]
            kinds += [("base", "base", psnr[1]), (lora, f"step_{step:06d}", psnr[2]), ("target", "target", psnr[3])]
            for name, folder, value in kinds:
                path, tiles = run.folder / "samples" / folder / file, shown.setdefault(file, {})
                t = tiles.setdefault(name, SimpleNamespace(links={}, values={}, size=None))
                if name == lora or not t.links: # the others are the same at all steps
                    t.values |= {step: f"{value:.1f} dB"} if value is not None else {}
                    if size := size_of(path):
                        t.links[step], t.size = link(path, page), size
                        steps |= {step} if name == lora else set()
            tiles["target"] = tiles.pop("target") # it stands last
    cards = []
    for file, tiles in shown.items():
        made = [tile(name, t.links, prompts[file], t.values, t.size, wipe=not name.startswith("control "))
                for name, t in tiles.items()]
        cards.append(card(prompts[file], file, made))
    if not cards:
        for run in runs:
            for path in sorted((run.folder / "samples").glob("step_*_*.png")):
                step, name = path.stem.split("_", 2)[1:]
                shown.setdefault(f"{run.name}: {name}", {})[int(step)] = link(path, page)
                steps.add(int(step))
        cards = [card(name, "contact sheets", [tile("sheet", links, name)]) for name, links in shown.items()]
    steps = sorted(steps)
    slider = node("label", node("span", "step"), node("input", type="range", class_="step", value=len(steps) - 1,
                  max=len(steps) - 1, data_steps=json.dumps(steps)), node("output"), class_="bar")
    remark = node("p", "PSNR to the target in dB; the target's own is what the VAE alone reaches. Click a picture to "
                  "compare it with another one; the arrow keys change the step.", class_="detail")
    return section("Held-out pictures", remark, slider, *cards) if cards else None

def find_samples(roots):
    """{"root/name": Sample} of the datasets that are on this machine; of the others the log's names must do."""
    found = {}
    for root in roots:
        with contextlib.suppress(InputError):
            samples = cache.read_index(root)[0] if cache.is_index(root) else common.read_dataset(root)[0]
            found |= {f"{s.root}/{s.name}": s for s in samples}
    return found

def hardest_pairs(run, rows):
    """rows: of find_hardest."""
    samples, cards = find_samples(run.flags.get("data") or []), []
    for name, ratio, times in rows:
        detail = f"{name}: {ratio:.2f} times the mean loss at its noise levels, seen {times} times"
        s = samples.get(name, common.Sample(name, "", [], [name]))
        copies = [("control", thumbnail(path)) for path in s.controls] + [("target", s.target and thumbnail(s.target))]
        cards.append(card(s.prompts[0], detail, [tile(kind, {0: copy}, name) for kind, copy in copies if copy]))
    remark = "Their losses are the largest for their noise levels. Look at them: the target may be wrong."
    return section(f"Hardest training pairs{run.title}", node("p", remark, class_="detail"),
                   node("div", *cards, class_="pairs")) if cards else None

def flag_words(value):
    """A flag's value -> the words of a command line that give it; a list in a list is one of KEY=VALUE."""
    items = value if isinstance(value, list) else [value]
    return [f"{item[0]}={json.dumps(item[1])}" if isinstance(item, list) else str(item) for item in items]

def commands(run):
    """{what it does: words for a shell}"""
    flags, again = run.flags, [str(word) for word in run.command if word != "--resume"]
    if not any(word.split("=")[0] == "--out_dir" for word in again):
        again += ["--out_dir", run.folder]
    picture = next((p for r in run.validations for p in r.get("pictures", [])), None)
    control = run.folder / "samples" / "control" / picture["file"] if picture else "CONTROL.png"
    sample = ["--model", flags.get("model", "tiny"), "--lora", run.folder, flags.get("base_lora")]
    sample += ["--transformer", flags["transformer"]] if flags.get("transformer") else []
    sample += ["--image", control, "--prompt", picture["prompt"] if picture else "..."]
    return {"Continue it (a finished one with a larger --max_steps, if its learning rate is constant)":
            ["python", *again, "--resume"], "Edit a picture with it": ["python", "predict.py", *filter(None, sample)],
            "Convert it for ComfyUI": ["python", "tools/convert_lora.py", run.folder, "--to", "comfyui", "--out",
                                       f"{run.name}.safetensors"]}

def settings(run):
    """Commands, flags and versions."""
    lines = []
    for title, words in commands(run).items():
        spans = [node("span", shlex.quote(str(word)), " ") for word in words]
        lines += [node("h3", title), node("pre", *spans)]
    rows = {name: [node("code", f"--{name}"), shlex.join(flag_words(value))] for name, value in run.flags.items()}
    given = {str(word).split("=")[0] for word in run.command}
    usual = [rows.pop(name) for name in run.flags if f"--{name}" not in given and f"--no-{name}" not in given]
    versions = [[name, str(value)] for name, value in run.versions.items() if name != "started"]
    return section(f"Commands and flags{run.title}", *lines, node("h3", "Flags"), table(rows.values()), node(
        "details", node("summary", f"{len(usual)} flags that were not given"), table(usual)), node("h3", "Versions"),
                   table(versions))

# ---- command line ----------------------------------------------------------------------------------------------------

def make_page(folders, page, most):
    """Reads the runs, writes their page, prints the hardest samples."""
    runs, parts = [read_log(folder) for folder in folders], []
    names = [run.name for run in runs]
    for n, run in enumerate(runs):
        if names.count(run.name) > 1:
            run.name = str(run.folder)
        run.colour, run.accent, run.title = "ink", "c0", ""
        if len(runs) > 1:
            run.colour = run.accent = f"c{n % 6}"
            run.title = f": {run.name}"
        hardest = find_hardest(run.steps)[:most]
        print(f"hardest samples of {run.folder}, by their loss over the mean at the same timesteps:"
              + " none, the run is too short to tell" * (not hardest))
        for name, ratio, times in hardest:
            print(f"{ratio:6.2f}  {name}  (seen {times} times)")
        parts.append(hardest_pairs(run, hardest))
    title = " and ".join(run.name for run in runs)
    about = f"{runs[0].flags.get('model', '')}, trained on {' '.join(flag_words(runs[0].flags.get('data', '?')))}"
    head = node("header", node("h1", title), node("p", about))
    parts += map(settings, runs)
    save_page(page, title, [head, figures(runs), pictures(runs, page), curves(runs), *parts])
    print(f"{page}: open it in a browser")

def progress(folder):
    """-> (whether the run is done, a number that changes when its page is to be written again; None: no step yet)."""
    log = folder / "log.jsonl"
    text = log.read_bytes() if log.is_file() else b""
    number = text.count(b'"val_loss"') or text.count(b'"loss"') // 100
    return (folder / "DONE").exists(), number if b'"loss"' in text else None

def main():
    parser = Parser(__doc__)
    parser.add_argument("run", nargs="+", type=Path, help="run folder of train.py, or its copy")
    parser.add_argument("--out", type=Path, help="the page's file (default: index.html in the first run's folder)")
    parser.add_argument("--hardest", type=natural, default=6, metavar="N", help="how many samples to name and show")
    parser.add_argument("--watch", action="store_true", help="write the page again at each validation, until the end")
    args = parser.parse_args()
    if missing := [folder for folder in args.run if not folder.is_dir()]:
        raise InputError(f"{missing[0]}: no folder of that name; give a run folder of train.py")
    page, written = args.out or args.run[0], None
    if page.is_dir():
        page /= "index.html"
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
