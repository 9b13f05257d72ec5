"""
The hub, without a network: a server in a thread of this process answers what huggingface_hub asks. It holds tiny/ as a
model in two revisions, a LoRA, a repository that is private and one that is gated.
"""
import hashlib
import http.server
import inspect
import json
import re
import threading
from types import SimpleNamespace
from urllib.parse import unquote

import huggingface_hub
import pytest
import safetensors.torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel

import cache
from library.data import picture_files
from library.models import model_files
import predict
from tests.harness import EXACT, NATIVE, TINY, add_item, lora_tensors, refused, run_script, works

MAIN, OLD = "a" * 40, "b" * 40 # commits
WEIGHTS = "diffusion_pytorch_model.safetensors"

class Handler(http.server.BaseHTTPRequestHandler): # a class because http.server wants one
    """Answers for the SimpleNamespace server.hub; see the fixture."""
    protocol_version = "HTTP/1.1"
    log_message = lambda *_: None

    def do_GET(self):
        hub = self.server.hub
        path = unquote(self.path.split("?")[0])
        if self.command == "GET":
            hub.asked.append(path)
        kind, repo, revision, file = re.fullmatch(
            r"/(?:(api)/models/)?([^/]+/[^/]+?)(?:/(?:revision|tree|resolve)/([^/]+)(?:/(.+))?)?", path).groups()
        commit = dict(main=MAIN, v1=OLD).get(revision or "main", revision)
        files = hub.repos.get(repo, {}).get(commit)
        if repo not in hub.repos:
            self.refuse(401, "RepoNotFound", "Invalid username or password.") # the hub's answer for private ones too
        elif files is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif kind and "/tree/" in path:
            self.send(200, json.dumps([dict(type="file", path=name, size=len(data), oid=hashlib.sha1(data).hexdigest())
                                       for name, data in files.items()]).encode())
        elif kind:
            siblings = [dict(rfilename=name) for name in files]
            self.send(200, json.dumps(dict(id=repo, sha=commit, siblings=siblings)).encode())
        elif repo in hub.gated:
            self.refuse(401, "GatedRepo", f"Access to model {repo} is restricted. You must be authenticated.")
        elif file not in files:
            self.refuse(404, "EntryNotFound", "Entry not found")
        else:
            if self.command == "GET" and file.endswith(".safetensors"):
                hub.large.append(file)
            if self.command == "GET" and hub.broken == file:
                return self.refuse(503, "", "Service Unavailable")
            key = hashlib.sha256(files[file]).hexdigest()
            self.send(200, files[file], **{"X-Repo-Commit": commit, "ETag": f'"{key}"'})
    do_HEAD = do_GET

    def send(self, status, body, **headers):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, status, code, message):
        self.send(status, b"", **{"X-Error-Code": code, "X-Error-Message": message})

@pytest.fixture
def hub(tmp_path, monkeypatch):
    """-> repos {name: {commit: {file: bytes}}}, gated: those that want a login; what the server was asked: asked, paths
    of GET, and large, those files. broken: one that has gone; stop(): so has the server."""
    parts = [*cache.ENCODERS, "transformer"]
    model = {p.relative_to(TINY).as_posix(): p.read_bytes() for part in parts for p in (TINY / part).glob("*")}
    model["model_index.json"] = (TINY / "model_index.json").read_bytes()
    lora = safetensors.torch.save({k: 0.05 * v for k, v in lora_tensors().items()})
    repos = {"someone/tiny": {MAIN: model | {"model_index.json": b"another"}, OLD: model},
             "someone/lora": {MAIN: {predict.LORA_FILE: lora, "deep/other.safetensors": lora}},
             "someone/gated": {MAIN: model}}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{server.server_port}"

    def stop():
        server.shutdown()
        server.server_close()
        huggingface_hub.close_session() # with its open connections; and it knows the proxies of before

    huggingface_hub.close_session()
    server.hub = SimpleNamespace(repos=repos, gated={"someone/gated"}, asked=[], large=[], broken=None, stop=stop)
    threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start() # seconds between looks at stop
    for name, value in dict(ENDPOINT=url, HUGGINGFACE_CO_URL_TEMPLATE=url + "/{repo_id}/resolve/{revision}/{filename}",
                            HF_HUB_CACHE=str(tmp_path / "hub"), HF_TOKEN_PATH=str(tmp_path / "token"),
                            HF_HUB_OFFLINE=False, HF_HUB_DISABLE_XET=True).items(): # as HF_ENDPOINT=... HF_HOME=...
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    yield server.hub
    stop()

