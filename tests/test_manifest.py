"""
Manifests -> samples: metadata.jsonl means what the folder does, and what is wrong in a line is named by its number.
"""
import json
import os

import pytest

import cache
from library.data import dataset
from tests.harness import add_item, is_one_line, paint_picture, samples_of, save

PROMPT = 'say "hi",\u2028 and\u0085go\u00a0on' # str.splitlines, but not JSON, takes two of these for ends of lines

def write_rows(path, *rows, ascii=False):
    """As an editor on Windows would, with a mark, line ends of two bytes, and blank lines."""
    lines = [json.dumps(row, ensure_ascii=ascii) for row in rows]
    path.write_text("\ufeff" + "\r\n\r\n".join(lines), encoding="utf-8", newline="")
    return path

@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("ascii", [False, True])
def test_a_manifest_gives_the_same_samples_as_the_folder(tmp_path, plus, ascii, absolute):
    data = add_item(tmp_path / "data", "cat", [(64, 32)] + [(32, 32 * (1 + k % 3)) for k in range(12)], PROMPT,
                    mask=paint_picture((64, 32), mode="L"))
    add_item(data, "sub/[1] \U0001f431", [(64, 64), (32, 32)], "one\ntwo")
    want, problems = samples_of(plus, data)
    assert len(want) == 2 and not problems
    named = lambda path: path if absolute or path is None else os.path.relpath(path, data)
    rows = [dict(target=named(s.target), control=list(map(named, s.controls)), prompt=s.prompts, mask=named(s.mask))
            for s in want.values()]
    got, problems = samples_of(plus, write_rows(data / "rows.jsonl", *rows, ascii=ascii))
    assert all(name.startswith("target/") for name in got)
    assert not problems and [cache.files_of(s) for s in got.values()] == [cache.files_of(s) for s in want.values()]

def row(changes=""):
    """A line of JSON: one of `changes`, as it is written there, stands for the field of its name."""
    fields = dict(target='"target/cat.png"', control='["control/cat.png"]', prompt='"go"')
    name, _, value = changes.partition(": ")
    fields |= {name.strip('"'): value} if name else {}
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"

BAD_ROWS = { # line 2 of metadata.jsonl, and what is named beside the line number
    "no JSON": ('{"target": "target/cat.png", ',),
    "no object": ('["target/cat.png"]',),
    "numbers": ("[1, 2]", "no JSON object: [1, 2]"),
    "deep": ("[" * 100_000,),
    "no target": (row('"target": null'), "target"),
    "no control": ('{"target": "target/cat.png", "prompt": "go"}', "control"),
    "no prompt": (row('"prompt": []'), "prompt"),
    "unknown column": (row('"caption": "go"'), "caption"),
    "a field of jobs.jsonl": (row('"seed": 3'), "unknown field 'seed'"),
    "number among controls": (row('"control": ["control/cat.png", 5]'), "5"),
    "NaN": (row('"prompt": NaN'), "nan"),
    "blank prompt": (row('"prompt": ["go", " "]'), "prompt"),
    "invisible prompt": (row(r'"prompt": "\u200b\u2060"'), "empty prompt"),
    "a placeholder": (row('"prompt": "[trigger] so"'), "[trigger]", "write the word itself"),
    "a key twice": (row()[:-1] + ', "control": "control/good.png"}', "'control' is given twice"),
    "a key twice inside": (row('"prompt": {"a": 1, "a": 2}'), "'a' is given twice; want one JSON object a line, each "
                                                              "key once"),
    "a number as prompt": (row('"prompt": 5'), "5 is neither a text nor a list; correct this line"),
    "NUL in a prompt": (row(r'"prompt": "red\u0000blue"'), r"red\x00blue"),
    "half a character": (row(r'"prompt": "add a \ud83d"'), r"\ud83d"),
    "missing picture": (row('"control": ["control/tom.png"]'), "control/tom.png"),
    "parent": (row('"control": ["../secret.png"]'), "../secret.png"),
    "absolute": (row('"target": "/etc/passwd"'), "/etc/passwd"),
    "URL": (row('"control": ["http://localhost:1/cat.png"]'), "http://localhost:1/cat.png"),
    "link to the outside": (row('"control": ["control/link.png"]'), "link.png"),
    "link by a detour": (row('"control": ["into/../link.png"]'), "link.png"),
    "empty target": (row('"target": ""'), "target"),
    "link to itself": (row('"control": ["control/loop.png"]'), "loop.png"),
    "folder": (row('"target": "."'), "'.'"),
    "NUL": (row(r'"target": "a\u0000.png"'), r"a\x00.png"),
    "half a character in a name": (row(r'"target": "\ud83d.png"'), r"\ud83d.png"),
}

@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_named_by_line_and_field(data, plus, kind):
    """Outside the folder lies secret.png, inside it a link to that."""
    save(paint_picture(), data / "../secret.png")
    (data / "control/link.png").symlink_to("../../secret.png")
    (data / "link.png").symlink_to("../secret.png")
    (data / "into").symlink_to(data / "target")
    (data / "control/loop.png").symlink_to("loop.png")
    line, *named = BAD_ROWS[kind]
    good = row().replace("cat", "good")
    (data / "metadata.jsonl").write_text(f"{good}\n{line}\n", "utf-8")
    samples, problems = samples_of(plus, data / "metadata.jsonl")
    assert list(samples) == ["target/good"]
    assert len(problems) == 1 and is_one_line(problems[0], "metadata.jsonl:2", *named), problems

def test_a_job_has_one_prompt(tmp_path):
    """Several would be drawn by the first alone. The wordings of a dataset's target stay."""
    add_item(tmp_path, "cat")
    rows = [dict(image="control/cat.png", prompt=prompt) for prompt in ("go", ["go"], ["go", "so"], [])]
    path = write_rows(tmp_path / "jobs.jsonl", *rows, dict(target="target/cat.png", control=[], prompt=["a", "b"]))
    jobs, problems = dataset.read_manifest(path, is_job=True)
    assert [job.prompts for job in jobs] == [["go"], ["go"], ["a", "b"]] and len(problems) == 2
    assert is_one_line(problems[0], "jobs.jsonl:5", "one", "a line for each") and "empty prompt" in problems[1]
    path.write_text('{"image": "control/cat.png", "prompt": "go", "seed": 1, "seed": 2}', "utf-8")
    [problem] = dataset.read_manifest(path, is_job=True)[1]
    assert is_one_line(problem, "jobs.jsonl:1", "'seed' is given twice")
