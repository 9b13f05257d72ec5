"""The command line: the flags that scripts share, and a parser whose errors are one line."""
import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from common import InputError, WARNED, end_by_ctrl_c, flag_error, make_streams_printable, warn_once, world
from library.cli import defaults, near_misses
from library.cli.flag_types import (NEGATIVE, NEGATIVE_PROMPT, SAMPLE_FLAGS, SAMPLING, check_text, fraction, is_index,
                                    number, number_of_blocks, pixels, positive)
from library.models import environment

def add_model_flags(parser):
    """The flags that all scripts share."""
    flag = parser.group("model")
    flag("--model", "tiny", "hub id (ID@REVISION pins it) or folder of Qwen-Image-Edit, -2509 or -2511")
    flag("--dtype", None,
         "of the frozen models and the cache (default: float32 on CPU, else bfloat16)",
         choices=["float32", "bfloat16", "float16"])
    flag("--device", None, "default: cuda if there is one, else cpu; under torchrun one per process")
    flag("--flash_attention", "auto",
         "auto: 3 on Hopper, 4 on data centre Blackwell, where its package is installed; else 2", choices=["auto", "2"])
    flag("--cache_dir", "encoded", "where encoded samples of all models and datasets are kept")
    flag("--max_sequence_length", 1024,
         "most tokens in a prompt; a longer prompt is an error, it is not cut", type=positive)
    flag("--vae_device", None, "where pictures are encoded and decoded (default: --device)")
    flag("--text_encoder_device", None, "default: --device; cpu if memory runs out while encoding")
    add_quantize_flag(flag, "--quantize_text_encoder", "the text encoder's linear layers, 16 GB in bf16")

def add_quantize_flag(flag, name, what):
    flag(name, "none", f"{what}: int8 or fp8 (half the memory) or nf4 (a quarter; pip install bitsandbytes)",
         choices=["none", "int8", "fp8", "nf4"])

class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action): # a default of None is explained in the help itself
        explained = action.default in (None, []) or "default" in action.help
        return action.help if explained else super()._get_help_string(action)

class Parser(argparse.ArgumentParser): # a class because argparse calls its method `error`
    """-h shows all defaults; an error is one line, with the flag that may be meant, and status 2."""

    def __init__(self, description, usage=None): # usage: the flags that a person needs first
        if line := environment.environment_error(): # before any flag: a default may need their number
            raise InputError(line)
        super().__init__(description=description, usage=usage and f"%(prog)s {usage} [other flags: see below]",
                         formatter_class=HelpFormatter, allow_abbrev=False)
        self._negative_number_matcher = NEGATIVE # argparse takes -1e-1 for a flag

    def group(self, title):
        """-> flag(name, default, help, **what else argparse takes), which adds a flag to this new group."""
        group = self.add_argument_group(title)

        def flag(name, default, help, **others):
            if isinstance(default, bool): # --name and --no-name
                others["action"] = argparse.BooleanOptionalAction
            group.add_argument(name, default=default, help=help, **others)
        return flag

    def error(self, message):
        flag_error(near_misses.explain(message.removeprefix("argument "), self))

    def given(self):
        """The words of the command line, with --flag of --flag=value."""
        return [word.split("=")[0] for word in sys.argv[1:]]

    def parse_args(self):
        sys.excepthook = end_by_ctrl_c
        make_streams_printable()
        warn_once.cache_clear()
        WARNED.clear()
        for line in environment.restore_defaults():
            warn_once(line)
        if world() > 1 and "--flash_attention" not in self._option_string_actions: # one of add_model_flags
            self.error(f"argument WORLD_SIZE: {world()}, and {self.prog} works in one process; unset RANK WORLD_SIZE")
        for flag in "--data --image --lora --sample_lora".split(): # argparse would keep the last one's values only
            if self.given().count(flag) > 1:
                self.error(f"argument {flag}: given twice; put all values behind one")
        near_misses.refuse_slips(self)
        return super().parse_args()

