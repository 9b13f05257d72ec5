#!/usr/bin/env bash
# sum, mean and norm of a sharded LoRA are those of one process's shard; its standard deviation is the whole's.
#
# torch 2.13.0 and 2.14.1, fully_shard (FSDP2) on two CPU processes: weight.sum().item() reads like a number of the
# whole weight, as .shape and .std() are. But sum, mean, norm, max and count_nonzero of a DTensor stay partial, and
# .item() takes this process's part without adding up. So a logged norm, a test for zeros or a decision by a mean is
# wrong, and differs between processes. .full_tensor(), before or after the sum, gives the right number;
# clip_grad_norm_ returns the whole norm.
#
# $ bash findings/dtensor_sums_its_own_shard.sh    # 1 + 2 + ... + 8 in two shards; fails if the answers change
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy
cat > "$work/shards.py" <<'PY'
import sys
import torch
import torch.distributed
from torch.distributed.fsdp import fully_shard

def work(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    layer = torch.nn.Linear(2, 4, bias=False)
    layer.weight.data = torch.arange(1., 9).view(4, 2)
    fully_shard(layer, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    layer(torch.ones(1, 2)).square().sum().backward()
    w = layer.weight.detach()
    found = {"shape": (*w.shape,)}
    for name in ("sum", "mean", "norm", "max", "count_nonzero", "std"):
        found[name] = round(getattr(w, name)().item(), 2)
    found["sum, full_tensor"] = w.sum().full_tensor().item()
    clipped = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e9).item()
    assert abs(clipped - layer.weight.grad.full_tensor().norm()) < 1e-3
    both = [None, None]
    torch.distributed.all_gather_object(both, found)
    if rank == 0:
        for name in found:
            print(f"{name}: process 0 {both[0][name]}, process 1 {both[1][name]}")

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=2)
PY
"$work/venv/bin/python" "$work/shards.py" "$work" 2> "$work/words.txt" | tee "$work/found.txt"
diff "$work/found.txt" - <<'SEEN'
shape: process 0 (4, 2), process 1 (4, 2)
sum: process 0 10.0, process 1 26.0
mean: process 0 2.5, process 1 6.5
norm: process 0 5.48, process 1 13.19
max: process 0 4.0, process 1 8.0
count_nonzero: process 0 4, process 1 4
std: process 0 2.45, process 1 2.45
sum, full_tensor: process 0 36.0, process 1 36.0
SEEN
