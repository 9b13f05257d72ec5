"""What happens with --device cuda, as far as a machine without a card can tell."""
import os
import re
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

import cache
import common
from library.cli import command_line
from library.models import devices, environment, quantization
import predict
import rope_patch
from tests.harness import HERE, TINY, encoder_flags, is_one_line, refused

@pytest.fixture
def card(monkeypatch):
    """A machine with an H100, as far as flags are concerned; a test may change its capability."""
    found = SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(environment, "no_card", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *args, device=None, real=torch.empty, **kwargs: real(*args, **kwargs))
    return found

def parse(monkeypatch, *flags):
    """cache.py's flags, with their devices."""
    parser = command_line.Parser("")
    command_line.add_model_flags(parser)
    monkeypatch.setattr("sys.argv", ["cache.py", *map(str, flags)])
    args = command_line.parse_args(parser, "cache.py")
    devices.find_devices(args)
    return args

def set_processes(patch, rank, world):
    """The environment is that of one process of several, as torchrun sets it: half of a set is refused."""
    for name, value in dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="a", MASTER_PORT=1).items():
        patch.setenv(name, str(value))

def test_every_device_has_a_number_and_each_process_its_own(card, monkeypatch):
    """NCCL, FSDP2 and torch.cuda.set_device refuse a device without one."""
    args = parse(monkeypatch, "--text_encoder_device", "cuda", "--vae_device", "cpu")
    assert (args.device, args.text_encoder_device, args.vae_device) == ("cuda:0", "cuda:0", "cpu")
    assert args.dtype == "bfloat16"
    set_processes(monkeypatch, rank=3, world=4)
    assert parse(monkeypatch, "--device", "cuda").text_encoder_device == "cuda:3"
    for name in ("--device", "--vae_device"): # all processes on one card
        with pytest.raises(SystemExit) as e:
            parse(monkeypatch, name, "cuda:0")
        assert e.value.code == 2

def test_nccl_waits_minutes_and_has_its_memory_before_anything_is_measured(card, monkeypatch):
    """Objects wait for hours, as for encoders; a step that waits so long waits for a dead process."""
    calls = []
    backend = SimpleNamespace(_set_default_timeout=lambda timeout: calls.append(timeout))
    group = SimpleNamespace(_get_backend=lambda device: calls.append(device) or backend)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append("set_device"))
    monkeypatch.setattr(devices, "prepare_card", lambda *args: "a card")
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, timeout: calls.append(timeout))
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=group))
    monkeypatch.setattr(torch, "zeros", lambda *args, device: device)
    monkeypatch.setattr(torch.distributed, "all_reduce", calls.append)
    set_processes(monkeypatch, rank=0, world=2)
    devices.start_processes(parse(monkeypatch))
    assert calls == ["set_device", timedelta(hours=6), torch.device("cuda:0"), timedelta(minutes=20), "cuda:0"]

@pytest.mark.parametrize("flag", ["--device", "--vae_device", "--text_encoder_device"])
def test_a_device_whose_numbers_were_never_compared_is_refused_in_one_line(card, monkeypatch, capsys, flag):
    """On MPS copies and causal attention are silently wrong; `card` is a machine on which torch would take them all."""
    for device in ("mps", "mps:0", "xpu", "npu:1", "privateuseone", "meta", "vulkan", "cud"):
        with pytest.raises(SystemExit) as e:
            parse(monkeypatch, flag, device)
        line = capsys.readouterr().err.strip()
        assert e.value.code == 2 and is_one_line(line, flag, device, "compared", "cuda", "cpu")

def test_only_a_copy_to_cuda_does_not_wait(monkeypatch):
    """On MPS it may read what is free again (pytorch issue 189690): a wrong order of tokens, without an error."""
    asked = []
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device, non_blocking=False: asked.append(non_blocking) or x)
    for device in ("cuda", "cuda:1", torch.device("cuda", 0), "mps", "cpu", torch.device("xpu")):
        rope_patch.send(torch.zeros(1), device)
    assert asked == [True] * 3 + [False] * 3
    others = [path.name for path in [*HERE.glob("*.py"), *HERE.glob("library/**/*.py"), *HERE.glob("training/*.py")]
              if "non_blocking=" in path.read_text(encoding="utf-8")]
    assert sorted(others) == ["offloading.py", "rope_patch.py"] # (the first keeps what it copies from)

