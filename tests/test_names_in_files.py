"""
What comes from elsewhere names no code: which modules are imported is said by our own code and by flags; a folder that
stands beside the scripts, in the current folder or on PYTHONPATH is not taken for one of our modules; and every place
where a text could become code is listed here.
"""
import ast
import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.harness import HERE, TINY

# ---- folders that are called as modules are --------------------------------------------------------------------------

OURS = "cache common train predict rope_patch library training tools".split()
OTHERS = "pillow_heif yaml torch bitsandbytes wandb tensorboard pyarrow diffusers json flash_attn_interface".split()

def add_packages(folder, names, marker):
    """Each of these packages notes in the file `marker` that it was imported."""
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "__init__.py").write_text(f"open({str(marker)!r}, 'a').write(__file__ + '\\n')\n", "utf-8")

@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the project with a person's own mine.py; beside it folders with a stranger's packages, and links."""
    top = tmp_path_factory.mktemp("strangers")
    root, marker = top / "project", top / "marker"
    for path in [*HERE.glob("*.py"), *HERE.glob("library/**/*.py"), *HERE.glob("training/*.py"), *HERE.glob("tools/*")]:
        (root / path.relative_to(HERE)).parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            shutil.copy(path, root / path.relative_to(HERE))
    shutil.copytree(TINY, root / "tiny")
    add_packages(top / "elsewhere", OURS + ["tests"], marker)
    add_packages(top / "data", OURS + OTHERS, marker)
    (top / "link").symlink_to(root)
    (top / "started.py").symlink_to(root / "train.py")
    names = OTHERS[:-1]
    (root / "mine.py").write_text(
        "import json, torch\nfrom importlib.util import find_spec\n"
        f"print('FOUND', json.dumps({{name: str(find_spec(name) and find_spec(name).origin) for name in {names}}}))\n"
        "class Noisy(torch.optim.SGD): pass\n"
        "from training import plan\nplan.step_bytes = lambda *_, **__: 0 # it would count for seconds\n", "utf-8")
    return root, top, marker

def python(top, command, folder, **env):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"} | env
    return subprocess.run([sys.executable, *map(str, command)], cwd=folder, env=env, capture_output=True,
                          encoding="utf-8")

@pytest.mark.parametrize("script, folder, env", [
    ("project/cache.py", "project", {}), ("project/train.py", "data", {}), ("project/predict.py", "project", {}),
    ("link/cache.py", "data", {"PYTHONSAFEPATH": "1"}), ("started.py", "elsewhere", {}),
    ("project/predict.py", "elsewhere", {"PYTHONPATH": "elsewhere"}),
    ("project/tools/doctor.py", "project", {"PYTHONPATH": "elsewhere"}),
    ("project/tools/page.py", "data", {"PYTHONSAFEPATH": "1", "PYTHONPATH": "elsewhere"}),
    ("project/cache.py", "data", {"PYTHONPATH": "link"})])
def test_a_script_imports_our_modules_whatever_stands_around_it(place, script, folder, env):
    """Through a link, from another folder, in safe mode, and where PYTHONPATH leads to a package of the same name."""
    root, top, marker = place
    env = {key: str(top / value) if key == "PYTHONPATH" else value for key, value in env.items()}
    result = python(top, [top / script, "-h"], top / folder, **env)
    assert result.returncode == 0 and "usage: " in result.stdout, result.stderr
    assert not marker.exists(), marker.read_text("utf-8")

@pytest.mark.parametrize("script", ["cache.py", "train.py", "predict.py", "tools/page.py", "tools/import_data.py"])
@pytest.mark.parametrize("names", [["cache"], ["train"], ["common"], OTHERS, sorted(sys.stdlib_module_names)],
                         ids=["ours", "ours, empty", "the ground", "packages", "the standard library"])
def test_a_package_beside_our_scripts_is_one_line(place, script, names):
    """Nothing of it is imported first, whatever it is called. One that is called like a script of ours is none yet
    where it is empty: it would get an __init__.py with a stranger's next file."""
    root, top, marker = place
    add_packages(root, names, marker)
    if names == ["train"]:
        (root / "train/__init__.py").unlink()
    try:
        result = python(top, [root / script, "-h"], root)
    finally:
        for name in names:
            shutil.rmtree(root / name)
    assert not marker.exists(), marker.read_text("utf-8")
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith(f"error: {root / min(names)}: ") and "; " in result.stderr

