"""
Counts the files in a cache folder that no index there lists, i.e. that no dataset needs; --delete deletes them.
cache.py and train.py keep such files, so that you can return to earlier flags or samples without encoding them again.
predict.py's files are among them: it writes no index, and encodes again what is missing. What a script is about to
encode, or reads while it trains or generates, is left alone: .planned-TOKEN lists it, also that of a script that was
killed.

$ python tools/prune.py encoded
$ python tools/prune.py encoded --delete
"""
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import library # first, so that no other folder is taken for one of our modules
import common
from library.cli import command_line
from library.data import index_file
from library.files import disk, stray_files

DIGIT = "[0-9a-f]" # for glob

def is_file(path):
    """Whether it is a file, or a link, which is deleted itself. A folder of such a name is none of ours."""
    return path.is_file() or path.is_symlink()

def main():
    parser = command_line.Parser(__doc__)
    parser.add_argument("cache_dir", type=Path, help="cache.py's --cache_dir")
    parser.group("flags")("--delete", False, "delete these files")
    args = parser.parse_args()
    if not (args.cache_dir / "latents").is_dir():
        meant = "give cache.py's --cache_dir" if args.cache_dir.exists() else stray_files.near_path(args.cache_dir)
        raise common.InputError(f"{args.cache_dir}: not a cache folder, as it has no latents/; {meant}")
    import cache # takes seconds; a slip does not need it
    lists, plans = [list(args.cache_dir.glob(pattern)) for pattern in ("*.json", ".planned-*")]
    folders = [args.cache_dir / name for name in ("latents", "text")]
    for place in (*folders, *lists, *plans): # a foreign cache does not choose what is deleted elsewhere
        stray_files.refuse_outside(place, args.cache_dir)
    known = {file for index in lists # an index that cannot be read ends the script here
             for sample in index_file.read_index(index)[0] for file in cache.files_of(sample)}
    kept = set() # of scripts at work, or killed
    for planned in plans: # (a list that an index has in it stays, too: while a run reads, that index may be replaced)
        lines = stray_files.read_text(planned, common.LONG_TEXT).splitlines()
        needed = {args.cache_dir / line for line in lines} - known
        kept |= needed
        if needed:
            common.tell(f"{planned}: lists what a script needs; if none is at work, and you will not start it again, "
                        "delete it")
    # only what is named like ours: 32 digits of a hash
    here = {file for folder in folders for file in folder.glob(f"{32 * DIGIT}.safetensors")}
    unknown = sorted(here - known - kept)
    # killed processes leave temporary files; a younger one may belong to a process that still runs
    unknown += [tmp for tmp in args.cache_dir.glob(f"**/.tmp-{16 * DIGIT}") # (which follows no link)
                if time.time() - tmp.lstat().st_mtime > 3600]
    unknown = list(filter(is_file, unknown))
    size = sum(file.lstat().st_size for file in unknown) / 1e9
    for file in unknown if args.delete else []:
        disk.delete(file, "belongs to no dataset", "mend that, and run again")
    what_next = ""
    if args.delete:
        what_next = "; deleted"
    elif unknown:
        what_next = "; --delete deletes them"
    common.tell(f"{args.cache_dir}: {len(unknown)} files, {size:.3f} GB, belong to no dataset{what_next}")

if __name__ == "__main__":
    main()
