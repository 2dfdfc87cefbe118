"""Loading a checkpoint: which files and tensors it takes, what it refuses and how it says so, and how much memory."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import make_config, make_tensors, write_checkpoint, write_tensors

from checkpoint import load_model, weight_files
from model import ModelArgs


def logits(model, count: int = 30) -> torch.Tensor:
    model.setup_caches(1, count)
    ids = torch.randint(model.args.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return model(ids, torch.arange(count))


def change(path, edit) -> None:
    """Let `edit` change a one-file checkpoint's dictionary of tensors."""
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


def refused(path, *words: str) -> None:
    with pytest.raises(ValueError) as error:
        load_model(path)
    message = str(error.value)
    for word in words:
        assert word in message
    assert "\n" not in message


# ---------------------------------------------------------------- what loads


def test_tied_embeddings_without_a_head_in_the_file_load(tmp_path):
    path = write_checkpoint(tmp_path / "m", "llama32")
    with safe_open(path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    model = load_model(path)
    assert model.output.weight is model.tok_embeddings.weight
    assert logits(model).std() > 0.5


def test_a_tied_head_in_the_file_is_not_used(tmp_path):
    path = write_checkpoint(tmp_path / "m", "llama32")
    expected = logits(load_model(path))
    change(path, lambda tensors: tensors.update({"lm_head.weight": torch.full((272, 64), 7.0)}))
    assert torch.equal(logits(load_model(path)), expected)


def test_old_files_may_hold_the_rotary_frequencies(tmp_path):
    path = write_checkpoint(tmp_path / "m")
    expected = logits(load_model(path))
    change(path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert torch.equal(logits(load_model(path)), expected)


def test_a_folders_name_says_nothing(tmp_path):
    """A fuzzy match on it gave fine-tunes another model's shape."""
    for name in ("Llama-2-7b-chat", "SmolLM2-135M-Instruct", "qwen3"):
        path = write_checkpoint(tmp_path / name, num_hidden_layers=3)
        args = load_model(path).args
        assert (args.dim, args.n_layer, args.qk_norm) == (64, 3, False)


def test_shards_load_as_one_file_does(tmp_path):
    one, many = write_checkpoint(tmp_path / "one"), write_checkpoint(tmp_path / "many", shards=4)
    assert len(weight_files(many)) == 4 and not (many / "model.safetensors").exists()
    a, b = load_model(one).state_dict(), load_model(many).state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_file_in_the_directory_stands_for_it(tmp_path):
    path = write_checkpoint(tmp_path / "m")
    assert weight_files(path) == weight_files(path / "model.safetensors") == weight_files(str(path / "config.json"))
    assert torch.equal(logits(load_model(path / "model.safetensors")), logits(load_model(path)))


def test_fused_layers_hold_their_sources_in_order(tmp_path):
    path = write_checkpoint(tmp_path / "m", "qwen2", seed=5)
    stored, model = make_tensors(make_config("qwen2"), seed=5), load_model(path)
    layer, prefix = model.layers[1], "model.layers.1."
    wqkv = torch.cat([stored[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv"])
    bias = torch.cat([stored[f"{prefix}self_attn.{x}_proj.bias"] for x in "qkv"])
    w13 = torch.cat([stored[f"{prefix}mlp.{x}_proj.weight"] for x in ("gate", "up")])
    assert torch.equal(layer.attention.wqkv.weight, wqkv) and torch.equal(layer.attention.wqkv.bias, bias)
    assert torch.equal(layer.feed_forward.w13.weight, w13)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_precision_is_that_of_the_weights(tmp_path, family, precision):
    """On the CPU norms, biases and activations stay float32."""
    path = write_checkpoint(tmp_path / "m", family)
    model, full = load_model(path, precision=precision), load_model(path)
    for name, parameter in model.named_parameters():
        small = "norm" in name or name.endswith("bias")
        assert parameter.dtype == (torch.float32 if small else precision), name
    rounded = load_model(path)
    for parameter in rounded.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.to(precision).float()
    found = logits(model)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, logits(rounded), atol=1e-4, rtol=0)
    assert not torch.allclose(found, logits(full), atol=1e-4)  # the precision does something


def test_a_rank_gets_its_share_of_each_source(tmp_path):
    path = write_checkpoint(tmp_path / "m")
    args = ModelArgs.from_config(path)
    local = replace(args, n_head=2, n_local_heads=1, intermediate_size=64)
    whole = load_model(path).layers[0]
    for rank in (0, 1):
        layer = load_model(path, rank=rank, world_size=2, local_args=local).layers[0]
        q, k, v = whole.attention.wqkv.weight.split((64, 32, 32))
        expected = torch.cat([part.chunk(2)[rank] for part in (q, k, v)])
        assert torch.equal(layer.attention.wqkv.weight, expected)
        expected = torch.cat([part.chunk(2)[rank] for part in whole.feed_forward.w13.weight.chunk(2)])
        assert torch.equal(layer.feed_forward.w13.weight, expected)
        assert torch.equal(layer.attention.wo.weight, whole.attention.wo.weight.chunk(2, dim=1)[rank])
        assert torch.equal(layer.ffn_norm.weight, whole.ffn_norm.weight)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "family, name",
    [
        ("llama", "lm_head.weight"),
        ("llama", "model.norm.weight"),
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.1.self_attn.q_norm.weight"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path, family, name):
    path = write_checkpoint(tmp_path / "m", family, tie_word_embeddings=False)
    change(path, lambda tensors: tensors.pop(name))
    refused(path, str(path), name, "missing")


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "score.weight"]
)
def test_a_surplus_tensor_is_named(tmp_path, name):
    path = write_checkpoint(tmp_path / "m")
    change(path, lambda tensors: tensors.update({name: torch.zeros(64)}))
    refused(path, str(path / "model.safetensors"), name)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("model.embed_tokens.weight", (271, 64)),
        ("model.embed_tokens.weight", (272, 65)),
        ("model.norm.weight", (1, 64)),
        ("model.norm.weight", ()),
        ("model.layers.0.self_attn.q_proj.weight", (48, 64)),
        ("model.layers.0.self_attn.o_proj.weight", (64, 128)),
        ("model.layers.1.mlp.gate_proj.weight", (128, 60)),
        ("model.layers.1.mlp.gate_proj.weight", (128,)),
    ],
    ids=str,
)
def test_a_misshapen_tensor_is_named(tmp_path, name, shape):
    path = write_checkpoint(tmp_path / "m")
    change(path, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    refused(path, str(path / "model.safetensors"), name, str(list(shape)))


def test_shapes_that_are_wrong_but_add_up_are_refused(tmp_path):
    path = write_checkpoint(tmp_path / "m")
    layer = "model.layers.0."
    for prefix, shapes in (("mlp.", {"gate": 140, "up": 116}), ("self_attn.", {"q": 64, "k": 40, "v": 24})):
        wrong = {f"{layer}{prefix}{name}_proj.weight": torch.zeros(rows, 64) for name, rows in shapes.items()}
        write_tensors(path, make_tensors(make_config()) | wrong)
        refused(path, *wrong)


def test_integers_in_the_place_of_floats_are_refused(tmp_path):
    path = write_checkpoint(tmp_path / "m")
    change(path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(272, 64, dtype=torch.int8)}))
    refused(path, str(path / "model.safetensors"), "lm_head.weight", "int8")


