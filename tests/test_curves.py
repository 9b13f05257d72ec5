"""tools/curves.py: the hardest samples and the curves of a log."""
import json

import numpy as np
import pytest
from PIL import Image

from models import is_one_line, small
from test_consistency import run_script

def write_log(folder, records):
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, [dict(flags={}), *records])))
    return folder

def toy_log(steps=200):
    """Every loss grows with the timestep, and that of sample 3 is three times the others'. It is seen where all is
    easy, so that its losses are not the largest. Before the second half of the run sample 1 is worse."""
    rng, records = np.random.default_rng(0), []
    for step in range(1, steps + 1):
        names = [str(n) for n in rng.integers(0, 8, 2)]
        s = [x * (0.4 if name == "3" else 1) for name, x in zip(names, rng.random(2))]
        hard = {"3": 3, "1": 9 if step <= steps // 2 else 1}
        losses = [hard.get(name, 1) * 10 ** x for name, x in zip(names, s)]
        records.append(dict(step=step, loss=float(np.mean(losses)), samples=names, timesteps=s, losses=losses))
    return records

def test_the_hardest_sample_is_found_whatever_its_timesteps(tmp_path):
    run = write_log(tmp_path / "run", toy_log())
    result = run_script("tools/curves.py", run, "--hardest", 8)
    rows = [line.split() for line in result.out.splitlines() if "seen" in line]
    assert len(rows) == 8 and rows[0][1] == "3" and float(rows[0][0]) > 1.3 * float(rows[1][0])
    assert sum(int(row[3]) for row in rows) == 200 # the second half
    assert result.status == 0 and (run / "loss.png").exists() != ("pip install matplotlib" in result.out)

def test_what_train_writes_is_drawn(tmp_path, small):
    """Also while the run is at work: the last line may be half a line."""
    flags = [*small.flags, "--val_data", small.folder / "data", "--sample_every", 2, "--max_steps", 3]
    assert run_script("train.py", *flags, "--out_dir", tmp_path / "run").status == 0
    with open(tmp_path / "run/log.jsonl", "a") as f:
        f.write('{"step": 4, "lo')
    result = run_script("tools/curves.py", tmp_path / "run")
    assert "hardest samples" in result.out and "too short to tell" in result.out
    pytest.importorskip("matplotlib")
    assert result.status == 0 and Image.open(tmp_path / "run/loss.png").size == (1200, 400)

@pytest.mark.parametrize("text, named", [(None, "cannot be read"), ('{"flags": 1}', "no steps"),
                                         ('{}\n{"step"\n{"step": 2}', "log.jsonl:2")])
def test_a_folder_without_a_log_is_one_line(tmp_path, text, named):
    if text:
        (tmp_path / "log.jsonl").write_text(text)
    result = run_script("tools/curves.py", tmp_path)
    assert result.status == 1 and is_one_line(result.errors[-1], tmp_path, named)
