"""
What is hashed is what is used. A key or a checkpoint names a model and its LoRAs by hashes of their files. Such a file
is hashed before it is read, and once more when it is in memory: people copy the next checkpoint over a LoRA, or update
a model, while an hour of pictures is encoded. (Not seen is a file that is replaced, and put back, within the seconds in
which it is read.)
"""
from common import InputError

SMALL = 2**30 # bytes of a model whose weights are copied


def look_at(places, look, *more):
    """-> {file or folder: look(place, *more), a hash}, for refuse_changes."""
    seen = {}
    for place in places:
        try:
            seen[place] = look(place, *more)
        except OSError as e:
            raise InputError(f"{e.filename or place}: cannot be read ({e.strerror}); run the same command again")
    return seen


def look_at_encoders(folder, hash_part, cache_dir):
    """-> {"vae" or "text": look_at of all that decides what this encoder of a model computes}. A model_index.json names
    the pipeline's class."""
    parts = dict(vae=["vae"], text=["text_encoder", "tokenizer", "processor"])
    return {encoder: look_at([folder / name for name in ["model_index.json", *names]], hash_part, cache_dir)
            for encoder, names in parts.items()}


def refuse_changes(seen, look, *more):
    """InputError for a file or folder that is no longer what look_at has seen before it was read, or is gone. The
    second look of cache.hash_part costs the stamps of the files, as extras/known.py remembers what it has read."""
    for place, before in seen.items():
        try:
            same = look(place, *more) == before
        except OSError: # it is gone
            same = False
        if not same:
            raise InputError(f"{place}: has changed since it was looked at; run the same command again")


def unmap(model):
    """-> the model, whose weights no longer lie in its files, if it is small. safetensors maps files into memory, so a
    file that is written over later, in place, would change the weights of a process at work, or end it by SIGBUS. What
    remains: the text encoder and the transformer of the real model, 16 and 41 GB, are mapped until they are copied to
    their device, and as long as the process lives if that is the CPU (and --dtype is the files')."""
    weights = [weight for weight in [*model.parameters(), *model.buffers()] if weight.device.type == "cpu"]
    if sum(weight.nbytes for weight in weights) < SMALL:
        for weight in weights:
            weight.data = weight.data.clone()
    return model