@pytest.mark.parametrize("keep", [0, 4, 100, -1000, -1])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_truncated_file_is_named(tmp_path, shards, keep):
    path = write_checkpoint(tmp_path / "m", shards=shards)
    file = weight_files(path)[-1]
    file.write_bytes(file.read_bytes()[:keep])
    refused(path, str(file), "not a whole safetensors file")


@pytest.mark.parametrize(
    "junk",
    [b"junk, and more of it than eight bytes", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b"\x05\0\0\0\0\0\0\0\xff\xfe{}{"],
)
def test_a_file_that_is_no_safetensors_is_named(tmp_path, junk):
    path = write_checkpoint(tmp_path / "m")
    (path / "model.safetensors").write_bytes(junk)
    refused(path, str(path / "model.safetensors"), "not a whole safetensors file")


def test_a_file_without_tensors_is_named(tmp_path):
    path = write_checkpoint(tmp_path / "m")
    save_file({}, path / "model.safetensors")
    refused(path, str(path / "model.safetensors"))


def test_a_pickle_is_not_read(tmp_path):
    path = write_checkpoint(tmp_path / "m")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refused(path, str(path), "model.safetensors")


def test_a_missing_shard_is_named(tmp_path):
    path = write_checkpoint(tmp_path / "m", shards=3)
    file = weight_files(path)[1]
    file.unlink()
    refused(path, str(file), "model.safetensors.index.json")