def files_asked(hub):
    """Those of the repositories that were fetched, at which commit."""
    return [tuple(path.split("/", 5)[4:]) for path in hub.asked if "/resolve/" in path]

def in_cache(tmp_path):
    return {path for path in (tmp_path / "hub").rglob("*") if "snapshots" in path.parts and path.is_file()}

def test_a_model_of_the_hub_at_a_revision_in_parts(hub, tmp_path):
    """--plan fetches no weights, cache.py no transformer, train.py that alone, and nothing twice; all of one commit. It
    is tiny, to the bit. predict.py draws with LoRAs of the hub, and once more while the hub is away."""
    for n in (0, 1):
        add_item(tmp_path / "data", f"{n}", [(64, 32 * n + 32), (64, 64)])
    model = ["--model", "someone/tiny@v1", "--cache_dir", tmp_path / "cache", "--device", "cpu", *EXACT, *NATIVE]
    training = [*model, "--data", tmp_path / "data", "--val_data", "--max_steps", 1, "--out_dir", tmp_path / "a"]
    text, = [p.relative_to(TINY).as_posix() for p in (TINY / "text_encoder").glob("*.safetensors")]
    for (script, *flags), large in ((["train.py", *training, "--plan"], []),
                                    (["cache.py", *training[:-4]], [text, f"vae/{WEIGHTS}"]),
                                    (["train.py", *training], [f"transformer/{WEIGHTS}"])):
        hub.large.clear()
        works(script, *flags)
        assert sorted(hub.large) == large
    asked = files_asked(hub)
    assert {commit for commit, _ in asked} == {OLD} and len(set(asked)) == len(asked)
    for path in in_cache(tmp_path):
        name = path.as_posix().split(f"/{OLD}/")[1]
        assert path.read_bytes() == hub.repos["someone/tiny"][OLD].pop(name)
    assert not hub.repos["someone/tiny"][OLD]

    edit = [*model, "--image", tmp_path / "data/control/0.png", "--prompt", "add a red border", "--true_cfg_scale", 1,
            "--num_inference_steps", 2, "--lora", "someone/lora", "someone/lora/deep/other.safetensors"]
    pictures = []
    for name in ("a.png", "b.png"):
        result = run_script("predict.py", *edit, "--out", tmp_path / name)
        assert result.status == 0 and predict.LORA_FILE in result.out and "other.safetensors" in result.out, result.err
        pictures.append(picture_files.read_image(tmp_path / name).tobytes())
        hub.stop()
    assert pictures[0] == pictures[1]

def plan_of(model, tmp_path, *flags):
    return run_script("train.py", "--plan", "--model", model, "--data", TINY / "val", "--val_data", "--device", "cpu",
                      "--dtype", "float32", "--cache_dir", tmp_path / "c", "--max_steps", 1, *flags)

@pytest.mark.parametrize("name, tokens", [
    ("Qwen/Qwen-Image-Edit", "9,473 to 9,572"), ("Qwen/Qwen-Image-Edit-2511", "8,315 to 8,404")])
def test_a_published_model_is_planned_without_a_hub(hub, tmp_path, monkeypatch, name, tokens):
    """Parameters and the encoders' bytes are those of the files that people download."""
    from training import plan
    hub.stop()
    monkeypatch.setattr(plan, "step_bytes", lambda *_, **__: 0) # which takes seconds
    result = plan_of(name, tmp_path, "--transformer", f"{name}@main")
    assert result.status == 0, result.err
    for said in (name, f"{name}@main"):
        assert f"{said}: neither here nor from the hub" in result.out
    assert "parameters: 20,477,390,400, of which 46,989,312 in the LoRA" in result.out
    assert "VAE 0.5, text 28.9;" in result.out and f"tokens a sample: {tokens}," in result.out