@pytest.mark.parametrize("flag", ["--cache_dir", "--out_dir"])
def test_a_flag_makes_no_such_folder(place, flag):
    """Or the next start would be refused."""
    root, top, marker = place
    result = python(top, [root / "train.py", flag, root / "predict"], top)
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr
    assert "is called like our predict.py; give this folder another name" in result.stderr
    assert not (root / "predict").exists()

def test_a_whole_start_takes_no_folder_for_a_package_and_a_persons_own_module_is_found(place):
    """All libraries are imported; folders of pictures may be called as these are."""
    root, top, marker = place
    for name in OTHERS:
        (root / name).mkdir()
    flags = ["--plan", "--optimizer", "mine.Noisy", "--max_steps", 1, "--cache_dir", root / "encoded"]
    result = python(top, [root / "train.py", *flags], root)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.split("FOUND ")[1].splitlines()[0])
    assert found["torch"].endswith("torch/__init__.py") and str(top) not in json.dumps(found)

# ---- places where a text becomes code, or a name ---------------------------------------------------------------------

# calls by the end of what is called
FOUND_BY_NAME = {"locate", "import_module", "__import__", "find_spec", "spec_from_file_location", "run_path",
                 "run_module"}
READ_BY_LIBRARIES = {"from_pretrained", "from_config", "_from_config", "load_config", "from_single_file"}
BUILT_IN = {"eval", "exec", "compile", "globals", "locals"} # not the method of something, as model.eval()
FIELDS = {"getattr", "setattr", "delattr", "hasattr"}
WHOLE = {"torch.load", "numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system",
         "os.popen", "os.execv", "os.spawnv", "Template", "string.Template"}
MODULES = {"pickle", "marshal", "shelve", "dill", "joblib", "jinja2", "cloudpickle"}
HIDDEN = {"__dict__", "__globals__", "__subclasses__", "__builtins__", "__reduce__", "__code__"}

def is_constant(node):
    """A text that stands here, or a constant of the module, by its capitals."""
    return isinstance(node, ast.Constant) or isinstance(node, ast.Name) and node.id.isupper()

def what_decides(node):
    """The part of a node by which a text becomes code or a name: an ast node; None if it does no such thing."""
    if isinstance(node, ast.Attribute) and node.attr in HIDDEN:
        return node
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod): # of numbers it is arithmetic
        is_text = isinstance(node.left, ast.JoinedStr) or isinstance(getattr(node.left, "value", None), str)
        return node if is_text or isinstance(node.right, (ast.Tuple, ast.Dict)) else None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return node if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "vars" else None
    if not isinstance(node, ast.Call):
        return None
    called, args = ast.unparse(node.func), node.args or [node]
    end = node.func.attr if isinstance(node.func, ast.Attribute) else called
    if end in FOUND_BY_NAME or called in BUILT_IN or called in WHOLE or called.startswith("subprocess."):
        return args[0]
    keywords = {keyword.arg for keyword in node.keywords}
    if end in READ_BY_LIBRARIES or keywords & {"trust_remote_code", "allow_pickle"}:
        return args[0]
    if called == "patch.dict":
        return args[0]
    if called in FIELDS and not is_constant(args[1]):
        return args[1]
    if end in ("format", "format_map") and not is_constant(node.func.value):
        return node.func.value
    if called == f"re.{end}" and end != "escape" and not is_constant(args[0]):
        return args[0]

def places_in(source):
    """Yields (function, what is called there with the deciding part of it) of a module's source."""
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)} # such as locate, of paths

    def walk(node, function):
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else function
            decides = what_decides(child)
            called = ast.unparse(child.func) if isinstance(child, ast.Call) else type(child).__name__
            if decides is not None and called not in own:
                yield function, f"{called}({ast.unparse(decides)})"
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in child.names] + [getattr(child, "module", None) or ""]
                for name in MODULES & {name.split(".")[0] for name in names}:
                    yield function, f"import {name}"
            yield from walk(child, inner)
    yield from walk(tree, "")

