#!/usr/bin/env bash
# A LoRA with trained biases or modules_to_save changes the base in diffusers for good: off, at 0 and after unloading.
#
# diffusers 0.42.1, peft 0.21.2: add_adapter and a pipeline's loading put such tensors into the base's own layers, and
# keep no copy. So disable_adapters(), set_adapters(..., 0) and unload_lora() leave them there. What compares with "the
# base" (a reference loss, a picture before and after, a second LoRA in the same pipeline) compares with something else.
# A plain LoRA is taken off whole, as one would expect of all.
#
# $ bash findings/disabled_lora_is_not_the_base.sh    # distance from the base, 1 = the LoRA's own; fails if changed
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile --disable-pip-version-check torch==2.13.0 diffusers==0.42.1 \
    transformers==5.24.0 accelerate==1.15.0 peft==0.21.2 numpy
cat > "$work/unload.py" <<'PY'
import sys
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from peft import LoraConfig, get_peft_model_state_dict

def make_model():
    torch.manual_seed(0)
    return QwenImageTransformer2DModel(num_layers=1, num_attention_heads=2, attention_head_dim=16,
                                       joint_attention_dim=16, in_channels=16, axes_dims_rope=(4, 6, 6)).eval()

torch.set_grad_enabled(False)
torch.manual_seed(1)
call = dict(hidden_states=torch.randn(1, 16, 16), encoder_hidden_states=torch.randn(1, 5, 16),
            encoder_hidden_states_mask=torch.ones(1, 5, dtype=torch.bool), timestep=torch.tensor([0.5]),
            img_shapes=[[(1, 4, 4)]], return_dict=False)
for more in ({}, {"bias": "all"}, {"modules_to_save": ["proj_out"]}):
    model = make_model()
    base, = model(**call)
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_v"], **more))
    for weight in model.parameters():
        if weight.requires_grad: # as if trained
            weight += torch.randn_like(weight) * 0.3
    unit = (model(**call)[0] - base).norm()
    QwenImagePipeline.save_lora_weights(sys.argv[1], get_peft_model_state_dict(model))

    model = make_model()
    QwenImagePipeline.load_lora_into_transformer(QwenImagePipeline.lora_state_dict(sys.argv[1]), model)
    said = []
    for name, change in (("loaded", lambda: None), ("at 0", lambda: model.set_adapters(model.active_adapters(), 0.0)),
                         ("disabled", model.disable_adapters), ("unloaded", model.unload_lora)):
        change()
        off = ((model(**call)[0] - base).norm() / unit).item()
        said.append(f"{name} {'the base' if off < 1e-3 else f'off by {off:.1f}'}")
    print(f"{more or 'plain'}:", ", ".join(said))
PY
"$work/venv/bin/python" "$work/unload.py" "$work" 2> "$work/words.txt" | tee "$work/found.txt"
diff "$work/found.txt" - <<'SEEN'
plain: loaded off by 1.0, at 0 the base, disabled the base, unloaded the base
{'bias': 'all'}: loaded off by 1.0, at 0 off by 1.0, disabled off by 1.0, unloaded off by 1.0
{'modules_to_save': ['proj_out']}: loaded off by 1.0, at 0 off by 1.0, disabled off by 1.0, unloaded off by 1.0
SEEN
