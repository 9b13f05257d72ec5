"""
The floors of the house: imports point down only, those inside functions and names in texts too, and nothing imports in
a circle. design: components do not know each other more than they must; the scripts put them together.
"""
import ast
import re
import shutil

import pytest

from tests.harness import HERE

# From the ground up. A room may import what stands on a lower floor, and its neighbours, as long as that makes no
# circle.
FLOORS = [["common.py", "rope_patch.py"], ["library/__init__.py", "library/files/"], ["library/models/"],
          ["library/cli/"], ["library/data/"], ["library/lora/", "library/results/"], ["cache.py"], ["predict.py"],
          ["training/"], ["train.py"], ["tools/"]]
ALONE = ["rope_patch.py", "common.py"] # import nothing of ours: people copy the first, and all stand on the second
MOST_IMPORTS = 2.9 # of our own files, by the mean file of the program: less, not more, from here on

def rooms_of(root):
    """-> {dotted name: path} of all that FLOORS names."""
    rooms = {}
    for place in sum(FLOORS, []):
        for path in sorted((root / place).rglob("*.py")) if place.endswith("/") else [root / place]:
            name = path.relative_to(root).with_suffix("").as_posix().replace("/", ".")
            rooms[name.removesuffix(".__init__")] = path
    return rooms

def imports_of(path, rooms):
    """-> the rooms of ours that a file imports anywhere in it: inside functions, and as a text for import_module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            folder = path.parent.relative_to(HERE).as_posix().replace("/", ".") if node.level else None
            module = ".".join(part for part in (folder, node.module) if part)
            inner = {f"{module}.{alias.name}" for alias in node.names} & {*rooms}
            names |= inner or {module} # a room of a package, or a name of a room
        elif isinstance(node, ast.Call) and re.search("import", ast.unparse(node.func)):
            names |= {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    return {name for name in names if isinstance(name, str)} & {*rooms}

def floor_of(path, root):
    """The number of the floor on which a file stands."""
    name = path.relative_to(root).as_posix()
    for number, places in enumerate(FLOORS):
        if any(name == place or place.endswith("/") and name.startswith(place) for place in places):
            return number
    raise AssertionError(f"{name} stands on no floor")

def imports_up(root):
    """-> lines about imports of a higher floor."""
    rooms, wrong = rooms_of(root), []
    for name, path in rooms.items():
        for other in sorted(imports_of(path, rooms)):
            if floor_of(rooms[other], root) > floor_of(path, root):
                wrong.append(f"{name} -> {other}")
    return wrong

def circles(root):
    """-> lines about rooms that can reach themselves: whatever imports nothing that is left is taken away, until
    nothing changes. Importing a room of a package is no circle with that package."""
    rooms = rooms_of(root)
    left = {name: imports_of(path, rooms) - {name} for name, path in rooms.items()}
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    return [f"{name} -> {', '.join(sorted(needs & left.keys()))}" for name, needs in left.items()]

def test_every_room_stands_on_a_floor():
    """A new file belongs to one; a folder at the top that is not listed holds no program."""
    patterns = ("*.py", "library/**/*.py", "training/**/*.py", "tools/**/*.py")
    own = {path for pattern in patterns for path in HERE.glob(pattern)}
    assert own - {*rooms_of(HERE).values()} == {HERE / "test_consistency.py", HERE / "conftest.py"}

def test_imports_point_down_only():
    assert not imports_up(HERE)
    rooms = rooms_of(HERE)
    for name in ALONE:
        assert not imports_of(HERE / name, rooms), name

def test_nothing_imports_in_a_circle():
    assert not circles(HERE)

@pytest.mark.parametrize("file, line, wrong", [
    ("common.py", "from library.files import disk", "common -> library.files.disk"),
    ("library/cli/command_line.py", "def f():\n    import predict", "library.cli.command_line -> predict"),
    ("library/models/hub.py", "import importlib\nimportlib.import_module('training.resume')",
     "library.models.hub -> training.resume")])
def test_an_import_of_a_higher_floor_would_be_seen(tmp_path, monkeypatch, file, line, wrong):
    """At the top, in a function, and by a name in a text."""
    root = copy_of_house(tmp_path, monkeypatch)
    with open(root / file, "a", encoding="utf-8") as f:
        f.write(f"\n{line}\n")
    assert wrong in imports_up(root)

def test_a_circle_of_neighbours_would_be_seen(tmp_path, monkeypatch):
    """Also one that a function closes, and one that a relative import does."""
    for n, line in enumerate(["def f():\n    from library.data import dataset", "from . import dataset"]):
        root = copy_of_house(tmp_path / str(n), monkeypatch)
        with open(root / "library/data/picture_files.py", "a", encoding="utf-8") as f: # which dataset.py imports
            f.write(f"\n{line}\n")
        assert not imports_up(root) and any("picture_files -> " in line for line in circles(root))

def copy_of_house(folder, monkeypatch):
    for path in rooms_of(HERE).values():
        (folder / path.relative_to(HERE)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / path.relative_to(HERE))
    monkeypatch.setattr("tests.test_floors.HERE", folder)
    return folder

def test_components_hardly_know_each_other():
    """The mean number of our own files that a file of the program imports (lingua has 1.7, big_vision 1.0)."""
    rooms = {name: path for name, path in rooms_of(HERE).items() if not name.startswith("tools")}
    counts = {name: len(imports_of(path, rooms) - {name, "library"}) for name, path in rooms.items()}
    assert sum(counts.values()) / len(counts) <= MOST_IMPORTS, sorted(counts.items(), key=lambda item: -item[1])[:9]