def test_where_torch_lacks_flash_attention_the_log_says_so(card, monkeypatch):
    """On Windows, whatever --flash_attention and the package say. (What is computed then: test_rope_patch.py.)"""
    assert devices.activate_flash((8, 9)) == "flash attention 2"
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    monkeypatch.setattr(devices, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", lambda name: pytest.fail(name))
    for capability in ((8, 9), (9, 0), (10, 0)):
        for newer in (True, False):
            assert devices.activate_flash(capability, newer).startswith("no flash attention in this torch")

def test_several_cards_without_nccl_are_refused_before_a_model_is_loaded(card, monkeypatch, capsys):
    """Windows' torch has none. One card, and processes on CPUs, work as ever."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert parse(monkeypatch).device == "cuda:0"
    for name, value in dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500").items():
        monkeypatch.setenv(name, value)
    assert parse(monkeypatch, "--device", "cpu").device == "cpu"
    with pytest.raises(SystemExit) as e:
        parse(monkeypatch)
    assert e.value.code == 2 and is_one_line(capsys.readouterr().err.strip(), "--device", "NCCL", "use one")

@pytest.mark.parametrize("capability, dtype, usable", [
    ((7, 5), "bfloat16", False), ((7, 5), "float32", True), ((8, 0), "bfloat16", True), ((12, 0), "bfloat16", True)])
def test_a_card_before_ampere_is_refused_before_a_model_is_loaded(card, monkeypatch, capsys, capability, dtype, usable):
    card.capability = capability
    if usable:
        assert parse(monkeypatch, "--dtype", dtype).dtype == dtype
    else:
        with pytest.raises(SystemExit) as e:
            parse(monkeypatch, "--dtype", dtype)
        assert e.value.code == 2 and "Ampere" in capsys.readouterr().err

def test_a_real_model_does_not_go_to_the_cpu_by_itself(tmp_path, monkeypatch):
    """It would take 82 GB in float32, and hours a step; the usual reason is a driver older than the CUDA build."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False) # on a machine with a card too
    monkeypatch.setattr(environment, "no_card", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (tmp_path / "transformer").mkdir()
    with open(tmp_path / "transformer/model.safetensors", "wb") as f:
        f.truncate(5 * 10**9) # takes no space
    for model in (tmp_path, "Qwen/Qwen-Image-Edit-2509"):
        with refused("--device", torch.__version__, "driver", "580", "--device cpu"):
            parse(monkeypatch, "--model", model)
        assert parse(monkeypatch, "--model", model, "--device", "cpu").dtype == "float32"
    for slip in ("nosuch", "./models/qwen", "/nosuch/model"): # the model's name is what is wrong, not the device
        assert parse(monkeypatch, "--model", slip).device == "cpu"
    os.truncate(tmp_path / "transformer/model.safetensors", 10**6)
    assert parse(monkeypatch, "--model", tmp_path).device == "cpu"

def test_who_has_no_card_is_told_what_his_system_needs(monkeypatch):
    """PyPI's torch for Windows is built without CUDA, and without a card there is no driver to update."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(environment.platform, "system", lambda: "Windows")
    monkeypatch.setattr(torch.version, "cuda", None)
    words = 'pip install -U "torch<2.15" --index-url https://download.pytorch.org/whl/cu130'
    with refused("--device", "without CUDA", words, "--device cpu"):
        parse(monkeypatch, "--model", "Qwen/Qwen-Image-Edit-2509")
    bound = re.search("^torch>=.*,(<.*?) ", (HERE / "requirements.txt").read_text(encoding="utf-8"), re.M)[1]
    assert f"torch{bound}" in words
    monkeypatch.setattr(environment, "glob", lambda pattern: [])
    for system, words in dict(Darwin="no Mac", Linux="this machine (or its container) lacks").items():
        monkeypatch.setattr(environment.platform, "system", lambda: system)
        with pytest.raises(common.InputError) as e:
            parse(monkeypatch, "--model", "Qwen/Qwen-Image-Edit-2509")
        assert is_one_line(str(e.value), "--device", words, "--device cpu")
        assert not re.search("(?i)nvidia|driver|index-url", str(e.value))
    monkeypatch.setattr(environment, "glob", lambda pattern: ["/dev/dxg"] * (pattern == "/dev/dxg*")) # WSL's
    with refused("--device", "without CUDA"):
        parse(monkeypatch, "--model", "Qwen/Qwen-Image-Edit-2509")

def test_what_is_set_before_the_first_tensor(card, monkeypatch):
    """cuDNN's attention off (one family of kernels, no plan for each shape), room for variants of a compiled block, an
    allocator that does not fragment, and the fastest flash attention that is installed and runs on this card."""
    settings, active = [], []
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    before, limit = torch.backends.cuda.cudnn_sdp_enabled(), torch._dynamo.config.recompile_limit
    try:
        assert "attention 2" in devices.prepare_card("cuda:0", "auto") and not active
        assert not torch.backends.cuda.cudnn_sdp_enabled() and torch._dynamo.config.recompile_limit >= 64
        assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        assert settings[0].split(",") == ["expandable_segments:True", "pinned_max_round_threshold_mb:1",
                                          "pinned_max_cached_size_mb:1"]
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128") # the user's own wins
        monkeypatch.setattr(devices, "find_spec", lambda name: name)
        for capability, want in (((9, 0), "FA3"), ((10, 0), "FA4"), ((12, 0), None), ((8, 9), None)):
            active.clear()
            card.capability = capability
            devices.prepare_card("cuda:0", "auto")
            assert active == [want] * bool(want)
        active.clear()
        card.capability = (9, 0)
        assert devices.prepare_card("cuda:0", "2") == "a card, flash attention 2"
        assert not active and len(settings) == 1
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
        torch._dynamo.config.recompile_limit = limit

BROKEN = "raise {}('undefined symbol: _ZN3c10\\nsecond line')"

@pytest.mark.parametrize("capability, files, words", [
    ((9, 0), {}, "2; flash-attn-3 (of download.pytorch.org/whl) would compute attention faster"),
    ((10, 3), {}, "2; flash-attn-4 would compute attention faster"),
    ((10, 0), {"flash_attn/__init__.py": ""}, "2; flash-attn-4 would compute attention faster"), # flash-attn 2
    ((10, 0), {"flash_attn/__init__.py": BROKEN.format("OSError")},
     "2 (FA4 cannot be loaded: undefined symbol: _ZN3c10)"),
    ((10, 0), {"flash_attn/__init__.py": "", "flash_attn/cute/__init__.py": "", "flash_attn/cute/interface.py":
               "import a_package_of_nvidias"}, "2 (FA4 cannot be loaded: No module named 'a_package_of_nvidias')"),
    ((9, 0), {"flash_attn_interface.py": ""},
     "2 (FA3 cannot be loaded: Module 'flash_attn_interface' does not expose FA3 forward kernels)"),
    ((12, 0), {"flash_attn/__init__.py": "", "flash_attn/cute/__init__.py": ""}, "2"), ((8, 9), {}, "2")])
def test_a_flash_attention_that_cannot_be_loaded_leaves_torchs_own(capability, files, words, tmp_path, monkeypatch):
    """No traceback: the log says why, or what to install. Torch's real activation, with packages that lack all."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None) # as if it were not there; the end of the test restores it
        if any(re.split("[./]", file)[0] == name.split(".")[0] for file in files):
            del sys.modules[name]
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert devices.activate_flash(capability) == f"flash attention {words}"
    assert torch.nn.attention.current_flash_attention_impl() is None

def test_what_the_tools_time_is_set_up_as_a_training_is(card, monkeypatch, capsys):
    """bench.py once left cuDNN's attention on."""
    speed, prepared = pytest.importorskip("tools.bench_common"), []
    monkeypatch.setattr(devices, "prepare_card", lambda *args: prepared.append(args) or "a card")
    monkeypatch.setattr(torch.cuda, "set_device", prepared.append)
    for dtype in (torch.float32, torch.bfloat16):
        prepared.clear()
        assert speed.open_device("cuda:1", dtype) == "a card" and prepared == [1, ("cuda:1", "auto")]
    card.capability = (7, 5)
    with pytest.raises(SystemExit):
        speed.open_device("cuda", torch.bfloat16)
    assert is_one_line(capsys.readouterr().err.strip(), "--device", "Ampere")

def test_an_allocator_setting_that_torch_does_not_know_is_left_out(monkeypatch):
    """The real setter, of which an older torch refuses the second key."""
    tried = []
    def setter(settings):
        tried.append(settings)
        if "new" in settings:
            raise RuntimeError("Unrecognized key")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", setter)
    devices.configure_allocator("a:1,new:1", "a:1", "b:1")
    assert tried == ["a:1,new:1", "a:1"]

@pytest.mark.parametrize("capability, compiled, rows, columns, tokens, gains", [
    ((8, 0), False, 1280, 3072, 40, True), ((8, 9), False, 1280, 3072, 40, True),
    ((12, 0), False, 1280, 3072, 17, True), ((9, 0), False, 1280, 3072, 40, False),
    ((10, 0), False, 1280, 3072, 40, False),
    ((9, 0), True, 1280, 3072, 40, True), ((8, 9), True, 1280, 3072, 40, True), ((9, 0), True, 1280, 3072, 16, False),
    ((8, 9), False, 1280, 3420, 40, False), ((8, 9), False, 3420, 1280, 40, False)])
def test_eight_bits_are_multiplied_as_such_where_it_saves_time(capability, compiled, rows, columns, tokens, gains, card,
                                                               monkeypatch):
    """Of sides like 3420, in Qwen2.5-VL's vision MLP, _scaled_mm raises; of 16 rows or fewer _int_mm does."""
    card.capability = capability
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    x = torch.empty(1, tokens, columns, dtype=torch.bfloat16, device="meta")
    layer = SimpleNamespace(in_features=columns, out_features=rows, multiply=True)
    assert quantization.has_product(x, layer) == gains and not quantization.has_product(x.float(), layer)
    layer.multiply = False
    assert not quantization.has_product(x, layer)

@pytest.fixture
def trials(card, monkeypatch):
    """The products that low_bit tries on `card`, whose refusals a test may list by (kind, fast)."""
    tried, product = SimpleNamespace(calls=[], refused=[]), quantization.eight_bit_product

    def multiply(*args):
        tried.calls.append(args[4::2])
        if tried.calls[-1] in tried.refused:
            raise ValueError("not supported\nby this library")
        return product(*args)
    monkeypatch.setattr(quantization, "eight_bit_product", multiply)
    monkeypatch.setattr(torch, "ones", lambda *args, device, real=torch.ones, **kwargs: real(*args, **kwargs))
    monkeypatch.setattr(torch.version, "hip", None)
    quantization.can_multiply.cache_clear()
    yield tried
    quantization.can_multiply.cache_clear()

@pytest.mark.parametrize("kind, capability, able", [
    ("int8", (8, 0), True), ("int8", (7, 5), False), ("fp8", (8, 9), True), ("fp8", (8, 6), False),
    ("fp8", (12, 0), True), ("nf4", (9, 0), False)])
def test_a_cards_products_of_eight_bits_are_tried_once(kind, capability, able, card, trials):
    """In both passes; and not where the card is older than such products."""
    card.capability = capability
    for _ in range(60): # blocks
        assert quantization.can_multiply(kind, "cuda:0") == able
    assert not quantization.can_multiply(kind, "cpu") and trials.calls == [(kind, True), (kind, False)] * able

@pytest.mark.parametrize("fast", [True, False])
def test_a_card_that_refuses_eight_bits_unpacks_them_and_says_so_once(fast, trials, monkeypatch, capsys):
    trials.refused.append(("fp8", fast))
    for rank, warnings in ((None, 1), ("0", 1), ("1", 0)): # of torchrun's processes one speaks
        quantization.can_multiply.cache_clear()
        common.warn_once.cache_clear()
        if rank:
            monkeypatch.setenv("RANK", rank)
        assert not any(quantization.can_multiply("fp8", "cuda:0") for _ in range(60))
        said = capsys.readouterr().err
        assert len(said.splitlines()) == warnings
        assert not warnings or said.startswith("warning: --quantize fp8: cuda:0") and "(not supported)" in said
    assert quantization.can_multiply("int8", "cuda:0") and not capsys.readouterr().err

@pytest.mark.parametrize("able", [True, False])
def test_only_the_transformer_multiplies_eight_bits(able, monkeypatch):
    """And it only where the device can. What the text encoder makes is kept in the cache, whose keys know no card."""
    monkeypatch.setattr(quantization, "can_multiply", lambda kind, device: able)
    pipe = cache.load_pipeline(TINY)
    cache.load_encoder(pipe, "text", encoder_flags(quantize_text_encoder="int8"))
    transformer = predict.place_transformer(predict.load_transformer(TINY, "float32"), torch.device("cpu"), "int8")
    for model, multiply in ((pipe.text_encoder, False), (transformer, able)):
        assert {m.multiply for m in model.modules() if isinstance(m, quantization.LowBitLinear)} == {multiply}

def test_the_text_encoder_computes_no_logits():
    """Its last layer would be 1 GB of the real one's, and nobody reads what it makes."""
    pipe = cache.load_pipeline(TINY)
    cache.load_encoder(pipe, "text", encoder_flags())
    assert not list(pipe.text_encoder.lm_head.parameters())