FLAG = "a flag, by its choices or by the person who gave it"
OWN = "a constant, or a table of ours"
FILES = "our class; code in the folder is never taken; library/models/model_files.py has checked its JSON files"
# {file: {function, or "" for the script itself: {call: why no file can say what it names}}}
ALLOWED = {
    "cache.py": {
        "load_pipeline": {"Qwen2VLImageProcessorPil.from_pretrained(folder)": FILES,
                          "DiffusionPipeline.from_pretrained(folder)": "two names of classes, compared before"},
        "load_part": {"cls.from_pretrained(folder)": FILES, "getattr(dtype)": FLAG},
        "prompt_length": {"pipe.prompt_template_encode.format(pipe.prompt_template_encode)": "of stock's class"},
        "plan_training": {"getattr(name)": OWN}},
    "common.py": {
        "__getattr__": {"getattr(name)": "stands for a stream: what Python code asks of it"},
        "catch_signals": {"getattr(name)": OWN},
        "fold": {"re.sub(f'(?<!\\\\w){re.escape(path.stem)}(?=\\\\.\\\\w)')": "escaped"},
        "make_streams_printable": {"getattr(name)": OWN, "setattr(name)": OWN},
        "refuse_to_replace": {"re.search(mark)": OWN}},
    "predict.py": {
        "load_transformer": {"getattr(dtype)": FLAG},
        "check_fit": {"getattr(side)": OWN},
        "make_schedule": {"FlowMatchEulerDiscreteScheduler.from_config(config)": FILES},
        "find_geometry": {"getattr(name)": "of a LoRA's geometry only the three names above"},
        "complete_settings": {"getattr(name)": OWN}},
    "rope_patch.py": {"patch_qwen_forward_for_multi_resolution": {"Attribute(m.__dict__)": "is looked at"},
                      "patch_qwen_model_for_multi_resolution": {
        "Attribute(processor.__dict__)": "of an object of stock's",
        "Attribute(block.attn.processor.__dict__)": "of an object of stock's"}},
    "train.py": {
        "": {"getattr(args.dtype)": FLAG,
             "FlowMatchEulerDiscreteScheduler.from_pretrained(model_folder / 'scheduler')": FILES}},
    "library/models/model_files.py": {
        "empty_model": {"cls.from_config(cls.load_config(folder))": FILES, "cls.load_config(folder)": FILES,
                        "cls._from_config(cls.config_class.from_pretrained(folder))": FILES,
                        "cls.config_class.from_pretrained(folder)": FILES},
        "try_schedule": {"FlowMatchEulerDiscreteScheduler.from_config(content)": FILES}},
    "library/models/devices.py": {"find_devices": {"setattr(name)": "names of flags"},
                                  "find_flash": {"find_spec(package)": OWN}},
    "tools/convert_lora.py": {"left_out": {"re.match(LEFT_OUT[to])": OWN}},
    "library/files/tensor_files.py": {"family_of": {"re.search(pattern)": OWN}},
    "library/cli/command_line.py": {"parse_args": {"find_spec(PACKAGES[value])": OWN, "getattr(flag)": OWN}},
    "library/lora/lora_paths.py": {"numbered": {"re.fullmatch(re.escape(name) + '-\\\\d{1,12}')": "escaped"}},
    "library/lora/foreign_loras.py": {"group_by_layer": {"re.search(pattern)": OWN}},
    "library/lora/peft_config.py": {
        "read_patterns": {"re.compile(f'(.*\\\\.)?({pattern})$')": "of PATTERN's parts only"}},
    "library/data/index_file.py": {"": {
        r"re.compile(b'(?=.{1,3000}\\Z)(?![A-Za-z]:)' + PART + b'([/\\\\]' + PART + b')*')": OWN}},
    "library/data/sample_checks.py": {"distilled": {"getattr(flag)": OWN}},
    "library/models/offloading.py": {"copy_ahead": {"getattr(device.type)": FLAG}},
    "training/optimizers.py": {
        "find_optimizer": {"locate(args.optimizer)": "--optimizer"}},
    "training/plan.py": {
        "stand_in": {"getattr(flag)": OWN, "setattr(flag)": OWN},
        "step_bytes": {"patch.dict(vars(rope_patch))": OWN, "patch.dict(vars(quantization))": OWN}},
    "library/models/quantization.py": {"quantize_linears": {"getattr(child)": "of a model's modules",
                                                "setattr(child)": "of a model's modules"}},
    "library/models/picture_vae.py": {"call": {"getattr(method)": OWN},
                                      "patch_vae_for_pictures": {"setattr(method)": OWN}},
    "library/models/one_file.py": {
        "refuse_format": {"re.search(pattern)": OWN},
        "attach": {"setattr(name)": "of a model's parameters"}},
    "tiny/make_data.py": {"numbered": {"form.format(form)": OWN}},
    "tiny/make_tiny.py": {"": {
        "AutoencoderKLQwenImage.from_pretrained(f'{args.out}/vae')": "a developer's own",
        "QwenImageTransformer2DModel.from_pretrained(f'{args.out}/transformer')": "a developer's own"}},
    "tools/bench.py": {"": {"getattr(args.dtype or ('bfloat16' if on_card else 'float32'))": FLAG}},
    "tools/bench_common.py": {"make_model": {"setattr(name)": "of a model's parameters"}},
    "tools/gpu_check.py": {"claims": {"subprocess.Popen([sys.executable, *command, args.device])":
                                      "our tests, with the tool's own flag"}},
    "tools/import_configs.py": {"parse": {"yaml.load(text)": "a BaseLoader, which makes texts"}},
    "tools/lean_train.py": {"": {
        "FlowMatchEulerDiscreteScheduler.from_pretrained(model_folder / 'scheduler')": FILES,
        "getattr(args.dtype)": FLAG, "locate(args.optimizer)": "--optimizer, as in train.py",
        "torch.load(io.BytesIO(tensors['optimizer'].numpy()))": "weights_only: plain values and tensors"}},
}

