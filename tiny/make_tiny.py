"""
Makes everything in tiny/: a complete Qwen-Image-Edit-Plus pipeline, 5000 times smaller than the real one but with the
same classes, files and state-dict names, and a toy dataset for a first LoRA. Downloads nothing; one CPU core will do.

$ python tiny/make_tiny.py                # draw the data, train VAE and transformer from nothing: over an hour
$ python tiny/make_tiny.py --data_only    # only draw data, val and known again: the same pictures for the same seed
$ python tiny/make_tiny.py --random       # the same files with untrained weights, in seconds
$ python tiny/make_tiny.py --out /tmp/tiny --seed 1

Writes model_index.json, transformer/ vae/ text_encoder/ tokenizer/ scheduler/ processor/ with weights in bf16, and
data/{target,control,mask}   the edit for the LoRA to learn: "add a red border"; the transformer never sees a border
                             (the VAE does, to be able to draw it). And, in two fifths of it, instructions that
                             the base knows, so that they are not forgotten
val/{target,control,mask}    held out: other scenes, in sizes and aspects that nothing here was trained on
known/{target,control}       the base's own instructions, held out likewise: the LoRA should leave them alone

B pictures; h, w tokens down and across, 16 pixels each; I = h*w target, J control, T prompt tokens; C = 64 channels
"""
import argparse
import json
import math
import os
import shutil
import time

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer, Qwen2VLImageProcessor

import diffusers
from diffusers import (AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageEditPlusPipeline,
                       QwenImageTransformer2DModel)
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions, calculate_shift

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", default=os.path.dirname(os.path.abspath(__file__)), help="folder to write")
parser.add_argument("--seed", type=int, default=0, help="seed of pictures, weights, batches and noise")
parser.add_argument("--data_only", action="store_true", help="draw the dataset and stop")
parser.add_argument("--random", action="store_true", help="save untrained weights and stop")
parser.add_argument("--reuse_vae", action="store_true", help="keep the VAE in --out, train the rest")
parser.add_argument("--vae_steps", type=int, default=11000, help="about 45 ms each on one core")
parser.add_argument("--steps", type=int, default=13000, help="of the transformer, about 200 ms each on one core")
parser.add_argument("--pairs", type=int, default=16000, help="drawn for the transformer; 25 kB of memory each")
args = parser.parse_args()
torch.set_num_threads(1)                                   # tiny matrices: a second thread costs more than it brings

# ---- toy pictures ----------------------------------------------------------------------------------------------------

COLORS = dict(red=(220, 40, 40), green=(40, 170, 60), blue=(50, 80, 220), yellow=(240, 210, 40),
              purple=(150, 60, 190), orange=(245, 140, 30), cyan=(60, 200, 220), white=(245, 245, 245),
              black=(25, 25, 25), gray=(130, 130, 130))
SHAPES = ["circle", "square", "triangle"]
VAL_SIZES = [(128, 96), (96, 128), (160, 128), (128, 160)]     # width, height in pixels: nothing is trained on these
BASE_SIZES = [(w, h) for w in range(64, 161, 16) for h in range(64, 161, 16)   # nor on their aspects, 4:3 and 5:4
              if w * h <= 160 * 112 and w / h not in (4 / 3, 3 / 4, 5 / 4, 4 / 5)]
VAE_SIZES = [(64, 64), (96, 64), (64, 96), (96, 96), (128, 64), (64, 128)]     # small ones are enough
DATA_SIZES = VAE_SIZES + [(128, 128), (160, 96), (96, 160), (160, 64), (64, 160), (160, 160)]    # of the LoRA's data
SWATCH = (32, 32)                                              # second pictures: one flat colour
BORDER = 16                                                    # pixels: one token
SIDES = ["left", "right", "top", "bottom"]

def pick(rng, choices):
    return choices[rng.integers(len(choices))]

def any_color(rng):
    return tuple(int(v) for v in rng.integers(20, 246, 3))

