"""
Let the VAE of Qwen-Image compute a picture as a picture. Stock's computes videos: its convolutions also look at the two
frames before, where a single picture has none, so that two thirds of its products are with zeros; and it keeps the
input of each convolution for a next frame. After

    patch_vae_for_pictures(vae)

this AutoencoderKLQwenImage (not its class, and no other model) encodes and decodes one frame three times faster, in a
third of the memory, with stock's numbers up to rounding ($ pytest test_consistency.py -k one_frame). Weights,
names, config and save_pretrained stay as they are, stock's slicing and tiling work, and a video of several frames runs
stock's own code, bit for bit. It may be moved, copied by deepcopy, and patched twice.

Inside, a picture has no axis for time: it is (B, C, H, W), in channels_last. That is also how a layer knows it from a
video, which is (B, C, T, H, W). Of a kernel (out, in, 3, h, w) a picture meets [:, :, -1], the slice for the newest
frame. Wide layers work in strips of rows, with as many more as they look beyond them, so that memory holds a layer's
input, its result and one strip. It is for inference: some sums are in place. Patch before accelerate adds its hooks,
and save with save_pretrained or state_dict(): a patched model that was pickled as a whole cannot be read back.

This module imports nothing of ours, so you can copy it into another project.
"""
from types import MethodType

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders import autoencoder_kl_qwenimage as stock

STRIP = 2**16 # pixels of a strip, of all pictures of the batch, at a layer's own scale

def in_strips(compute, x, halo=0, scale=1):
    """compute(x), from strips of x's rows with `halo` rows more above and below, which is how far it looks. The result
    has `scale` rows for each of x."""
    batch, _, height, width = x.shape
    rows = max(STRIP // (batch * width), 8)
    if rows >= height:
        return compute(x)
    result = None
    for top in range(0, height, rows):
        above = min(top, halo)
        strip = compute(x[:, :, top - above:top + rows + halo])[:, :, above * scale:(above + rows) * scale]
        if result is None:
            result = torch.empty((*strip.shape[:2], height * scale, strip.shape[3]), dtype=strip.dtype,
                                 device=strip.device, memory_format=torch.channels_last)
        result[:, :, top * scale:top * scale + strip.shape[2]] = strip
    return result

# ---- the layers, for a picture ---------------------------------------------------------------------------------------

def convolve(self, x):
    return F.conv2d(x, self.weight[:, :, -1], self.bias, self.stride[1:], (self._padding[2], self._padding[0]))

def normalize(self, x):
    """Each pixel x / max(|x|, 1e-12) * sqrt(C) * gamma."""
    def compute(x):
        channels = x.shape[1]
        rows = F.rms_norm(x.permute(0, 2, 3, 1), (channels,), self.gamma.flatten(), eps=1e-24 / channels)
        return rows.permute(0, 3, 1, 2)
    return in_strips(compute, x)

def add_residual(self, x):
    def compute(x):
        y = self.conv1(F.silu(self.norm1(x), inplace=True))
        y = self.dropout(F.silu(self.norm2(y), inplace=True))
        return self.conv2(y).add_(self.conv_shortcut(x))
    return in_strips(compute, x, halo=2) # a row for each of two convolutions

def resample(self, x): # without time_conv, which makes or joins later frames
    if not self.mode.startswith("upsample"):
        return self.resample(x)
    def compute(x): # (stock interpolates in float32; but nearest only copies)
        return self.resample[1](F.interpolate(x, scale_factor=2.0, mode="nearest-exact"))
    return in_strips(compute, x, halo=1, scale=2)

def attend(self, x):
    return type(self).forward(self, x.unsqueeze(2)).squeeze(2)

LAYERS = {stock.QwenImageCausalConv3d: convolve, stock.QwenImageRMS_norm: normalize,
          stock.QwenImageResidualBlock: add_residual, stock.QwenImageResample: resample,
          stock.QwenImageAttentionBlock: attend}

def for_pictures(compute):
    """-> a forward() that computes pictures so, and videos as stock does."""
    def forward(self, x, *caches, **more_caches):
        if x.ndim == 4:
            return compute(self, x)
        return type(self).forward(self, x, *caches, **more_caches)
    return forward

# ---- the model -------------------------------------------------------------------------------------------------------

def one_frame(self, x, *caches, **more_caches):
    """forward() of encoder and decoder: the only frame of a call becomes a picture, without caches for a next one."""
    if not self.is_picture:
        return type(self).forward(self, x, *caches, **more_caches)
    made = type(self).forward(self, x[:, :, 0].contiguous(memory_format=torch.channels_last))
    return made.unsqueeze(2).contiguous() # as stock's is

def announced(method, part):
    """-> this method of the VAE, which tells the encoder or decoder what it will be given: stock passes the frames of
    a video one by one, too."""
    name = dict(encoder="x", decoder="z")[part] # of the first argument
    def call(self, *args, **kwargs):
        x = args[0] if args else kwargs[name]
        self.get_submodule(part).is_picture = x.shape[2] == 1
        try:
            return getattr(type(self), method)(self, *args, **kwargs)
        finally:
            self.get_submodule(part).is_picture = False
    return call

def patch_vae_for_pictures(vae):
    """Changes the forward() of layers of this AutoencoderKLQwenImage, and no weight -> the same model."""
    for part in (vae.encoder, vae.decoder):
        for name, module in part.named_modules():
            # an attention block's norm stays stock's: a video's frames, too, come to it as pictures
            if type(module) in LAYERS and not name.endswith(".norm"):
                module.forward = MethodType(for_pictures(LAYERS[type(module)]), module)
        part.is_picture, part.forward = False, MethodType(one_frame, part)
    for method, part in dict(_encode="encoder", tiled_encode="encoder", _decode="decoder",
                             tiled_decode="decoder").items():
        setattr(vae, method, MethodType(announced(method, part), vae))
    return vae
