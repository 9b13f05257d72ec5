#!/usr/bin/env bash
# fuse_lora on a base that optimum-quanto has quantized takes the LoRA away, without a word.
#
# diffusers 0.42.1, peft 0.21.2, optimum-quanto 0.2.7: the LoRA acts when it is loaded. After fuse_lora() the model
# draws as if there were none: peft adds the change to a dequantized copy of the weight, and then skips its own pass, as
# the layer counts as merged. unfuse_lora() brings it back. On a plain fp32 base fusing changes nothing.
#
# $ bash findings/fuse_on_quanto.sh    # prints how far the output moves, in units of the LoRA's effect
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 \
    accelerate==1.15.0 peft==0.21.2 optimum-quanto==0.2.7 numpy
cat > "$work/fuse.py" <<'PY'
import torch
from diffusers import QwenImageTransformer2DModel
from optimum.quanto import freeze, qint8, quantize
from peft import LoraConfig
for base in ("fp32", "qint8"):
    torch.manual_seed(0)
    model = QwenImageTransformer2DModel(num_layers=1, num_attention_heads=2, attention_head_dim=16,
                                        joint_attention_dim=16, in_channels=16, axes_dims_rope=(4, 6, 6)).eval()
    if base == "qint8":
        quantize(model.transformer_blocks, weights=qint8)
        freeze(model.transformer_blocks)
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False))
    call = dict(hidden_states=torch.randn(1, 16, 16), encoder_hidden_states=torch.randn(1, 5, 16),
                encoder_hidden_states_mask=torch.ones(1, 5, dtype=torch.bool), timestep=torch.tensor([0.5]),
                img_shapes=[[(1, 4, 4)]], return_dict=False)
    with torch.no_grad():
        on, = model(**call)
        model.disable_adapters()
        off, = model(**call)
        model.enable_adapters()
        model.fuse_lora()
        fused, = model(**call)
        model.unfuse_lora()
        again, = model(**call)
    unit = (on - off).norm()
    moved = [((out - on).norm() / unit).item() for out in (fused, again)]
    print(f"{base}: fused {moved[0]:.1f}, unfused {moved[1]:.1f}")
PY
"$work/venv/bin/python" "$work/fuse.py" 2> "$work/words.txt" | tee "$work/found.txt"
diff "$work/found.txt" - <<'SEEN'
fp32: fused 0.0, unfused 0.0
qint8: fused 1.0, unfused 0.0
SEEN
