"""
What a LoRA says of the model that it was trained on, and a line where it is used on another one.

A difference is no error, as mixing may be wanted: a LoRA of -2509 on a merged model, or on a copy in fewer bits. Files
of other programs say nothing, but for musubi-tuner's.
"""
from common import warn_once
from library.models import model_files

PIPELINES = dict(QwenImageEditPipeline="v1", QwenImageEditPlusPipeline="Plus")
# modelspec.architecture of musubi-tuner: the pipeline, and whether it is a 2511
ARCHITECTURES = {"Qwen-Image-Edit": ("QwenImageEditPipeline", False),
                 "Qwen-Image-Edit-Plus": ("QwenImageEditPlusPipeline", False),
                 "Qwen-Image-Edit-2511": ("QwenImageEditPlusPipeline", True)}


def base_of(model, transformer, folder, transformer_folder, model_hash):
    """-> what a LoRA's file says of its base: the flags --model and --transformer, the pipeline's class, whether the
    transformer is that of a 2511, and the hash of its weights (if cache.hash_part changes, this wants another name, as
    what older files have would differ). The folders are --model's, and find_transformer's."""
    files = folder / "model_index.json", transformer_folder / "transformer/config.json"
    index, config = map(model_files.read_json, files)
    named = dict(model=model, transformer=transformer) if transformer else dict(model=model)
    return named | dict(pipeline=index["_class_name"], zero_cond_t=bool(config.get("zero_cond_t")),
                        model_hash=model_hash)


def warn_other_base(loras, here, geometry=None):
    """A line for each lora_file.Lora that was trained on another base than is used here, or else at other sizes, as far
    as it tells. here: base_of's; geometry: predict.find_geometry's, or None where sizes do not count."""
    for lora in loras:
        trained = training_of(lora)
        # what is not told is taken to be the same
        kind = {name: trained.get(name, here[name]) for name in ("pipeline", "zero_cond_t")}
        weights, sizes = trained.get("model_hash"), geometry and other_sizes(trained, geometry)
        if kind != {name: here[name] for name in kind}:
            warn_once(f"warning: {lora.path}: was trained on {name_of(trained | kind)}; here is {name_of(here)}, which "
                      "gets its pictures, or their noise level, in another way, so the LoRA may do less, or something "
                      "else")
        elif weights and weights != here["model_hash"]:
            warn_once(f"warning: {lora.path}: was trained on {name_of(trained | kind)}; here is {name_of(here)}, whose "
                      "weights are others: a copy in fewer bits is fine, and a merged or trained one may want another "
                      "strength")
        elif sizes:
            warn_once(f"warning: {lora.path}: was trained at {sizes}; the flags win, and without them the first LoRA's "
                      "sizes are used")


def training_of(lora):
    """-> what a LoRA tells of its training: base_of's entries, geometry and areas, as far as they are of the right
    kind: a foreign header may hold anything."""
    notes = lora.header.get("__metadata__") or {}
    architecture = ARCHITECTURES.get(notes.get("modelspec.architecture", "").removesuffix("/lora"))
    if architecture:
        return dict(zip(("pipeline", "zero_cond_t"), architecture))
    kinds = dict(model=str, transformer=str, pipeline=str, zero_cond_t=bool, model_hash=str, geometry=dict, areas=list)
    return {name: lora.meta[f"train.{name}"] for name, kind in kinds.items()
            if isinstance(lora.meta.get(f"train.{name}"), kind)}


def name_of(base):
    """A model in words: its name, and which of the pipelines it has."""
    kind = "2511" if base["zero_cond_t"] else PIPELINES.get(base["pipeline"], base["pipeline"])
    return f"{base.get('transformer') or base.get('model') or 'another model':.200} ({kind:.40})"


def other_sizes(trained, geometry):
    """-> in words, at which sizes a LoRA was trained, and those of this command, if they differ; or ""."""
    here = geometry | dict(target_pixels=geometry["target_pixels"][0])
    if here["target_pixels"] in trained.get("areas", []): # of which the geometry tells the first
        del here["target_pixels"]
    before = here | trained.get("geometry", {})
    return "; at ".join(f"{name} {before[name]}, and here it is {value}" for name, value in here.items()
                        if before[name] != value)