@pytest.mark.parametrize(
    "index",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:20],
)
def test_a_damaged_index_is_named(tmp_path, index):
    path = write_checkpoint(tmp_path / "m", shards=2)
    (path / "model.safetensors.index.json").write_text(index)
    refused(path, str(path / "model.safetensors.index.json"), "weight_map")


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/hostname", "."])
def test_an_index_cannot_point_outside(tmp_path, name):
    path = write_checkpoint(tmp_path / "m", shards=2)
    save_file({"x": torch.zeros(1)}, tmp_path / "elsewhere.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    refused(path, "elsewhere" if "elsewhere" in name else "no such file")


def test_a_path_that_is_not_there_is_named(tmp_path):
    refused(tmp_path / "nowhere", str(tmp_path / "nowhere"), "no such file or directory")
    refused(tmp_path / "model.safetensors", str(tmp_path / "model.safetensors"))
    refused(tmp_path, str(tmp_path), "neither")


def test_weights_without_a_config_are_refused(tmp_path):
    path = write_checkpoint(tmp_path / "m")
    (path / "config.json").unlink()
    refused(path, str(path / "config.json"))


# ---------------------------------------------------------------- memory

MEASURE = """
import resource, sys, torch
from dataclasses import replace
from checkpoint import load_model
from cli import peak_memory
from model import ModelArgs
path, world_size = sys.argv[1], int(sys.argv[2])
load_model(sys.argv[3])  # the first model makes PyTorch load 50 MB of code
args = ModelArgs.from_config(path)
local = replace(args, n_head=args.n_head // world_size, n_local_heads=args.n_local_heads // world_size,
                intermediate_size=args.intermediate_size // world_size)
rss = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
model = load_model(path, "cpu", torch.float32, world_size - 1, world_size, local)
peak = peak_memory(torch.device("cpu"))  # this process's own, whatever pytest holds
print(peak - rss, sum(p.numel() * 4 for p in model.parameters()))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Two checkpoints of some 200 MB, in one file and in four."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16}
    config = make_config(num_key_value_heads=8, vocab_size=2000, **sizes)
    root = tmp_path_factory.mktemp("large")
    tensors = make_tensors(config)
    assert sum(t.nbytes for t in tensors.values()) > 190e6
    for shards in (1, 4):
        path = root / str(shards)
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        write_tensors(path, tensors, shards)
    write_checkpoint(root / "tiny")
    return root


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
@pytest.mark.parametrize("shards, world_size", [(1, 1), (4, 1), (4, 2)])
def test_loading_takes_the_memory_of_one_copy(large, shards, world_size):
    """On every rank: 8 ranks that load whole shards need 8 times the memory."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, large / str(shards), str(world_size), large / "tiny"],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=100,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    growth, weights = map(int, run.stdout.split())
    assert weights > 190e6 / world_size * 0.95
    assert growth < weights + 30e6  # the largest stored tensor is 11.5 MB
