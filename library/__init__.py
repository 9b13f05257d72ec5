"""
Rooms of the program that a first reader can leave closed: what one flag switches on, in a file of that flag's name,
what foreign formats need, further parts of train.py and predict.py, and what keeps their results true: which names are
taken, which pictures are finished, which files, or which code, have changed.

Every script imports this package before anything else. From then on a module of ours is ours, whatever stands beside
it: Python would take a folder cache/ that holds an __init__.py, such as a cache from a stranger, for cache.py, and a
folder pillow_heif/ for the package of that name.
"""
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
# what is imported now must not be found in ROOT either
searched = list(sys.path)
sys.path[:] = [folder for folder in searched if os.path.realpath(folder or os.curdir) != ROOT]
from importlib.machinery import FileFinder, SourceFileLoader
from importlib.util import spec_from_file_location
sys.path[:] = searched

PACKAGES = {"library", "training", "tools", "tests"} # the folders of ROOT that may be imported


class OurFolder(FileFinder): # a class because Python's imports ask it: docs.python.org/3/reference/import.html
    """Finds NAME.py in ROOT, one that you have added too, and the PACKAGES. All other folders there are data."""

    def find_spec(self, name, target=None):
        if name in PACKAGES:
            return super().find_spec(name, target)
        file = os.path.join(ROOT, f"{name}.py")
        return spec_from_file_location(name, file) if os.path.isfile(file) else None


def find_ours(folder):
    """An entry of sys.path_hooks: who finds modules in this folder of sys.path."""
    if os.path.realpath(folder or os.curdir) != ROOT:
        raise ImportError # another folder: ask the next entry
    return OurFolder(folder, (SourceFileLoader, [".py"]))


if find_ours not in sys.path_hooks:
    sys.path_hooks.insert(0, find_ours)
    sys.path_importer_cache.clear() # it remembers who found modules there before
