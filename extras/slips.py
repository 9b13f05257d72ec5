"""
What a person may have meant by words of a command line that argparse does not take: a value in another form, a value
that is missing, a name without its flag. (hints.py has the flags of other trainers.)
"""
import contextlib
import difflib
import errno
import math
import os
import re
import sys
from argparse import ArgumentTypeError
from copy import copy
from pathlib import Path

import common

# {flag: what others call its values, without marks and capitals: what they are here, and what that changes}
VALUES = dict(
    optimizer="""
adamw adamwbf16 adamwadv optimiadamw bnbadamw: torch.optim.AdamW
adam optimiadam bnbadam: torch.optim.Adam
adamw8bit adamw8 bnbadamw8bit aoadamw8bit: bitsandbytes.optim.AdamW8bit
pagedadamw8bit bnbadamw8bitpaged: bitsandbytes.optim.PagedAdamW8bit
adam8bit adam8 bnbadam8bit: bitsandbytes.optim.Adam8bit
ademamix8bit bnbademamix8bit: bitsandbytes.optim.AdEMAMix8bit
lion8bit bnblion8bit: bitsandbytes.optim.Lion8bit
lion optimilion bnblion: lion_pytorch.Lion
prodigy prodigy8bit prodigyadv: prodigyopt.Prodigy
prodigyplusschedulefree: prodigyplus.ProdigyPlusScheduleFree
adamwschedulefree schedulefreeadamw: schedulefree.AdamWScheduleFree
adafactor: torch.optim.Adafactor; with --lr, as its relative steps have no counterpart
sgd: torch.optim.SGD
came: came_pytorch.CAME
muon: torch.optim.Muon""",
    lr_scheduler="""
constant: constant
constantwithwarmup: constant; --warmup_steps comes before it
linear: linear
polynomial: linear; a power has no counterpart
cosine: cosine
cosineannealing cosinewithrestarts cosinewithhardrestarts cosinewithminlr sine rex: cosine; it falls once, to 0""",
    timestep_sampling="""
sigmoid logitnormal lognorm: logit_normal
uniform linear sigma: uniform
weighted: uniform; its loss weights have no counterpart
lognormblend: logit_normal; its linear part has no counterpart
qwenshift: qwen_shift
shift fluxshift flux2shift lumina2shift: qwen_shift; its shift follows the picture's size""",
    dtype="""
bf16: bfloat16
fp16: float16
fp32 no: float32""",
    quantize="""
true float8 qfloat8: fp8
qint8 8bit 8: int8
bnb int4 fp4 4bit 4: nf4; the nearest""",
    to="""
kohya: comfyui
merged: model""")
MISSING = {"--gradient_checkpointing": "automatic here; leave it out, or give a number of blocks (0: off)",
           "--offload": "no number; give all, or a number of blocks"}
NEEDED = {"--image": "PICTURE", "--prompt": "TEXT"} # what predict.py wants beside --jobs
UNITS = {"k": 1000, "%": 0.01}
DASHES = re.compile("[\u2010-\u2015\u2212]+") # a word processor makes these of - and --
LONG_DASH = re.compile("-*[\u2010-\u2015\u2212]+-*") # with which a word may begin
QUOTES = "\u201c\u201d\u201e\u2018\u2019'\"" # ' does not quote in cmd.exe


def read_table(table):
    """Yields (key, its usual values, answer) of a table's rows KEYS: ANSWER, where a key may be KEY=VALUE|VALUE, and
    indented lines continue a row."""
    for row in re.sub("\n +", " ", table.strip()).split("\n"):
        keys, _, answer = row.partition(": ")
        for key in keys.split():
            key, _, usual = key.partition("=")
            yield key, usual.split("|"), answer


def answers(table, name):
    """-> the answers of all rows that have this key."""
    return [answer for key, _, answer in read_table(table) if key == name]


def ours_for(flag, value):
    """-> [what another program's value of a flag is here, and what that changes, if anything]; [] if it is not in
    VALUES."""
    found = answers(VALUES.get(flag, ""), re.sub("[^a-z0-9]", "", value.lower()))
    return found[0].split("; ") if found else []


def takes(action, value):
    """Whether this flag takes this text."""
    with contextlib.suppress(ValueError, TypeError, ArgumentTypeError):
        made = action.type(value) if action.type else value
        return not action.choices or made in action.choices
    return False