def draw(size, bg, shapes, paint=None, where=()):
    """bg and paint are (r, g, b), where: the sides painted. Drawn four times too large and averaged: smooth edges"""
    w, h, b = size[0] * 4, size[1] * 4, BORDER * 4
    picture = Image.new("RGB", (w, h), bg)
    pen = ImageDraw.Draw(picture)
    for kind, color, x, y, r in shapes:
        x, y, r = 4 * x, 4 * y, 4 * r
        if kind == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=color)
        elif kind == "square":
            pen.rectangle((x - .88 * r, y - .88 * r, x + .88 * r, y + .88 * r), fill=color)
        else:
            pen.polygon([(x, y - r), (x - r, y + .8 * r), (x + r, y + .8 * r)], fill=color)
    strips = dict(left=(0, 0, b - 1, h), right=(w - b, 0, w, h), top=(0, 0, w, b - 1), bottom=(0, h - b, w, h))
    for side in where:
        pen.rectangle(strips[side], fill=paint)
    return picture.resize(size, Image.BOX)

def scene(rng, size):
    """A background colour's name and one to three shapes [kind, (r, g, b), x, y, r], all different, none touching each
    other or where a border would be"""
    names = [list(COLORS)[i] for i in rng.permutation(len(COLORS))]
    shapes = []
    for kind in [SHAPES[i] for i in rng.permutation(3)[:rng.integers(1, 4)]]:
        for _ in range(30):                                # no room after 30 throws: one shape fewer
            r = rng.uniform(9, min(18, min(size) / 2 - 20))
            x, y = (rng.uniform(r + BORDER + 2, d - r - BORDER - 2) for d in size)
            if all((x - s[2]) ** 2 + (y - s[3]) ** 2 > (r + s[4] + 3) ** 2 for s in shapes):
                shapes.append([kind, COLORS[names[len(shapes) + 1]], x, y, r])
                break
    return names[0], shapes

# ---- what the LoRA learns --------------------------------------------------------------------------------------------

def border_pair(rng, size, name=None):
    """(controls, instruction, target); the border's colour has a name, or else a second picture shows it"""
    bg, shapes = scene(rng, size)
    while bg == name:
        bg, shapes = scene(rng, size)
    controls = [draw(size, COLORS[bg], shapes)]
    if name:
        color, text = COLORS[name], f"add {'an' if name == 'orange' else 'a'} {name} border"
    else:
        color, text = any_color(rng), "add a border like picture 2"
        controls.append(Image.new("RGB", SWATCH, color))
    return controls, text, draw(size, COLORS[bg], shapes, color, SIDES)

def border_pairs(n, sizes, seed):
    rng, names, pairs = np.random.default_rng(seed), [], []
    for i in range(n):
        names = names or [list(COLORS)[k] for k in rng.permutation(len(COLORS))]       # every colour equally often
        shown = i // len(sizes) % 3 == 2                                               # a third of them
        pairs.append(border_pair(rng, sizes[i % len(sizes)], None if shown else names.pop()))
    return pairs

# ---- what the base learns --------------------------------------------------------------------------------------------

TASKS = dict(keep=.2, background=.2, like=.1, remove=.2, side=.3)              # share of each; none draws a border

def base_pair(rng, size, task):
    """(controls, instruction, target); in a third of the scenes the colours have no names: copying stays general"""
    bg, shapes = scene(rng, size)
    name = pick(rng, [n for n in COLORS if n != bg and COLORS[n] not in [s[1] for s in shapes]])
    bg, color, where = COLORS[bg], COLORS[name], ()
    if rng.random() < .33:
        bg, shapes = any_color(rng), [[kind, any_color(rng), *xyr] for kind, _, *xyr in shapes]
    controls = [draw(size, bg, shapes)]
    shown = task == "like" or task == "side" and rng.random() < .33            # a second picture shows the colour
    if shown or task == "keep" and rng.random() < .2:                          # or it changes nothing
        color = any_color(rng)
        controls.append(Image.new("RGB", SWATCH, color))
    if task == "keep":
        text = "keep the image"
    elif task in ("background", "like"):
        bg, text = color, f"make the background {'like picture 2' if shown else name}"
    elif task == "remove":
        text = f"remove the {shapes.pop(rng.integers(len(shapes)))[0]}"
    elif task == "side":                                                       # a base must know where a picture ends
        where = [pick(rng, SIDES)]
        text = f"paint the {where[0]} {'like picture 2' if shown else name}"
    return controls, text, draw(size, bg, shapes, color, where)

