"""
--lora_args: whatever peft.LoraConfig takes, as long as the LoRA's file says all that is trained.

A file has the matrices A and B of each layer, for y = W x + (alpha / rank) B A x, on the base as it was published. peft
can do more: change W when a LoRA is added, train other weights, compute other formulas. It has a field for each, and
new ones in each version, so no list of forbidden names is kept here: the LoRA is added, and looked at.
"""
import contextlib

import torch
from diffusers import QwenImageTransformer2DModel
from peft import get_peft_model_state_dict
from peft.tuners.lora import LoraConfig, LoraLayer

from common import InputError
from extras import lora_files

ENDS = (".lora_A.weight", ".lora_B.weight") # of the names in a LoRA's file
# arguments that name layers, which the small transformer may lack, or that have a value of their own there
BY_LAYER = ("target_modules exclude_modules rank_pattern alpha_pattern layers_to_transform layers_pattern r lora_alpha "
            "init_lora_weights").split()


def try_out(lora_args, add_lora):
    """Adds such a LoRA to a small random transformer, before anything slow. InputError if its file would not be what
    was trained, or if an argument does nothing. add_lora: predict.py's."""
    for key, value in lora_args.items():
        default = getattr(LoraConfig(), key, None)
        if isinstance(default, bool) and not isinstance(value, bool) and key != "init_lora_weights":
            raise InputError(f"--lora_args {key}={value}: is neither true nor false; any text would count as true")
    for key in lora_files.PATTERN_FIELDS: # the file will have them, and must be read again
        try:
            lora_files.read_patterns(lora_args.get(key), key)
        except ValueError as e:
            raise InputError(f"--lora_args: {e}; give layers by the ends of their names, such as attn.to_q")
    model, weights = added(lora_args, add_lora)
    if model is None: # peft refuses it here, and will refuse it, in its own words, on the real model
        return
    refuse(model, weights, lora_args)
    for key, value in lora_args.items():
        without = {k: v for k, v in lora_args.items() if k != key}
        others = []
        if key == "init_lora_weights" and isinstance(value, str):
            # peft leaves an initialization from gradients or activations to a call of its own, which nobody makes here
            others = [without | {key: True}, without | {key: False}]
        elif key not in BY_LAYER and value != getattr(LoraConfig(), key):
            others = [without]
        for other in others:
            other_model, _ = added(other, add_lora)
            if other_model is not None and describe(model) == describe(other_model):
                raise InputError(f"--lora_args {key}={value}: has no effect here, as it needs data or a model that it "
                                 "does not get; leave it out")


def added(lora_args, add_lora):
    """-> (a small transformer with such a LoRA, {name: weight} of that transformer before); None twice if peft
    refuses."""
    torch.manual_seed(0)
    model = QwenImageTransformer2DModel(num_layers=2, num_attention_heads=2, attention_head_dim=32, in_channels=64,
                                        joint_attention_dim=32, axes_dims_rope=(8, 12, 12)).requires_grad_(False)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    config = dict(r=8, lora_alpha=8, init_lora_weights="gaussian", target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    with contextlib.suppress(Exception): # whatever peft raises
        add_lora(model, **config | lora_args)
        return model, weights
    return None, None


def describe(model):
    """-> what two equal LoRAs have in common: modules, scales, and the matrices A."""
    scales = [module.scaling for module in model.modules() if isinstance(module, LoraLayer)]
    matrices = [tensor.tolist() for name, tensor in get_peft_model_state_dict(model).items() if name.endswith(ENDS[0])]
    return repr(model), scales, matrices


def refuse(model, weights, lora_args):
    """InputError unless the file of this model's LoRA says all that is trained. weights: {name: weight} of the base
    before, to the bit; empty if they are not loaded yet."""
    # a layer of another class, or with a variant (DoRA, aLoRA, ...), computes something else
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    odd = {type(layer).__name__ for layer in layers if type(layer).__name__ != "LoraLinear"}
    for layer in layers:
        odd |= {type(variant).__name__ for variant in layer.lora_variant.values()}
    if odd:
        raise InputError(f"--lora_args: {', '.join(sorted(odd))} is no plain LoRA, and ComfyUI and diffusers would "
                         f"compute something else from its file; leave out what asks for it ({', '.join(lora_args)})")
    # by name and place in memory: modules_to_save and others train copies
    trained = {(name.replace(".default.", "."), p.data_ptr()) for name, p in model.named_parameters()
               if p.requires_grad}
    kept = {(name, tensor.data_ptr()) for name, tensor in get_peft_model_state_dict(model).items()}
    wrong = {name for name, _ in trained ^ kept} | {name for name, _ in kept if not name.endswith(ENDS)}
    if wrong:
        raise InputError(f"--lora_args: a LoRA's file holds the matrices A and B, and all of them are trained; this is "
                         f"not so for {len(wrong)} tensors, for instance {min(wrong)}; leave out bias, lora_bias, "
                         "modules_to_save, or what else asks for them")
    now = {name.replace(".base_layer.", "."): p for name, p in model.named_parameters()}
    changed = [name for name, p in weights.items() if name not in now or not torch.equal(now[name], p)]
    if changed:
        raise InputError(f"--lora_args: changes {len(changed)} of the base model's {len(weights)} weights, for "
                         f"instance {changed[0]}, which a LoRA's file cannot hold; give another init_lora_weights")


def refuse_added(model, load, lora_args):
    """As `refuse`, for the model that will be trained; and an entry of rank_pattern, alpha_pattern or
    layers_to_transform that fits no layer, which peft would ignore. load(): the transformer without a LoRA. Its files
    are mapped into memory, so this reads all of them once, which placing the model would do next."""
    # weights on the meta device (--plan), and those that one file fills in later, say nothing
    weights = {name: p for name, p in load().named_parameters() if p.untyped_storage().nbytes() >= p.nbytes}
    refuse(model, {} if model.device.type == "meta" else weights, lora_args)
    names = {name.rsplit(".lora_", 1)[0] for name in get_peft_model_state_dict(model)}
    config = model.peft_config["default"]
    blocks = config.layers_to_transform # None, a number or a list
    for block in [blocks] if isinstance(blocks, int) else blocks or []:
        if not any(f"blocks.{block}." in name for name in names):
            raise InputError(f"--lora_args layers_to_transform: no layer of this LoRA is in a block {block}; there are "
                             f"{', '.join(sorted(names)[:4])} ...")
    for field in lora_files.PATTERN_FIELDS:
        patterns = getattr(config, field)
        for pattern, (regex, _) in zip(patterns, lora_files.read_patterns(patterns, field)):
            if not any(map(regex.match, names)):
                raise InputError(f"--lora_args {field}: no layer of this LoRA is named {pattern}; there are "
                                 f"{', '.join(sorted(names)[:4])} ...")