def mended(action, value):
    """-> the text nearest to `value` that this flag takes, or None."""
    plain = DASHES.sub("-", value.strip().lower())
    near = [*ours_for(action.dest, value)[:1], value, plain, *difflib.get_close_matches(plain, action.choices or (), 1)]
    if action.type is common.pixels: # 512, 1024,1024, 1024x1024px
        sides = re.findall(r"\d+", plain)
        near.append("x".join(sides * 2 if len(sides) == 1 else sides))
    elif action.type is common.png_name:
        near += [str(Path(value).with_suffix(".png"))] if Path(value).name else []
    elif not action.choices and action.type:
        near += number_of(plain)
    if action.nargs == "+":
        near.append(value.replace(",", " "))
    return next((text for text in near if all(takes(action, part) for part in text.split() or [text])), None)


def number_of(text):
    """[the number that 0,5, 2,000, 1k, 80%, 1000px or 1*10^-4 stand for, as Python writes it], or []."""
    text = re.sub(r"[*x\u00d7]?10\^", "e", text).strip(",;")
    found = re.fullmatch(r"([-+]?[\d.,_']+)(e[-+]?\d+)?\s*(k|%|px|steps?)?", text)
    if not found:
        return []
    digits, power, unit = found.groups()
    if re.fullmatch(r"[1-9]\d{0,2}([,._']\d{3})+", digits): # thousands
        digits = re.sub(r"\D", "", digits)
    with contextlib.suppress(ValueError, OverflowError):
        value = float(digits.replace(",", ".") + (power or "")) * UNITS.get(unit, 1)
        return [str(int(value) if value == int(value) else value)]
    return []


def explain_value(message, known):
    """argparse's message about a flag's value -> what to give; None for another message."""
    if found := re.match(r"(--\w+)(?:/\S+)?: ignored explicit argument '(.*)'", message):
        flag, value = found.groups()
        off = f"--no-{flag[2:]}" if value.lower() in ("false", "0", "no") else None
        return f"{flag}={value}: this flag takes no value; give {off if off in known else flag} alone"
    if found := re.match(r"(--\w+): expected (one|at least one) argument", message):
        flag, action = found[1], known[found[1]]
        first = re.split("; | [(]", action.help)[0]
        sizes = ["1024x1024", "512x512", "native"] if action.type is common.pixels else action.choices
        give = f"give {listed(sizes)}" if sizes else f"give one: {first}"
        return f"{flag}: {MISSING.get(flag, f'its value is missing; {give}')}"
    found = re.match(r"(--\w+): (?:invalid (\w+)(?: value)?: )?'(.*?)'(?: [(]choose| is no |$)", message)
    if not found or found[1] not in known:
        return None
    flag, kind, value = found.groups()
    action = known[flag]
    meant = mended(action, value)
    if action.type is common.png_name:
        folder = f", or --out_dir {common.command([value])} for a folder" if not Path(value).suffix else ""
        return f"{flag}: {value!r} is no .png name; give {common.command([meant or 'NAME.png'])}{folder}"
    if action.type is common.pixels and meant:
        return f"{flag}: {value} is {'a side' if value.isdigit() else 'no area'}; give {meant}"
    if action.type is common.pixels and re.fullmatch(r"\d+([*x]\d+)?", value):
        area = math.prod(map(int, re.findall(r"\d+", value)))
        return f"{flag}: {value} is too {'small' if area < common.MAX_PIXELS else 'large'}; give 1024x1024"
    if kind == "choice":
        ours = ours_for(action.dest, value)
        give = "; ".join(ours) if ours[:1] == [meant] else meant or listed(action.choices)
        return f"{flag}: {value!r} is not one of {', '.join(map(str, action.choices))}; give {give}"
    if flag in MISSING and not meant:
        return f"{flag}: {MISSING[flag]}"
    default = action.default[0] if isinstance(action.default, list) and action.default else action.default
    usual = next((f"one, such as {n}" for n in (default, 1, 10) if takes(action, str(n))), "a number")
    number = "whole number" if kind == "int" else "number"
    return kind and f"{flag}: {value!r} is no {number}; give {meant or usual}"


def listed(choices):
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}"


