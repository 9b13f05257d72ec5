"""
What is said of NaN and Inf in numbers that a model has computed: a picture of them would be black, and their mean would
rank a training's steps.
"""
import math

from common import InputError


def is_finite(tensor):
    """Whether it holds neither NaN nor Inf. It is copied to the CPU, which costs a GPU one wait and no kernels, and is
    read once (isfinite() takes 20 times as long, and knows no fp8). What has no floats, or is empty, or has no memory,
    holds none."""
    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
        return True
    tensor = tensor.detach().cpu()
    if tensor.itemsize == 1:
        tensor = tensor.float()
    least, greatest = tensor.aminmax() # NaN, if there is one
    return math.isfinite(least) and math.isfinite(greatest)


def cause_of(part, lora, dtype, cfg):
    """-> what is wrong with a result, what may have caused it, and what helps. part: the model that computed NaN or
    Inf, "transformer" or "VAE"; lora: whether a LoRA was at work; cfg: the CFG scale."""
    suspects = []
    if lora:
        suspects.append("a LoRA that is too strong (lower --lora_scale)")
    if dtype == "float16":
        suspects.append("float16, which ends at 65,504 (give --dtype bfloat16 or float32)")
    if cfg > 30:
        suspects.append(f"--true_cfg_scale {cfg:g} (lower it)")
    line = f"NaN or Inf in what the {part} computed, and no picture; the cause may be "
    line += " or ".join(suspects or [f"damaged weights of the {part} (take another copy of them)"])
    if lora:
        line += "; --scales 0 shows whether the base alone has it, too"
    return line


def loss_line(step, loss):
    """-> what is said of a validation's loss."""
    if math.isfinite(loss):
        return f"step {step}: validation loss {loss:.4f}"
    return (f"warning: step {step}: the validation loss is NaN or Inf, and so is not ranked; if the next ones are, "
            "too, start a new run with a lower --lr")


def of_validation(lost, sample_lora):
    """-> a line on the pictures of a validation that are lost: [(control, base, lora, vae or target, the model that
    computed NaN or Inf, the picture's file)]. sample_lora: of the flags."""
    name, model, file = lost[0]
    whose = dict(lora="with the trained LoRA", base="of the base").get(name, f"for the {name}")
    names = {name for name, *_ in lost}
    remedy = "if that stays so, start a new run with a lower --lr"
    if names != {"lora"}:
        remedy = "the trained LoRA is not its cause: the base has damaged weights (take another copy of them)"
        if sample_lora:
            remedy += ", or --sample_lora is too strong"
    return (f"warning: NaN or Inf in {len(lost)} pictures, for instance in what the {model} computed {whose} ({file}); "
            f"no PSNR of this validation is computed or ranked; {remedy}")


def refuse(path, tensors, remedy):
    """InputError if one of a file's tensors {name: tensor} holds NaN or Inf."""
    broken = [name for name, tensor in tensors.items() if not is_finite(tensor)]
    if broken:
        raise InputError(f"{path}: NaN or Inf in {len(broken)} of {len(tensors)} tensors, for instance {broken[0]}; "
                         f"{remedy}")