def test_a_plan_takes_the_hub_s_configs_where_they_are(hub, tmp_path, monkeypatch):
    """And those of the cache when the hub is away."""
    from training import plan
    monkeypatch.setattr(plan, "step_bytes", lambda *_, **__: 0)
    hub.repos["Qwen/Qwen-Image-Edit-2511"] = {MAIN: hub.repos["someone/tiny"][OLD]}
    for _ in range(2):
        result = plan_of("Qwen/Qwen-Image-Edit-2511", tmp_path)
        assert result.status == 0 and "published.py" not in result.out and "parameters: 3,041,792," in result.out
        hub.stop()
    refusal = plan_of("someone/another", tmp_path)
    assert refusal.status == 1 and "--model someone/another" in refusal.errors[0]

def test_the_published_configs_are_the_defaults_of_diffusers_classes():
    for part, cls in (("transformer", QwenImageTransformer2DModel), ("vae", AutoencoderKLQwenImage)):
        config = {name: value for name, value in model_files.CONFIGS[f"{part}/config.json"].items() if name[0] != "_"}
        defaults = {name: inspect.signature(cls).parameters[name].default for name in config}
        assert json.dumps(config) == json.dumps(defaults) # tuples are lists there

def test_with_a_transformer_in_one_file_only_the_other_parts_are_fetched(hub, tmp_path):
    """And config.json; of the real model 17 GB instead of 58. A file of another kind ends the script before that."""
    add_item(tmp_path / "data", "a", [(64, 32), (64, 64)])
    file, lora = tmp_path / "x.safetensors", tmp_path / "lora.safetensors"
    file.write_bytes((TINY / "transformer" / WEIGHTS).read_bytes())
    lora.write_bytes(safetensors.torch.save(lora_tensors()))
    training = ["--model", "someone/tiny@v1", "--cache_dir", tmp_path / "cache", "--device", "cpu", *EXACT, *NATIVE,
                "--data", tmp_path / "data", "--val_data", "--max_steps", 1, "--out_dir", tmp_path / "a"]
    refusal = run_script("train.py", *training, "--transformer", lora)
    assert refusal.status == 1 and "a LoRA" in refusal.errors[0] and not hub.asked
    works("train.py", *training, "--transformer", file)
    text, = [p.relative_to(TINY).as_posix() for p in (TINY / "text_encoder").glob("*.safetensors")]
    assert sorted(hub.large) == [text, f"vae/{WEIGHTS}"]
    assert {name for _, name in files_asked(hub) if name.startswith("transformer/")} == {"transformer/config.json"}

def test_a_download_that_fails_is_one_line_and_the_next_fetches_what_is_missing(hub, tmp_path):
    name = hub.broken = f"vae/{WEIGHTS}"
    with refused("--model someone/tiny@v1", "503"):
        cache.find_model("someone/tiny@v1", cache.ENCODERS)
    here = {path.as_posix().split(f"/{OLD}/")[1] for path in in_cache(tmp_path)}
    hub.broken = None
    hub.asked.clear()
    folder = cache.find_model("someone/tiny@v1", cache.ENCODERS)
    again = {file for _, file in files_asked(hub)}
    assert name not in here and here and not again & here
    assert (folder / name).read_bytes() == hub.repos["someone/tiny"][OLD][name]

@pytest.mark.parametrize("find, named", [
    (lambda: cache.find_model("someone/tiny@v9", ["vae"]), ["--model someone/tiny@v9", "Revision"]),
    (lambda: cache.find_model("someone/tiny", ["vae"]), [MAIN, "model_index.json"]), # whose main is broken
    (lambda: cache.find_model("someone/private", ["vae"]), ["--model someone/private", "hf auth login"]),
    (lambda: cache.find_model("someone/gated", ["vae"]), ["--model someone/gated", "restricted", "hf auth login"]),
    (lambda: cache.find_model("someone/gated", ["vae"], flag="--transformer"), ["--transformer someone/gated"]),
    (lambda: predict.find_lora("someone/private"), ["someone/private", "hf auth login"]),
    (lambda: predict.find_lora("someone/gated/a.safetensors"), ["someone/gated", "restricted", "hf auth login"]),
    (lambda: predict.find_lora("someone/lora/no.safetensors"), ["someone/lora", "no.safetensors"])])
def test_what_the_hub_does_not_give_is_one_line(hub, find, named):
    with refused(*named):
        find()
