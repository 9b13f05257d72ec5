"""
GUIDE's table "A new model family" names every file that knows Qwen-Image-Edit, and no other.
"""
import ast
import re

from tests.harness import HERE

# what only this family has: names of its classes, versions, layers and config's fields; numbers of its tokens
WORDS = [r"Qwen[A-Z2-]", r"\b2509\b", r"\b2511\b", "zero_cond_t", "additional_t_cond", "is_plus", "prompt_template",
         "image_grid_thw", "transformer_blocks", r"add_[qkv]_proj|to_add_out", r"(img|txt)_(mod|mlp|in)\b", "norm_out",
         "proj_out", r"block\.attn\.", "inner_dim", "in_channels", "joint_attention_dim", r"\b3584\b", "latents_mean",
         "TABLE = 4096", r"16 \* (w|h|shapes)\b", r"// 16\b", r"side % 16", r"/ 32\) \* 32", r"rows, \[64\]"]

def code_of(text):
    """Source without comments and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str): # a text, and no more
            node.value.value = ""
    return ast.unparse(tree)

def code():
    """{file: its source without comments and docstrings} of all scripts."""
    files = [path for pattern in ("*.py", "library/**/*.py", "training/*.py", "tools/*.py", "tiny/*.py")
             for path in HERE.glob(pattern) if path.name not in ("test_consistency.py", "conftest.py")]
    return {path.relative_to(HERE).as_posix(): code_of(path.read_text("utf-8")) for path in files}

def table():
    """{file: the names of it that GUIDE's table has}."""
    section = (HERE / "GUIDE.md").read_text("utf-8").split("## A new model family")[1].split("\n## ")[0]
    named = {}
    for cell in re.findall(r"^\| .* \| (.*) \|$", section, re.M)[1:]:
        for part in cell.split("; "):
            place, *names = re.findall("`(.+?)`", part)
            if place.endswith("/"): # a folder, and files of it
                named |= {f"{place}{name}.py": [] for name in names}
            else:
                named.setdefault(place, []).extend(names)
    return named

def test_the_table_of_a_new_family_names_what_knows_qwen():
    texts, named = code(), table()
    named.pop("changes/flux2_pack.py") # an example
    knowing = {file for file, text in texts.items() if re.search("|".join(WORDS), text)}
    assert knowing == set(named), knowing ^ set(named)
    for file, names in named.items():
        for name in names:
            assert re.search(rf"^(def {name}\(|{name} = )", texts[file], re.M), f"{file}: {name}"

def test_each_of_these_words_is_in_use():
    """Or it was renamed, and the claim above no longer looks for it."""
    text = "\n".join(code().values())
    assert not [word for word in WORDS if not re.search(word, text)]