def base_pairs(n, sizes, tasks, seed):
    rng = np.random.default_rng(seed)
    names, share = list(tasks), np.array(list(tasks.values())) / sum(tasks.values())
    return [base_pair(rng, pick(rng, sizes), names[rng.choice(len(names), p=share)]) for _ in range(n)]

# ---- the datasets on disk --------------------------------------------------------------------------------------------

def write_dataset(folder, pairs, borders=0):
    """README's layout: target/NAME.png and .txt, control/NAME.png NAME_1.png, mask/NAME.png (white = edited) of every
    fifth of the borders, which come first"""
    shutil.rmtree(folder, ignore_errors=True)
    for i, (name, (controls, text, target)) in enumerate(pairs.items()):
        files = {f"target/{name}.png": target}
        files.update({f"control/{name}{f'_{k}' if k else ''}.png": c for k, c in enumerate(controls)})
        if i < borders and i % 5 == 1:
            files[f"mask/{name}.png"] = draw(target.size, (0, 0, 0), [], (255, 255, 255), SIDES).convert("L")
        for file, picture in files.items():
            os.makedirs(os.path.dirname(f"{folder}/{file}"), exist_ok=True)
            picture.save(f"{folder}/{file}", optimize=True)
        with open(f"{folder}/target/{name}.txt", "w", newline="\n") as f:
            f.write(text + "\n")

def numbered(pairs, form="{:03d}"):
    return {form.format(i): pair for i, pair in enumerate(pairs)}

# two fifths of the LoRA's data repeat what the base knows, or it would paint borders whatever it is asked for
write_dataset(f"{args.out}/data", numbered(border_pairs(144, DATA_SIZES, args.seed + 1)
                                           + base_pairs(96, DATA_SIZES, TASKS, args.seed + 2)), borders=144)
write_dataset(f"{args.out}/val", numbered(border_pairs(12, VAL_SIZES, args.seed + 7)), borders=12)
write_dataset(f"{args.out}/known", {name: pair for k, task in enumerate(TASKS) for name, pair in numbered(
    base_pairs(4, VAL_SIZES, {task: 1}, [args.seed + 8, k]), task + "/{}").items()})
if args.data_only:
    raise SystemExit

# ---- tokenizer and text encoder --------------------------------------------------------------------------------------

# The pipeline writes TEMPLATE's first half before every instruction and later drops the first 64 hidden states, so our
# vocabulary must cut that text into exactly 64 tokens, as the real one does: a byte-pair vocabulary, trained on this
# very text until every word is one token. (A plain byte vocabulary makes 320 of it and would leave 256 undropped.)
TEMPLATE = QwenImageEditPlusPipeline(*[None] * 6).prompt_template_encode
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
           "<|image_pad|>", "<|video_pad|>"]
WORDS = ("Picture assistant keep make add remove turn move paint put the a an image picture background border frame "
         "shape like in of to into with and color colors left right big small 1 2 3").split() + [*SHAPES, *COLORS]

def make_tokenizer():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = Qwen2Tokenizer()._tokenizer.pre_tokenizer          # splits text into words like the real one
    text = TEMPLATE
    for token in SPECIAL:
        text = text.replace(token, "\n\n")
    bpe.train_from_iterator([text] + [f"{word} {word}" for word in WORDS], trainers.BpeTrainer(
        vocab_size=4096, min_frequency=1, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    model = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]], model_max_length=1024)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    assert len(tokenizer(TEMPLATE.split("{}")[0]).input_ids) == 64
    return tokenizer

