#!/usr/bin/env bash
# A LoRA that diffusers saves with its metadata under a newer peft does not load under an older one.
#
# diffusers 0.42.1 writes all fields of peft's LoraConfig into the file's header (save_lora_weights with
# transformer_lora_adapter_metadata, as its training scripts do). peft 0.21.2 has fields that 0.20.0 does not know.
# There load_lora_weights raises TypeError "`LoraConfig` class could not be instantiated.", although none of these
# fields says anything (None or False), and the tensors would do. Without the metadata the same tensors load.
#
# $ bash findings/lora_of_a_newer_peft.sh    # prints both outcomes; fails if they change
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip="$work/venv/bin/pip install -q --disable-pip-version-check"
$pip torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 accelerate==1.15.0 peft==0.21.2 numpy
cat > "$work/save.py" <<'PY'
import sys
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from diffusers.training_utils import _collate_lora_metadata
from peft import LoraConfig, get_peft_model_state_dict
model = QwenImageTransformer2DModel(num_layers=1, num_attention_heads=2, attention_head_dim=16, joint_attention_dim=16,
                                    axes_dims_rope=(4, 6, 6))
model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q"]))
for folder, more in (("with", _collate_lora_metadata({"transformer": model})), ("without", {})):
    QwenImagePipeline.save_lora_weights(f"{sys.argv[1]}/{folder}", get_peft_model_state_dict(model), **more)
PY
cat > "$work/load.py" <<'PY'
import sys
import peft
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
for folder in ("with", "without"):
    model = QwenImageTransformer2DModel(num_layers=1, num_attention_heads=2, attention_head_dim=16,
                                        joint_attention_dim=16, axes_dims_rope=(4, 6, 6))
    try:
        # what a pipeline's load_lora_weights does
        state, metadata = QwenImagePipeline.lora_state_dict(f"{sys.argv[1]}/{folder}", return_lora_metadata=True)
        QwenImagePipeline.load_lora_into_transformer(state, model, metadata=metadata)
        found = "loads"
    except TypeError as e:
        found = f"TypeError: {e}"
    print(f"peft {peft.__version__}, {folder} metadata: {found}")
PY
"$work/venv/bin/python" "$work/save.py" "$work" 2> /dev/null
"$work/venv/bin/python" "$work/load.py" "$work" 2> /dev/null | tee "$work/found.txt"
$pip peft==0.20.0
"$work/venv/bin/python" "$work/load.py" "$work" 2> /dev/null | tee -a "$work/found.txt"
diff "$work/found.txt" - <<'SEEN'
peft 0.21.2, with metadata: loads
peft 0.21.2, without metadata: loads
peft 0.20.0, with metadata: TypeError: `LoraConfig` class could not be instantiated.
peft 0.20.0, without metadata: loads
SEEN