def test_every_place_where_a_text_becomes_code_or_a_name_is_known():
    """And what it names is never what a file says. A new place fails here: see to it that no file can say what it
    names, then list it with half a line why."""
    found, known = set(), set()
    for pattern in ("*.py", "library/**/*.py", "training/*.py", "tools/*.py", "tiny/*.py"):
        for path in HERE.glob(pattern):
            if path.name not in ("conftest.py", "test_consistency.py"):
                found |= {(path.relative_to(HERE).as_posix(), *place) for place in places_in(path.read_text("utf-8"))}
    for file, functions in ALLOWED.items():
        known |= {(file, function, call) for function, calls in functions.items() for call in calls}
    assert not found - known, "\n".join(f"{file}, {function or 'the script'}: {call}: can a file say what this names? "
                                        "If not, list it in ALLOWED" for file, function, call in sorted(found - known))
    assert not known - found, f"no longer there; take it out of ALLOWED: {sorted(known - found)}"

@pytest.mark.parametrize("line", [
    "pydoc.locate(kind)(made)", "importlib.import_module(name)", "__import__(name)", "eval(text)", "exec(text)",
    "getattr(module, name)", "setattr(x, f'{name}', 1)", "text.format(**values)", "(a + b).format(c)",
    "text.format_map(x)", "text % (a, b)", "f'{a}' % b", "'{}' % name", "pickle.loads(data)\nimport pickle",
    "from jinja2 import Template",
    "torch.load(file)", "np.load(file, allow_pickle=True)", "yaml.load(text, L)", "re.search(pattern, text)",
    "re.compile(f'{a}+')", "subprocess.run(command)", "os.system(text)", "runpy.run_path(path)",
    "cls.from_pretrained(x)", "g(x, trust_remote_code=True)", "vars(args)[name] = 1", "x.__dict__.update(y)",
    "globals()[name]",
    "find_spec(name)", "cls.from_config(fields)", "string.Template(text)", "patch.dict(vars(x), y)"])
def test_such_a_place_would_be_found(line):
    """Each kind is seen, also within a function."""
    assert list(places_in(line)) and list(places_in("def f():\n    " + line.replace("\n", "\n    ")))
