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


def cause_of(model, lora, cfg, dtype=""):
    """-> what may have made this model, "transformer" or "VAE", compute NaN or Inf, and what helps: those suspects that
    are at work. lora: what makes a LoRA weaker, or "" if there is none; cfg: the CFG scale."""
    suspects = {f"a LoRA that is too strong ({lora})": lora,
                "float16, which ends at 65,504 (give --dtype bfloat16 or float32)": dtype == "float16",
                f"--true_cfg_scale {cfg:g} (lower it)": cfg > 30}
    at_work = [words for words, is_there in suspects.items() if is_there]
    return " or ".join(at_work or [f"damaged weights of the {model} (take another copy of them)"])


def refuse_picture(picture, model, dtype):
    """InputError if this model has computed NaN or Inf for one of predict.plan_pictures; model may be None."""
    if model:
        lora = any(picture.strengths) and "lower --lora_scale; --scales 0 is the base alone"
        cause = cause_of(model, lora, picture.sample.settings["true_cfg_scale"], dtype)
        raise InputError(f"{picture.path}: NaN or Inf in what the {model} computed, and no picture; the cause may be "
                         f"{cause}")


def loss_line(step, loss):
    """-> what is said of a validation's loss."""
    if math.isfinite(loss):
        return f"step {step}: validation loss {loss:.4f}"
    return (f"warning: step {step}: the validation loss is NaN or Inf, and so is not ranked; if the next ones are, "
            "too, start a new run with a lower --lr")


def of_validation(lost, sample_lora, cfg):
    """-> a line on the pictures of a validation that are lost: [(control, base, lora, vae or target, the model that
    computed NaN or Inf, the picture's file)]. The others: of the flags."""
    name, model, file = max(lost, key=lambda row: row[0] != "lora") # one that the training did not spoil, if any
    drawn = dict(lora=("with the trained LoRA", "if that stays so, start a new run with a lower --lr", cfg),
                 base=("of the base", sample_lora and "leave --sample_lora out", cfg))
    whose, lora, cfg = drawn.get(name, (f"for the {name}", "", 1))
    return (f"warning: NaN or Inf in {len(lost)} pictures, for instance in what the {model} computed {whose} ({file}); "
            f"no PSNR of this validation is computed or ranked; the cause may be {cause_of(model, lora, cfg)}")


def refuse(path, tensors, remedy):
    """InputError if one of a file's tensors {name: tensor} holds NaN or Inf."""
    broken = [name for name, tensor in tensors.items() if not is_finite(tensor)]
    if broken:
        raise InputError(f"{path}: NaN or Inf in {len(broken)} of {len(tensors)} tensors, for instance {broken[0]}; "
                         f"{remedy}")
