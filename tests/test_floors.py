"""
The floors of the house: imports point down only, those inside functions and names in texts too, and nothing imports in
a circle.
"""
import ast
import re

from tests.harness import HERE

# From the ground up. A room may import what stands on a lower floor, and its neighbours, as long as that makes no
# circle.
FLOORS = [["common.py", "rope_patch.py"], ["library/__init__.py", "library/files/"], ["library/models/"],
          ["library/cli/"], ["library/data/"], ["library/lora/", "library/results/"], ["cache.py"], ["predict.py"],
          ["training/"], ["train.py"], ["tools/"]]
ALONE = ["rope_patch.py", "common.py"] # import nothing of ours: people copy the first, and all stand on the second

def rooms():
    """-> {dotted name: (path, number of its floor)} of all that FLOORS names."""
    found = {}
    for number, places in enumerate(FLOORS):
        patterns = [f"{place}**/*.py" if place.endswith("/") else place for place in places]
        for path in [path for pattern in patterns for path in HERE.glob(pattern)]:
            name = path.relative_to(HERE).with_suffix("").as_posix().replace("/", ".")
            found[name.removesuffix(".__init__")] = path, number
    return found

ROOMS = rooms()

def imports_of(path):
    """-> the rooms of ours that a file imports anywhere in it: inside functions, and as a text for import_module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            folder = path.parent.relative_to(HERE).as_posix().replace("/", ".") if node.level else None
            module = ".".join(part for part in (folder, node.module) if part)
            inner = {f"{module}.{alias.name}" for alias in node.names} & {*ROOMS}
            names |= inner or {module} # a room of a package, or a name of a room
        elif isinstance(node, ast.Call) and re.search("import", ast.unparse(node.func)):
            names |= {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    return {name for name in names if isinstance(name, str)} & {*ROOMS}

def test_every_room_stands_on_a_floor():
    """A new file belongs to one; a folder at the top that is not listed holds no program."""
    patterns = ("*.py", "library/**/*.py", "training/**/*.py", "tools/**/*.py")
    own = {path for pattern in patterns for path in HERE.glob(pattern)}
    assert own - {path for path, _ in ROOMS.values()} == {HERE / "test_consistency.py", HERE / "conftest.py"}

def test_imports_point_down_only():
    for name, (path, floor) in ROOMS.items():
        assert not [other for other in imports_of(path) if ROOMS[other][1] > floor], name
    for name in ALONE:
        assert not imports_of(HERE / name), name

def test_nothing_imports_in_a_circle():
    """Whatever imports nothing that is left is taken away, until nothing changes. Importing a room of a package is no
    circle with that package."""
    left = {name: imports_of(path) - {name} for name, (path, _) in ROOMS.items()}
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    assert not left