def make_text_encoder(tokenizer):
    """Random and never trained: every word gets its own direction, which is all that the transformer needs"""
    token_id = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    text = dict(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, max_window_layers=2,
                bos_token_id=token_id["<|endoftext|>"], eos_token_id=token_id["<|im_end|>"],
                rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[2, 3, 3]))  # sum: head dim / 2
    vision = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64,
                  fullatt_block_indexes=[1])
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=token_id["<|image_pad|>"],
        video_token_id=token_id["<|video_pad|>"], vision_start_token_id=token_id["<|vision_start|>"],
        vision_end_token_id=token_id["<|vision_end|>"])).eval()

# ---- VAE -------------------------------------------------------------------------------------------------------------

def conv2d(self, x, cache_x=None):
    """Of a causal convolution's three temporal taps only the last sees a still picture: exact, and 2.5x cheaper"""
    assert x.shape[2] == 1 and cache_x is None
    x = F.conv2d(x[:, :, 0], self.weight[:, :, -1], self.bias, self.stride[1:], (self._padding[2], self._padding[0]))
    return x.unsqueeze(2)

def init_vae(vae):
    """The default initialisation shrinks the signal 3x per convolution, since it counts the temporal taps that see
    zeros, and training stalls at 10 dB. So: unit gain on the last tap, residual branches start at zero, and a constant
    part in the first layers, because RMS norms would otherwise forget how bright a flat picture is."""
    for m in vae.modules():
        if isinstance(m, (QwenImageCausalConv3d, torch.nn.Conv2d)):
            w = m.weight.zero_().select(2, -1) if m.weight.dim() == 5 else m.weight
            w.normal_(std=w[0].numel() ** -0.5)
            m.bias.zero_()
    for name, p in vae.named_parameters():
        if name.endswith(("conv2.weight", "proj.weight")):
            p.zero_()
    vae.encoder.conv_in.bias.normal_(std=0.5)
    vae.decoder.conv_in.bias.normal_(std=0.5)

def to_tensor(pictures):
    """Pictures of one size -> (B, 3, 1, height, width) in -1..1"""
    x = torch.from_numpy(np.stack([np.asarray(p) for p in pictures])).permute(0, 3, 1, 2)
    return x.float().div(127.5).sub(1).unsqueeze(2)

def vae_picture(rng):
    """Scenes with and without painted sides (the decoder must know them), in the palette's colours and any others"""
    size = pick(rng, VAE_SIZES)
    bg, shapes = scene(rng, size)
    if rng.random() < .1:
        shapes = []
    where = [(), SIDES, [pick(rng, SIDES)]][rng.integers(3)]
    color = any_color(rng) if rng.random() < .5 else COLORS[pick(rng, list(COLORS))]
    return draw(size, any_color(rng) if rng.random() < .3 else COLORS[bg], shapes, color, where)

def train_vae(vae, steps, lr=3e-3):
    rng = np.random.default_rng(args.seed + 3)
    torch.manual_seed(args.seed + 3)
    with torch.no_grad():
        init_vae(vae)
    pool = [to_tensor([vae_picture(rng)])[0] for _ in range(4000)]
    optimizer = torch.optim.Adam(vae.parameters(), lr=lr, betas=(.9, .99))
    t0 = time.time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 50, (1 - step / steps) + 0.01)
        n, side = (8, 32) if step < .8 * steps else (2, 64)  # small crops are cheap; whole pictures at the end
        x = []
        while len(x) < n:
            picture = pick(rng, pool)
            top, left = (rng.integers(0, d - side + 1) for d in picture.shape[2:])
            crop = picture[:, :, top:top + side, left:left + side]
            if rng.random() < .1 or (crop != crop[:, :, :1, :1]).float().mean() > .1:      # few flat crops: +0.9 dB
                x.append(crop)
        x = torch.stack(x)
        z = vae.quant_conv(vae.encoder(x))[:, :vae.config.z_dim]
        # noise teaches the decoder to forgive the transformer's errors: 0.2 standard deviations then cost 1 dB
        scale = z.detach().std(dim=(0, 2, 3, 4), keepdim=True)
        y = vae.decoder(vae.post_quant_conv(z + 0.2 * scale * torch.randn_like(z)))
        loss = (y - x).abs().mean() + 4 * (y - x).pow(2).mean() + 1e-3 * z.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 500 == 0:
            print(f"vae {step}/{steps} | loss {loss.item():.4f} | {time.time() - t0:.0f} s", flush=True)
    with torch.no_grad():
        z = torch.cat([vae.encode(p[None]).latent_dist.mode()[0].flatten(1) for p in pool[:400]], 1)
    vae.register_to_config(latents_mean=[round(v, 4) for v in z.mean(1).tolist()],
                           latents_std=[round(v, 4) for v in z.std(1).tolist()])

