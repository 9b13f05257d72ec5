#!/usr/bin/env bash
# A row of zeros in a weight becomes NaN in eight-bit floats, by torchao and by optimum-quanto.
#
# torchao 0.18.0 (Float8WeightOnlyConfig), optimum-quanto 0.2.7 (qfloat8), torch 2.13.0: a row is divided by its largest
# value, and 0 / 0 is NaN. Layers that begin at zero (a ControlNet's, the last one of adaLN-zero) and pruned ones have
# such rows. One would expect 0 there, as int8 gives in both. Nothing is said; one such row makes the picture NaN.
#
# $ bash findings/fp8_row_of_zeros.sh    # prints what a layer answers whose fourth row is zero; fails if that changes
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile --disable-pip-version-check torch==2.13.0 torchao==0.18.0 \
    optimum-quanto==0.2.7 numpy
cat > "$work/zeros.py" <<'PY'
import torch
from optimum.quanto import freeze, qfloat8, qint8, quantize
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

def by_quanto(kind):
    def change(model):
        quantize(model, weights=kind)
        freeze(model)
    return change

ways = {"torchao int8": lambda model: quantize_(model, Int8WeightOnlyConfig()),
        "torchao float8": lambda model: quantize_(model, Float8WeightOnlyConfig()),
        "quanto int8": by_quanto(qint8), "quanto float8": by_quanto(qfloat8)}
for name, change in ways.items():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 6, bias=False))
    model[0].weight.data[3] = 0
    x = torch.randn(1, 64)
    right = model(x)
    change(model)
    answer = model(x)
    off = (answer - right).nan_to_num(0).norm() / right.norm()
    print(f"{name}: fourth {answer[0, 3].item():.1f}, the others {'near' if off < 0.1 else 'wrong'}")
PY
"$work/venv/bin/python" "$work/zeros.py" 2> "$work/words.txt" | tee "$work/found.txt"
diff "$work/found.txt" - <<'SEEN'
torchao int8: fourth 0.0, the others near
torchao float8: fourth nan, the others near
quanto int8: fourth 0.0, the others near
quanto float8: fourth nan, the others near
SEEN