def add_data_flags(parser):
    flag = parser.group("data")
    flag("--data", None,
         "dataset folders or metadata.jsonl files; or one index (.json) that cache.py has written",
         nargs="+")
    flag("--repeats", None,
         "how many times an epoch uses each --data, one number for each (default: 1)",
         type=number(int, 1, 10_000), nargs="+")
    flag("--val_data", [],
         "validation datasets, not trained on: their loss is logged, their pictures are generated without and with the "
         "LoRA (default: none; the demo has its own)", nargs="*")
    flag("--target_pixels", [1024 * 1024],
         "area of the target (default: 1024x1024); several: each use of a sample picks one; native: own size",
         type=pixels, nargs="+")
    flag("--control_pixels", 1024 * 1024,
         "area of the controls, likewise (default: 1024x1024)", type=pixels)
    flag("--upscale", True, "enlarge smaller pictures to the area, as stock does")
    flag("--caption_dropout_rate", 0.0, "share of samples trained with the empty prompt", type=fraction)
    flag("--prompt_image_dropout_rate", 0.0,
         "share of samples trained as text-to-image, without their controls; not with v1", type=fraction)
    flag("--preserve", 0.0,
         "share of samples with controls that get another instruction and learn what the base answers to it, so that "
         "the model does not forget", type=fraction)
    flag("--preserve_prompts", [NEGATIVE_PROMPT],
         "instructions that the base follows, for --preserve (default: an empty one)", nargs="+")
    flag("--mask", None,
         "auto: a pair without a mask gets one of where target and control differ (default: none; tools/doctor.py "
         "--mask auto shows them)", choices=["auto"])
    flag("--skip_bad", False, "go on without the samples that have an error")

def add_transformer_flags(parser):
    """Which transformer train.py and predict.py use, and what they can do if it is too large for its device -> the
    add_argument of the flags' group."""
    flag = parser.group("transformer, memory")
    flag("--transformer", None, "hub id or folder whose transformer/ replaces --model's; or one .safetensors file of "
         "ComfyUI, Civitai or diffusers, in bf16 or fp8: of --model only its other parts are needed")
    add_quantize_flag(flag, "--quantize", "the frozen blocks of the transformer, 41 GB in bf16")
    flag("--offload", 0,
         "blocks (a number, or all) that wait in host memory and are copied to the device for each forward and "
         "backward pass, behind the computation if a pass has enough tokens: raise --max_tokens too",
         type=number_of_blocks)
    return flag

def add_sample_flags(flag, names):
    for name in names:
        kind, text = SAMPLE_FLAGS[name]
        flag(f"--{name}", SAMPLING.get(name), text, type=kind)

PACKAGES = dict(nf4="bitsandbytes", tensorboard="tensorboard", wandb="wandb") # which package this value of a flag needs

def parse_args(parser, script):
    """parser.parse_args(), twice, as the folder of --model may set defaults for this script. It needs no
    torch, so that a slip is answered at once; find_devices does the rest."""
    parser.epilog = defaults.epilog(parser, script)
    args = parser.parse_args()
    defaults.apply(parser, args.model, script)
    args = parser.parse_args()
    environment.refuse_devices(args)
    for flag in ("quantize", "quantize_text_encoder", "tracker"):
        value = getattr(args, flag, None)
        if value in PACKAGES and not find_spec(PACKAGES[value]):
            parser.error(f"argument --{flag}: {value} needs a missing package; pip install {PACKAGES[value]}")
    return args

def parse_data_args(parser, script):
    """parse_args, with the flags of add_data_flags."""
    args = parse_args(parser, script)
    if not args.data:
        parser.error("argument --data: missing; give a dataset folder, a metadata.jsonl, or an index of cache.py")
    if len({Path(root).resolve() for root in args.data}) < len(args.data):
        parser.error("argument --data: names a dataset twice; leave one out; --repeats uses it more often")
    if any(map(is_index, args.data)) and (len(args.data) > 1 or args.mask or args.repeats):
        parser.error("argument --data: an index holds a whole training's samples with their masks and repeats; give it "
                     "alone, without --mask and --repeats")
    if args.preserve_prompts != [NEGATIVE_PROMPT] and not args.preserve:
        parser.error("argument --preserve_prompts: has no use without --preserve; give both")
    for prompt in args.preserve_prompts:
        check_text("--preserve_prompts", prompt)
    if args.repeats and len(args.repeats) != len(args.data):
        parser.error(f"argument --repeats: {len(args.repeats)} for {len(args.data)} --data; give one number each")
    return args
