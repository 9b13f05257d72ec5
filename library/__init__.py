"""
The rooms of the program, from the ground up: files, models, cli, data, lora, results. training/ stands above them.

Python looks for a module in the project's folder first. A folder there that is named like one of our files, or that
holds an __init__.py, such as a dataset from a stranger, could be imported in place of our file or of an installed
package. So every script imports from this package before anything else, and such a folder ends it. code_hash is also
here, as nothing stands below.
"""
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
PACKAGES = ("library", "training", "tools", "tests") # the folders of ROOT that may be imported

def refuse_package(folder):
    """Ends the script if this folder of ROOT could be imported in place of a file of ours or of a package. It uses
    nothing but os and sys, as any other import could find such a folder."""
    name = os.path.basename(folder)
    if os.path.isfile(f"{folder}.py"):
        sys.exit(f"error: {folder}: is called like our {name}.py; give this folder another name")
    if os.path.isfile(os.path.join(folder, "__init__.py")):
        sys.exit(f"error: {folder}: Python could import it in place of an installed package; move it elsewhere (or, if "
                 "it is a package of your own, add its name to PACKAGES in library/__init__.py)")

# the code that makes an encoded file
ENCODING = ["cache.py", "library/data/picture_files.py", "library/data/automatic_mask.py",
            "library/models/picture_vae.py", "library/models/one_pass.py"]

def code_hash(files):
    """A hash of the bytes of these files, paths in ROOT: a result's key has that of the code which draws it, an encoded
    file that of the code which has made it."""
    import hashlib # here, as nothing but os and sys is imported before such a folder is refused
    digest = hashlib.sha256()
    for file in files:
        with open(os.path.join(ROOT, file), "rb") as f:
            digest.update(f.read())
    return digest.hexdigest()[:12]

for name in sorted({*os.listdir(ROOT)} - {*PACKAGES}):
    if os.path.isdir(os.path.join(ROOT, name)):
        refuse_package(os.path.join(ROOT, name))
