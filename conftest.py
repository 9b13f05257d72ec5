"""Options of test_consistency.py and tests/, which import OPTIONS from here; and the fixtures of tests/harness.py."""
import gc
import os
import sys

import torch

OPTIONS = dict(dtype=torch.float32, device=torch.device("cpu"), full=False, model="tiny", kills=4, fuzz=0)


def pytest_addoption(parser):
    parser.addoption("--dtype", default="float32", choices=["float32", "bfloat16"], help="weights and inputs")
    parser.addoption("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.addoption("--full", action="store_true",
                     help="8,192-token samples, 60 blocks on the imitated cards, four trainings of the demo (an hour)")
    parser.addoption("--model", default="tiny",
                     help="-k own_model: hub id or folder of the model to check, on --device")
    parser.addoption("--kills", type=int, default=4, help="kill -9 of cache.py, and of train.py (200: 3 minutes)")
    parser.addoption("--fuzz", type=int, default=0, help="damages of each kind to each file, and every header bit")


def pytest_configure(config):
    OPTIONS.update({name: config.getoption("--" + name) for name in OPTIONS})
    OPTIONS.update(dtype=getattr(torch, OPTIONS["dtype"]), device=torch.device(OPTIONS["device"]))
    if not OPTIONS["full"]:
        torch.set_num_threads(1)  # the test models are too small for more: two threads take three times as long
    if OPTIONS["device"].type == "cuda":  # some attention kernels add up gradients in any order; here they are compared
        OPTIONS["device"] = torch.device("cuda", OPTIONS["device"].index or 0)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # with warn_only attention would stay as it is
        torch.backends.cuda.enable_cudnn_sdp(False)  # as in library/models/devices.py


def pytest_collection(session):
    # the harness takes OPTIONS when it is imported, for which pytest_plugins would be too early; `python
    # test_consistency.py` has imported it even before pytest began, and that one knows the defaults only
    sys.modules.pop("tests.harness", None)
    session.config.pluginmanager.import_plugin("tests.harness")


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze() # the imports need not be searched by each gc.collect() of a test
