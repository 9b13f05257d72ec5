"""
Builds and loads guard.cpp. This file imports no torch: the guard has to be in the process before torch is.
"""
import ctypes
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

def torch_folder():
    return Path(find_spec("torch").origin).parent # of the package, which this does not import

def why_not():
    """-> why there can be no imitated card on this machine, or None."""
    if sys.platform != "linux":
        return "the guard is built for Linux"
    if Path("/dev/nvidiactl").exists():
        return "a real card is here, whose driver would answer in the place of the imitated one"
    if not shutil.which("g++"):
        return "no g++, which builds the guard"
    return None

def build(folder):
    """Compiles guard.cpp against the installed torch, into this folder -> the library's path. It takes 5 seconds."""
    torch, library = torch_folder(), Path(folder, "libguard.so")
    subprocess.run(["g++", "-shared", "-fPIC", "-std=c++20", Path(__file__).with_name("guard.cpp"), "-o", library,
                    f"-I{torch}/include", f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"],
                   check=True, capture_output=True, encoding="utf-8")
    return library

def load(library, cards):
    """The process has so many cards from now on, as far as torch's C++ asks. Call it before torch is imported."""
    if "torch" in sys.modules:
        raise ImportError("torch is imported already, and has looked for its CUDA hooks")
    guard = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    import torch # noqa: F401 (a CUDA build of it enters its own guard now, which ours replaces)
    guard.fake_card_install(cards)
