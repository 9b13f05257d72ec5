#!/usr/bin/env bash
# datasets' map() hands back the pictures of yesterday's code after a module that the function calls was edited.
#
# datasets 5.2.0 keeps the result of map() on disk, under a hash of the data and of the function. One would expect an
# edited function to be run again. That holds for code in the script itself; of a function in a module that is imported
# only the name counts, whether it is mapped itself or called by the mapped one. Edit the module's crop, resize or
# caption, run again, and the old pictures come, without a word. load_from_cache_file=False runs the new code.
#
# $ bash findings/dataset_map_of_old_code.sh    # maps with +1, edits it to +100, maps again; fails if that changes
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check datasets==5.2.0
cat > "$work/map.py" <<'PY'
import sys
from datasets import load_dataset
import steps

def in_the_script(row):
    return {"x": row["x"] + ADDED}

def calls_the_module(row):
    return {"x": steps.add(row)["x"]}

ADDED = int(sys.argv[1])
rows = load_dataset("json", data_files="rows.jsonl", split="train", cache_dir="cache")
print(f"the code says {steps.add({'x': 0})['x']}:", "in the script", *rows.map(in_the_script)["x"],
      "| calls the module", *rows.map(calls_the_module)["x"], "| in the module", *rows.map(steps.add)["x"],
      "| not from the cache", *rows.map(steps.add, load_from_cache_file=False)["x"])
PY
cd "$work"
export HF_HOME="$work/home" HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
echo '{"x": 0}' > rows.jsonl
for added in 1 100; do
    printf 'def add(row):\n    return {"x": row["x"] + %s}\n' "$added" > steps.py
    "$work/venv/bin/python" map.py "$added" 2> "$work/words.txt" | tee -a "$work/found.txt"
done
diff "$work/found.txt" - <<'SEEN'
the code says 1: in the script 1 | calls the module 1 | in the module 1 | not from the cache 1
the code says 100: in the script 100 | calls the module 1 | in the module 1 | not from the cache 100
SEEN
