"""
What is hashed is what is used. A key or a checkpoint names a model and its LoRAs by hashes of their files. Such a file
is hashed before it is read, and once more when it is in memory: people copy the next checkpoint over a LoRA, or update
a model, while an hour of pictures is encoded. (Not seen is a file that is replaced, and put back, before the second
look.) As extras/known.py remembers hashes, the second look at a model reads no file that is older than two seconds.
"""
import common
from common import InputError

SMALL = 2**30 # bytes of a model whose weights are copied


def refuse_replaced(places, hashes, look):
    """InputError for a file or folder, as this process finds it, of which look() gives another hash than it has given
    before the file was read: maybe on the first process, whose machine can have the same file elsewhere."""
    for place, before in zip(places, hashes):
        if look(place) != before:
            elsewhere = ", or the first process has another one" if common.world() > 1 else ""
            raise InputError(f"{place}: has changed since it was looked at{elsewhere}; run the same command again")


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