# ---- pictures and words to tensors, as the stock pipeline does -------------------------------------------------------

def latent_stats():
    return (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))

def encode_pictures(pictures):
    """Pictures of one size -> normalised latents, packed 2x2 (B, I, 64)"""
    mean, std = latent_stats()
    z = (vae.encode(to_tensor(pictures)).latent_dist.mode() - mean) / std
    B, C, _, h, w = z.shape
    return z.view(B, C, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(B, h * w // 4, C * 4)

def decode(x_BIC, h, w):
    """The way back: (B, I, 64) -> (B, 3, height, width) in -1..1"""
    mean, std = latent_stats()
    z = x_BIC.view(-1, h, w, 16, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(-1, 16, 1, 2 * h, 2 * w)
    return vae.decode(z * std + mean).sample[:, :, 0].clamp(-1, 1)

def encode_prompts(prompts, pictures):
    """The text encoder's last hidden states, (T, 64) per prompt. Stock's processor needs torchvision, so its picture
    half is called alone, and every <|image_pad|> is repeated here, once per vision token."""
    small = []
    for p in (p for ps in pictures for p in ps):
        width, height = calculate_dimensions(384 * 384, p.size[0] / p.size[1])
        small.append(pipe.image_processor.resize(p, height, width))
    vision = image_processor(images=small, return_tensors="pt")
    counts = iter((vision["image_grid_thw"].prod(1) // image_processor.merge_size ** 2).tolist())
    text = [TEMPLATE.format("".join(f"Picture {k + 1}: <|vision_start|>{'<|image_pad|>' * next(counts)}<|vision_end|>"
                                    for k in range(len(ps))) + prompt) for prompt, ps in zip(prompts, pictures)]
    inputs = tokenizer(text, padding=True, return_tensors="pt")
    hidden = text_encoder(**inputs, **vision, output_hidden_states=True).hidden_states[-1]
    return [h[m][64:].clone() for h, m in zip(hidden, inputs["attention_mask"].bool())]

@torch.no_grad()
def encode(pairs):
    """(controls, instruction, target) -> dicts: x0 (I, 64), control (J, 64), prompt (T, 64), shapes [(1, h, w), ...]"""
    items = [dict(pictures=[target, *controls], text=text) for controls, text, target in pairs]
    by_size = {}
    for item in items:
        item["shapes"] = [(1, p.size[1] // 16, p.size[0] // 16) for p in item["pictures"]]
        item["latents"] = [None] * len(item["pictures"])
        for k, p in enumerate(item["pictures"]):
            by_size.setdefault(p.size, []).append((p, item["latents"], k))
    for same in by_size.values():
        for j in range(0, len(same), 32):
            for x, (_, latents, k) in zip(encode_pictures([p for p, _, _ in same[j:j + 32]]), same[j:j + 32]):
                latents[k] = x.clone()
    for j in range(0, len(items), 64):
        some = items[j:j + 64]
        for item, prompt in zip(some, encode_prompts([i["text"] for i in some], [i["pictures"][1:] for i in some])):
            item["prompt"], (item["x0"], *controls) = prompt, item.pop("latents")
            item["control"] = torch.cat(controls)
    return items

def buckets(items):
    """Lists of items with equal shapes: the stock transformer knows no other batches"""
    by_shapes = {}
    for item in items:
        by_shapes.setdefault(tuple(item["shapes"]), []).append(item)
    return list(by_shapes.values())

# ---- transformer -----------------------------------------------------------------------------------------------------

def velocity(model, items, x_BIC, s_B):
    """What the stock pipeline computes in a step, for one bucket: noisy target and clean controls -> (B, I, 64)"""
    longest = max(len(item["prompt"]) for item in items)
    prompt_BTC = torch.stack([F.pad(item["prompt"], (0, 0, 0, longest - len(item["prompt"]))) for item in items])
    mask_BT = torch.stack([torch.arange(longest) < len(item["prompt"]) for item in items])
    v = model(hidden_states=torch.cat([x_BIC, torch.stack([item["control"] for item in items])], 1), timestep=s_B,
              encoder_hidden_states=prompt_BTC, encoder_hidden_states_mask=None if mask_BT.all() else mask_BT,
              img_shapes=[item["shapes"] for item in items], return_dict=False)[0]
    return v[:, :x_BIC.shape[1]]

@torch.no_grad()
def sample(model, items, steps=16):
    """The stock pipeline's Euler steps without guidance, for one bucket -> pictures (B, 3, height, width)"""
    I = len(items[0]["x0"])
    x = torch.randn((len(items), I, 64), generator=torch.Generator().manual_seed(args.seed))
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=calculate_shift(I, 256, 8192, 0.5, 0.9))
    for s, s_next in zip(scheduler.sigmas[:-1], scheduler.sigmas[1:]):
        x = x + (s_next - s) * velocity(model, items, x, s.expand(len(x)))
    return decode(x, *items[0]["shapes"][0][1:])

@torch.no_grad()
def evaluate(model, items):
    """Mean PSNR in dB to the target of: the edit, the target through the VAE (the ceiling), copying the control"""
    psnr = lambda a, b: 10 * torch.log10(4 / (a - b).pow(2).mean((1, 2, 3)).clamp(min=4e-6))
    rows = []
    for group in buckets(items):
        target, control = (to_tensor([item["pictures"][k] for item in group])[:, :, 0] for k in (0, 1))
        ceiling = decode(torch.stack([item["x0"] for item in group]), *group[0]["shapes"][0][1:])
        rows += torch.stack([psnr(x, target) for x in (sample(model, group), ceiling, control)], 1)
    return torch.stack(rows).mean(0).tolist()

@torch.no_grad()
def init_transformer(model):
    """adaLN-zero: every block starts as the identity, the output as zero. And every head starts with an eye on its own
    place: equal biases of query and key make the logit a function of the distance, with its maximum at zero; in every
    second head the key is turned back by one frame, so that the maximum is the same place in the first control. Copying
    is then only a matter of values: loss 0.38 instead of 0.60 after 600 steps."""
    fast, second = [0, 4, 10], [5, 11]                     # rotation pairs of frame, row, column; of row, column
    frame = torch.arange(4) / 4                            # the four frequencies of the frame axis are 10000 ** -frame
    for block in model.transformer_blocks:
        for linear in (block.img_mod[1], block.txt_mod[1], model.norm_out.linear, model.proj_out):
            torch.nn.init.zeros_(linear.weight)
            torch.nn.init.zeros_(linear.bias)
        for norm in (block.attn.norm_q, block.attn.norm_k, block.attn.norm_added_q, block.attn.norm_added_k):
            norm.weight.fill_(1.5)                         # sharper attention than the usual 1
        q = torch.zeros(block.attn.heads, 16, dtype=torch.complex64)
        q[:, fast] = 3 * torch.randn(len(q), 3, dtype=torch.complex64)
        q[:, second] = 1.5 * torch.randn(len(q), 2, dtype=torch.complex64)
        k = q.clone()
        k[::2, :4] *= torch.polar(torch.ones(4), -(10000.0 ** -frame))
        block.attn.to_q.bias.copy_(torch.view_as_real(q).flatten())
        block.attn.to_k.bias.copy_(torch.view_as_real(k).flatten())

def train_transformer(model, items, steps, lr=2e-3):
    """Muon on the blocks' matrices: the loss of AdamW's 2500 steps after 1500. Timesteps shifted towards noise, where
    the edit is decided: at s = 1 only control and words tell what to draw. "make the background red" had 22 instead of
    11 dB after 2500 steps."""
    rng = np.random.default_rng(args.seed + 5)
    torch.manual_seed(args.seed + 5)
    init_transformer(model)
    groups = buckets(items)
    share = np.array([len(g) * len(g[0]["x0"]) for g in groups], float)    # big pictures come in smaller batches
    matrices = [p for n, p in model.transformer_blocks.named_parameters() if p.dim() == 2 and "_mod." not in n]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers = [torch.optim.AdamW(others, lr=lr, betas=(.9, .98), weight_decay=0.01),
                  torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, ns_steps=3, adjust_lr_fn="match_rms_adamw")]
    t0, mean_loss = time.time(), 1.0
    for step in range(steps):
        for group in (g for optimizer in optimizers for g in optimizer.param_groups):
            group["lr"] = lr * min(1, (step + 1) / 100) * (0.505 + 0.495 * math.cos(math.pi * step / steps))
        group = groups[rng.choice(len(groups), p=share / share.sum())]
        n = min(len(group), max(4, 512 // len(group[0]["x0"])))                # about 512 target tokens
        batch = [group[i] for i in rng.choice(len(group), n, replace=False)]
        x0 = torch.stack([item["x0"] for item in batch])
        u, noise = torch.rand(n), torch.randn_like(x0)
        s = 3 * u / (1 + 2 * u)
        loss = (velocity(model, batch, torch.lerp(x0, noise, s.view(-1, 1, 1)), s) - (noise - x0)).pow(2).mean()
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        mean_loss += .01 * (loss.item() - mean_loss)
        if step % 500 == 0:
            print(f"transformer {step}/{steps} | loss {mean_loss:.4f} | {time.time() - t0:.0f} s", flush=True)

# ---- make everything -------------------------------------------------------------------------------------------------

def save(part, folder):
    """Beside first, then renamed: whoever loads tiny/ meanwhile finds no half-written file"""
    part.save_pretrained(f"{folder}.new")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(f"{folder}.new", folder)

def rounded(model):
    """Weights as they will be read back from the bf16 files"""
    return model.to(torch.bfloat16).float().eval().requires_grad_(False)

torch.manual_seed(args.seed)
tokenizer = make_tokenizer()
text_encoder = rounded(make_text_encoder(tokenizer))
vae = AutoencoderKLQwenImage(base_dim=24, dim_mult=[1, 1, 1, 1], num_res_blocks=0, temperal_downsample=[False] * 3)
transformer = QwenImageTransformer2DModel(num_layers=3, attention_head_dim=32, num_attention_heads=5,
                                          joint_attention_dim=64, axes_dims_rope=(8, 12, 12))
scheduler = FlowMatchEulerDiscreteScheduler(                                   # the real model's numbers
    base_image_seq_len=256, max_image_seq_len=8192, base_shift=0.5, max_shift=0.9, shift=1.0, shift_terminal=0.02,
    time_shift_type="exponential", use_dynamic_shifting=True, num_train_timesteps=1000)
image_processor = Qwen2VLImageProcessor(size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56})   # 1 or 2 tokens
pipe = QwenImageEditPlusPipeline(scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer,
                                 processor=None, transformer=transformer)
# saved before its first use: a tokenizer's file remembers the padding of the last call
for name, part in dict(tokenizer=tokenizer, scheduler=scheduler, processor=image_processor).items():
    save(part, f"{args.out}/{name}")
tokenizer.save_pretrained(f"{args.out}/processor")         # the real model's processor folder holds the tokenizer, too
t0 = time.time()
if not args.random:
    QwenImageCausalConv3d.forward = conv2d
    if args.reuse_vae:
        vae = AutoencoderKLQwenImage.from_pretrained(f"{args.out}/vae")
    else:
        train_vae(vae, args.vae_steps)
    rounded(vae)
    items = []
    for k in range(0, args.pairs, 1000):                   # in chunks: pictures take more memory than latents
        items += encode(base_pairs(min(1000, args.pairs - k), BASE_SIZES, TASKS, [args.seed + 4, k]))
        for item in items[k:]:
            del item["pictures"]
    print(f"encoded {len(items)} pairs in {len(buckets(items))} buckets | {time.time() - t0:.0f} s", flush=True)
    train_transformer(transformer, items, args.steps)
    rounded(transformer)

# ---- save, then measure what a reader of the files gets --------------------------------------------------------------

if not args.reuse_vae:
    save(vae.to(torch.bfloat16), f"{args.out}/vae")
for name, part in dict(transformer=transformer, text_encoder=text_encoder).items():
    save(part.to(torch.bfloat16), f"{args.out}/{name}")
index = {"_class_name": "QwenImageEditPlusPipeline", "_diffusers_version": diffusers.__version__,
         "processor": ["transformers", "Qwen2VLProcessor"],
         "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
         "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
         "tokenizer": ["transformers", "Qwen2Tokenizer"], "transformer": ["diffusers", "QwenImageTransformer2DModel"],
         "vae": ["diffusers", "AutoencoderKLQwenImage"]}
with open(f"{args.out}/model_index.json", "w") as f:
    f.write(json.dumps(index, indent=2) + "\n")
if args.random:
    raise SystemExit

for model in (vae, transformer, text_encoder):
    model.float()
print(f"PSNR in dB on held-out scenes after {time.time() - t0:.0f} s: the edit | the VAE alone | copying the control")
for title, sizes in dict(trained=BASE_SIZES, held_out=VAL_SIZES).items():
    test = {task: base_pairs(24, sizes, {task: 1}, args.seed + 6) for task in TASKS}
    test["border"] = border_pairs(24, sizes, args.seed + 6)
    for task, pairs in test.items():
        print(f"{title:8s} sizes  {task:10s}  " + " | ".join(f"{v:5.2f}" for v in evaluate(transformer, encode(pairs))))

# printed for the shipped weights (seed 0; one core of an AMD EPYC, shared: 11 min for the VAE, 4 for encoding, 58 for
# the rest), and behind them, for --seed 1, the edit: keep, background and side agree within 1 dB, like and remove in 3
# PSNR in dB on held-out scenes: the edit | the VAE alone | copying the control
# trained  sizes  keep        35.12 | 35.15 | 60.00   seed 1: 35.29
# trained  sizes  background  28.29 | 35.20 |  8.82   seed 1: 28.13
# trained  sizes  like        28.03 | 32.70 |  9.39   seed 1: 28.65
# trained  sizes  remove      26.85 | 40.65 | 23.45   seed 1: 28.24
# trained  sizes  side        32.60 | 33.03 | 16.30   seed 1: 32.59
# trained  sizes  border      11.06 | 32.15 | 10.04   seed 1: 16.55
# held_out sizes  keep        36.15 | 36.18 | 60.00   seed 1: 35.80
# held_out sizes  background  29.89 | 36.55 |  8.82   seed 1: 29.48
# held_out sizes  like        28.18 | 32.45 | 10.64   seed 1: 30.97
# held_out sizes  remove      28.59 | 41.19 | 24.47   seed 1: 25.71
# held_out sizes  side        34.55 | 35.05 | 17.69   seed 1: 33.99
# held_out sizes  border      12.09 | 32.65 | 11.03   seed 1: 16.87
# border: what the transformer does about an instruction that it has never seen