def refuse_marks(parser):
    """Ends the script if a word is a mark of a word processor, or of another shell."""
    for word in sys.argv[1:]:
        flag = f"--{LONG_DASH.sub('', word, 1)}"
        if LONG_DASH.match(word) and flag.split("=")[0] in parser._option_string_actions:
            parser.error(f"argument {word}: begins with a long dash, of a word processor; type {flag}")
        if word in ("\\", "`", "^"):
            parser.error(f"argument {word}: is of another shell; where a line goes on, end it with \\ in bash, ` in "
                         "PowerShell, ^ in cmd.exe, and nothing behind it")


def is_too_long(word):
    """Whether no file can have this name, as it is longer than the disk takes one."""
    try:
        os.lstat(word)
    except OSError as e:
        return e.errno == errno.ENAMETOOLONG
    return False


def how_to_call(parser):
    """-> the first example of the script's docstring."""
    line = next(line for line in parser.description.splitlines() if line.startswith("$ ") and parser.prog in line)
    return f"for instance: {re.split('  +#|  +->', line[2:])[0].strip()}"


def groups(words):
    """Words of a command line -> [(a flag, or '' before the first one, [the words behind it, or behind its =])]."""
    found = [("", [])]
    for word in words:
        if re.match("--?[A-Za-z]", word) and not common.NEGATIVE.match(word):
            flag, equals, value = word.partition("=")
            found.append((flag, [value] if equals else []))
        else:
            found[-1][1].append(word)
    return found


def words_of(command):
    """{flag, or '' before the first one: the words behind it} -> the words of the command line. See groups."""
    words = [word for flag, values in command.items() for word in (flag, *values)]
    return words[1:] # without ''


def bare_words(parser):
    """-> [(the flag before it, or '', a word that no flag takes)], at least one."""
    left = parser.parse_known_args()[1]
    found = []
    for flag, words in groups(sys.argv[1:]):
        for word in words:
            if word in left:
                left.remove(word)
                found.append((flag, word))
    return found or [("", left[-1])] # of -- --seed argparse takes neither for a flag


def flag_of(word, known):
    """The flag that this word may be a value of, by what lies there and by its form; or None."""
    path, suffix = Path(word), Path(word).suffix.lower()
    # (a text is longer than any name: of one Path.is_file raises, and os.path.isfile is False)
    wanted = [flag for flag, action in known.items() if action.choices and word in map(str, action.choices)]
    if word.startswith("Qwen/") or os.path.isfile(path / "model_index.json"):
        wanted = ["--model"]
    elif suffix == ".safetensors" or os.path.isfile(path / "log.jsonl"): # the latter is a run
        wanted = ["--lora", "--pretrained_lora"]
    elif "--image" in known and (os.path.isdir(path) or common.KINDS.get(suffix) in ("picture", "other")):
        wanted = ["--image"]
    elif suffix == ".jsonl" or "--data" in known and re.fullmatch(r"[\w./\\-]+", word):
        wanted = ["--jobs", "--data"]
    return next((flag for flag in wanted if flag in known), None)


def meant_line(parser, bare):
    """-> the command that is meant by one with these words that belong to no flag; None if that cannot be told. bare:
    as of bare_words."""
    known, command, texts = parser._option_string_actions, {}, []
    for flag, values in groups(sys.argv[1:]):
        command.setdefault(flag, []).extend(values)
    wanted = [flag_of(word, known) for _, word in bare]
    for (before, word), flag in zip(bare, wanted):
        command[before].remove(word)
        if flag is None or None in wanted and known[flag].choices: # "make it 2 times larger" names no kernel
            texts.append(word)
        else:
            command.setdefault(flag, []).append(word)
    behind_prompt = texts and ("--prompt", texts[0]) in bare # without quotes it took the first word alone
    if texts and ("--image" not in known or "--prompt" in command and not behind_prompt):
        return None # of a script that edits nothing, or that has its instruction
    if texts:
        text = " ".join(command.pop("--prompt", []) + texts)
        command["--prompt"] = [text.strip(QUOTES)]
    if "--image" in known and "--jobs" not in command: # these two go together
        command = command | {flag: command.get(flag) or [name] for flag, name in NEEDED.items()}
    words = words_of(command)
    return common.command(["python", sys.argv[0], *words]) if is_taken(parser, words) else None


def is_taken(parser, words):
    """Whether these words are a command that the script takes."""
    def refuse(message):
        raise ValueError(message)
    trial = copy(parser)
    trial.error = refuse
    with contextlib.suppress(ValueError):
        return not trial.parse_known_args(words)[1]
    return False
