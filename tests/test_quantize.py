"""quantize.py: numbers, layers, files, the command, GPTQ."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kernels
import quantize
from checkpoint import load_model
from eval import default_text
from model import ModelArgs, Transformer
from quantize import Int4Linear, Int8Linear

ROOT = Path(__file__).parent.parent


def make_checkpoint(path: Path, seed: int = 0, tied: bool = True, dtype=torch.float32, **changes) -> Path:
    """A two-layer Llama with random weights, as Hugging Face stores it."""
    config = {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
    } | changes
    dim, hidden, kv = config["hidden_size"], config["intermediate_size"], config["hidden_size"] // 2
    shapes = {"model.embed_tokens": (96, dim), "model.norm": (dim,)} | ({} if tied else {"lm_head": (96, dim)})
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes |= {layer + f"self_attn.{x}_proj": (dim if x in "qo" else kv, dim) for x in "qkvo"}
        shapes |= {layer + f"mlp.{x}_proj": (hidden, dim) for x in ("gate", "up")}
        shapes |= {layer + "mlp.down_proj": (dim, hidden)}
        shapes |= {layer + "input_layernorm": (dim,), layer + "post_attention_layernorm": (dim,)}
    torch.manual_seed(seed)
    tensors = {f"{k}.weight": torch.randn(v, dtype=dtype) * (0.1 if len(v) == 2 else 1) for k, v in shapes.items()}
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture
def checkpoint(tmp_path):
    return make_checkpoint(tmp_path / "tiny")


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, ROOT / "quantize.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        **options,
    )


def logits(model, ids=None):
    ids = torch.arange(20)[None] if ids is None else ids
    model.setup_caches(1, ids.shape[1])
    with torch.no_grad():
        return model(ids, torch.arange(ids.shape[1]))


# ---------------------------------------------------------------- numbers


def test_int8_error_is_at_most_half_a_step():
    w = torch.randn(7, 33)
    q, scales = quantize.quantize_int8(w)
    assert q.dtype == torch.int8 and scales.dtype == torch.float32 and q.abs().max() == 127
    assert ((quantize.dequantize_int8(q, scales) - w).abs() <= scales[:, None] * 0.5001).all()


def test_int4_error_is_at_most_half_a_step_beyond_float16_rounding():
    w = torch.randn(5, 256)
    packed, scales, mins = quantize.quantize_int4(w, 64)
    assert (packed.dtype, packed.shape) == (torch.uint8, (5, 128))
    assert scales.dtype == mins.dtype == torch.float16 and scales.shape == mins.shape == (5, 4)
    error = (quantize.dequantize_int4(packed, scales, mins) - w).abs().unflatten(1, (4, 64))
    assert (error <= 0.5 * scales[..., None].float() + 0.01).all()
    assert error.max() > 0.3 * scales.min()  # it does round


def test_int4_packing_puts_weight_j_low_and_weight_j_plus_16_high():
    q = torch.randint(0, 16, (3, 96))
    packed = quantize.pack_int4(q)
    for n, k in [(0, 0), (1, 15), (2, 16), (0, 31), (1, 32 + 5), (2, 64 + 16 + 7)]:
        byte = packed[n, k // 32 * 16 + k % 16].item()
        assert (byte >> 4 if k % 32 >= 16 else byte & 15) == q[n, k]
    assert torch.equal(quantize.unpack_int4(packed), q.to(torch.uint8))


def test_a_grid_of_groups_of_32_is_recovered_exactly():
    """Weights out of a Q4_1 file: float16 scale and minimum per 32, both ends of the range in use."""
    q = torch.randint(0, 16, (8, 4, 32)).float()
    q[..., 0], q[..., 1] = 0, 15
    scales, mins = (torch.rand(8, 4, 1) * 0.1).half(), (-torch.rand(8, 4, 1)).half()
    w = (q * scales.float() + mins.float()).flatten(1)
    assert torch.equal(quantize.dequantize_int4(*quantize.quantize_int4(w, 32)), w)


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_constant_weights(value):
    w = torch.full((3, 64), value)
    assert torch.equal(quantize.dequantize_int4(*quantize.quantize_int4(w, 32)), w)
    assert torch.allclose(quantize.dequantize_int8(*quantize.quantize_int8(w)), w)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(bad):
    w = torch.randn(4, 64)
    w[2, 40] = bad
    for quantized in (quantize.quantize_int8, lambda w: quantize.quantize_int4(w, 32)):
        with pytest.raises(ValueError, match="not finite"):
            quantized(w)


@pytest.mark.parametrize("size", [1e-8, 1e6])
def test_weights_beyond_float16_scales_are_refused_for_int4_and_held_by_int8(size):
    w = torch.randn(4, 64) * size
    with pytest.raises(ValueError, match="float16"):
        quantize.quantize_int4(w, 32)
    assert torch.allclose(quantize.dequantize_int8(*quantize.quantize_int8(w)), w, atol=0.02 * size)


# ---------------------------------------------------------------- layers


@pytest.fixture(params=["native", "reference"])
def implementation(request):
    if request.param == "reference":
        with kernels.disabled():
            yield
    elif kernels.load():
        yield
    else:
        pytest.skip("no C++ compiler")


def close(y, x, w, bias=None):
    expected = x.double() @ w.double().T + (0 if bias is None else bias.double())
    scale = x.double().norm(dim=-1, keepdim=True) * w.double().norm(dim=-1)
    assert y.shape == expected.shape
    assert ((y.double() - expected).abs() <= 1e-4 * scale + 1e-6).all()


ROWS = (1, 2, 5, 8, 9, 64, 300)


@pytest.mark.parametrize(("n", "k"), [(64, 128), (96, 576), (33, 100), (7, 77), (1, 1), (129, 33)])
@pytest.mark.parametrize("bias", [False, True])
def test_int8_linear_is_the_product_with_its_dequantized_weights(implementation, n, k, bias):
    layer = Int8Linear(k, n, bias)
    layer.weight, layer.scales = quantize.quantize_int8(torch.randn(n, k))
    weights = quantize.dequantize_int8(layer.weight, layer.scales)
    if bias:
        layer.bias.data.normal_()
    layer.pack()
    for rows in ROWS:
        x = torch.randn(rows, k)
        close(layer(x), x, weights, layer.bias)
    assert layer(torch.randn(2, 3, k)).shape == (2, 3, n)


INT4_SHAPES = [(64, 128, 32), (64, 128, 128), (96, 576, 32), (96, 576, 64), (33, 384, 128), (7, 32, 32), (1, 640, 64)]


@pytest.mark.parametrize(("n", "k", "groupsize"), INT4_SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_int4_linear_is_the_product_with_its_dequantized_weights(implementation, n, k, groupsize, bias):
    layer = Int4Linear(k, n, groupsize, bias)
    layer.weight, layer.scales, layer.mins = quantize.quantize_int4(torch.randn(n, k) + 0.3, groupsize)
    weights = quantize.dequantize_int4(layer.weight, layer.scales, layer.mins)
    if bias:
        layer.bias.data.normal_()
    layer.pack()
    for rows in ROWS:
        x = torch.randn(rows, k)
        close(layer(x), x, weights, layer.bias)
    assert layer(torch.randn(2, 3, k)).shape == (2, 3, n)


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_a_layer_not_packed_and_one_packed_and_run_without_the_library_give_the_same(mode):
    if not kernels.load():
        pytest.skip("no C++ compiler")
    layer = Int8Linear(64, 20, True) if mode == "int8" else Int4Linear(64, 20, 32, True)
    stored = (
        quantize.quantize_int8(torch.randn(20, 64))
        if mode == "int8"
        else quantize.quantize_int4(torch.randn(20, 64), 32)
    )
    for key, tensor in zip(("weight", "scales", "mins"), stored, strict=False):
        setattr(layer, key, tensor)
    x, residual = torch.randn(5, 64), torch.randn(5, 20)
    stored_as_rows = layer(x, residual=residual)
    layer.pack()
    assert not torch.equal(layer.weight, stored[0])
    packed_once = layer.weight
    layer.pack()
    assert layer.weight is packed_once
    with kernels.disabled():
        assert torch.equal(layer(x, residual=residual), stored_as_rows)
    close(layer(x), x, getattr(quantize, f"dequantize_{mode}")(*stored), layer.bias)


def cuda_pack(nibbles, tiles):
    """What `_convert_weight_to_int4pack` does on CUDA, loop for loop (int4mm.cu)."""
    n, k = nibbles.shape[0], nibbles.shape[1] * 2
    out = torch.zeros(n // 8, k // (16 * tiles), 32, tiles // 2, dtype=torch.int64)
    for i, outer, lane, inner in torch.cartesian_prod(*(torch.arange(s) for s in out.shape)).tolist():
        base = (outer * tiles + 2 * inner) * 8 + lane % 4
        v = [nibbles[i * 8 + lane // 4, base + offset].item() for offset in (0, 4, 8, 12)]
        out[i, outer, lane, inner] = sum((v[j] >> 4) << 4 * j | (v[j] & 15) << 16 + 4 * j for j in range(4))
    return out.where(out < 2**31, out - 2**32).int()


@pytest.mark.parametrize(("tiles", "n", "k"), [(2, 16, 96), (4, 8, 192), (8, 24, 256)])
def test_int4_packed_on_one_device_is_not_garbage_on_another(tiles, n, k):
    """The CUDA layout, made here by the rules of its kernel, reads back as what was stored."""
    w = torch.randn(n, k) + 0.5
    packed, scales, mins = quantize.quantize_int4(w, 32)
    q = quantize.unpack_int4(packed)
    on_cuda = cuda_pack(quantize.cuda_nibbles(q), tiles)
    assert torch.equal(quantize.cuda_unpack(on_cuda), q)
    there = quantize.cuda_dequantize(on_cuda, quantize.cuda_scales_and_zeros(scales, mins))
    here = quantize.dequantize_int4(packed, scales, mins)
    assert (there.float() - here).abs().max() < 2**-7 * here.abs().max()


def test_scales_and_zeros_mean_what_the_int4_kernel_takes_them_for():
    """PyTorch's CPU kernel takes the same scales and zeros as the CUDA one."""
    n, k, x = 64, 128, torch.randn(3, 128).bfloat16()
    packed, scales, mins = quantize.quantize_int4(torch.randn(n, k) + 0.5, 32)
    weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(quantize.unpack_int4(packed).int(), 1)
    scales_and_zeros = quantize.cuda_scales_and_zeros(scales, mins)
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, 32, scales_and_zeros)
    expected = x.float() @ quantize.dequantize_int4(packed, scales, mins).T
    assert (y.float() - expected).abs().max() < 0.02 * expected.abs().max()


def test_group_size_that_does_not_divide():
    args = ModelArgs(vocab_size=8, n_layer=1, n_head=9, dim=576, intermediate_size=1536)
    with torch.device("meta"):
        with pytest.raises(ValueError, match="128 do not divide the 576 inputs of .*wqkv; 32 and 64 would fit"):
            quantize.replace_linears(Transformer(args), "int4", 128)
        args.dim = args.head_dim * 9 + 1
        with pytest.raises(ValueError, match="no other would; --mode int8 would"):
            quantize.replace_linears(Transformer(args), "int4", 64)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantized_file_loads_as_its_dequantized_weights(tmp_path, mode, tied, dtype):
    directory = make_checkpoint(tmp_path / "a", tied=tied, dtype=dtype)
    file = quantize.quantize_checkpoint(directory, mode, 32 if mode == "int4" else None)
    assert file.parent == directory and sorted(os.listdir(directory)) == sorted(
        ["config.json", "model.safetensors", file.name]
    )
    # The original with its weights rounded by hand, all else untouched.
    tensors = load_file(directory / "model.safetensors")
    if tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    for name, w in list(tensors.items()):
        if name == "lm_head.weight" or (mode == "int8" and name.endswith("_proj.weight")):
            tensors[name] = quantize.dequantize_int8(*quantize.quantize_int8(w))
        elif name.endswith("_proj.weight"):
            tensors[name] = quantize.dequantize_int4(*quantize.quantize_int4(w, 32))
    by_hand = make_checkpoint(tmp_path / "b", tied=False)
    save_file({name: w.float() for name, w in tensors.items()}, by_hand / "model.safetensors")
    model = load_model(file)
    assert isinstance(model.output, Int8Linear)
    assert isinstance(model.layers[0].attention.wqkv, Int8Linear if mode == "int8" else Int4Linear)
    assert torch.equal(model.tok_embeddings.weight, load_model(directory).tok_embeddings.weight)
    expected = logits(load_model(by_hand))
    assert (logits(model) - expected).abs().max() < 1e-3 * expected.abs().max()
    assert (logits(load_model(directory)) - expected).abs().max() > 1e-3 * expected.abs().max()


def test_stored_tensors_can_be_sliced_for_tensor_parallelism(checkpoint):
    with safe_open(quantize.quantize_checkpoint(checkpoint, "int4", 32), "pt") as file:
        for x, rows in (("q", 64), ("k", 32), ("v", 32)):
            prefix = f"model.layers.1.self_attn.{x}_proj."
            assert file.get_slice(prefix + "weight").get_shape() == [rows, 32]
            assert file.get_slice(prefix + "scales").get_shape() == file.get_slice(prefix + "mins").get_shape()
            assert file.get_slice(prefix + "scales").get_shape() == [rows, 2]
        metadata = file.metadata()
    assert json.loads(metadata["quantization"]) == {"mode": "int4", "groupsize": 32}
    assert metadata["rounding"] == "nearest" and metadata["version"] == quantize.VERSION


@pytest.mark.parametrize("shards", [1, 2])
def test_a_renamed_file_loads_the_same(tmp_path, shards):
    directory = make_checkpoint(tmp_path / "a")
    if shards == 2:
        tensors = load_file(directory / "model.safetensors")
        names, weight_map = sorted(tensors), {}
        for i, part in enumerate((names[:9], names[9:])):
            save_file({name: tensors[name] for name in part}, directory / f"part{i}.safetensors")
            weight_map |= dict.fromkeys(part, f"part{i}.safetensors")
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        (directory / "model.safetensors").unlink()
    file = quantize.quantize_checkpoint(directory, "int4", 64)
    expected = logits(load_model(file))
    renamed = file.rename(directory / "model_int8.safetensors")
    assert quantize.quantization_of(renamed) == {"mode": "int4", "groupsize": 64}
    assert torch.equal(logits(load_model(renamed)), expected)
    # By itself, with config.json only, it is a whole checkpoint.
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(directory / "config.json", alone)
    shutil.copy(renamed, alone / "model.safetensors")
    assert torch.equal(logits(load_model(alone)), expected)


def test_a_file_from_a_fine_tune_of_the_same_shape_is_refused(tmp_path):
    file = quantize.quantize_checkpoint(make_checkpoint(tmp_path / "a"), "int8")
    other = make_checkpoint(tmp_path / "b", seed=1)
    shutil.copy(file, other)
    with pytest.raises(ValueError, match="made from other weights"):
        load_model(other / file.name)


def test_a_file_from_a_model_of_another_shape_is_refused(tmp_path):
    file = quantize.quantize_checkpoint(make_checkpoint(tmp_path / "a"), "int8")
    other = make_checkpoint(tmp_path / "b", rope_theta=500000.0)
    shutil.copy(file, other)
    with pytest.raises(ValueError, match=r"another model, with rope_base 10000.0, but .*config.json says 500000.0"):
        load_model(other / file.name)


def test_damaged_metadata_is_refused(checkpoint):
    file = quantize.quantize_checkpoint(checkpoint, "int8")
    with safe_open(file, "pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(file)
    for change, message in (
        ({"version": "99"}, "version 99"),
        ({"quantization": '{"mode": "int3", "groupsize": null}'}, "damaged"),
        ({"quantization": '{"mode": "int4", "groupsize": 0}'}, "damaged"),
        ({"quantization": '{"mode": "int4", "groupsize": 32.0}'}, "damaged"),
        ({"model_args": "5"}, "damaged"),
        ({"quantization": "["}, "damaged"),
        ({"model_args": "{}", "original": "0"}, "other weights"),
    ):
        save_file(tensors, file, metadata | change)
        with pytest.raises(ValueError, match=message):
            quantize.quantization_of(file)
    file.write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        quantize.quantization_of(file)


def test_an_interrupted_write_leaves_nothing(checkpoint, monkeypatch):
    original, calls = quantize.quantize_int8, []

    def interrupted(w):
        calls.append(w)
        if len(calls) == 5:
            assert len(os.listdir(checkpoint)) == 3  # what is written so far lies beside the original
            raise KeyboardInterrupt
        return original(w)

    monkeypatch.setattr(quantize, "quantize_int8", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize.quantize_checkpoint(checkpoint, "int8")
    assert len(calls) == 5 and sorted(os.listdir(checkpoint)) == ["config.json", "model.safetensors"]


def test_a_full_disk_leaves_nothing(checkpoint):
    resource = pytest.importorskip("resource")
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))}
    done = command("--checkpoint_path", checkpoint, "--mode", "int8", **limit)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert sorted(os.listdir(checkpoint)) == ["config.json", "model.safetensors"]


def test_memory_stays_near_one_layer(tmp_path):
    """Peak memory of the command, for a checkpoint of 206 MB whose largest tensor has 67 MB."""
    directory = tmp_path / "big"
    make_checkpoint(directory, hidden_size=1024, intermediate_size=8192)
    before = resident_peak("import quantize, checkpoint")
    peak = resident_peak(f"import quantize; quantize.quantize_checkpoint({str(directory)!r}, 'int8')")
    assert peak - before < 2 * 8192 * 1024 * 4 + 50e6


def resident_peak(code: str) -> int:
    # Not ru_maxrss: on Linux that begins with what pytest had, so the difference could be nothing.
    code += "; import torch; from cli import peak_memory; print(peak_memory(torch.device('cpu')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return int(done.stdout.split()[-1])


# ---------------------------------------------------------------- GPTQ


def correlated_inputs(rows: int, k: int) -> torch.Tensor:
    """Inputs of which most of the variance lies in an eighth of the directions, as in a language model."""
    return torch.randn(rows, k // 8) @ torch.randn(k // 8, k) + 0.1 * torch.randn(rows, k)


@pytest.mark.parametrize("groupsize", [32, 64])
def test_gptq_compensates(groupsize):
    torch.manual_seed(0)
    x, w = correlated_inputs(1024, 128), torch.randn(48, 128)
    hessian, before = x.T @ x, w.clone()

    def error(quantized):
        return (x @ (quantize.dequantize_int4(*quantized) - w).T).square().mean()

    compensated = error(quantize.gptq(w, hessian, groupsize))
    assert torch.equal(w, before) and torch.equal(hessian, x.T @ x)
    # Without the correlations there is nothing to compensate by; all else is the same.
    assert compensated < 0.5 * error(quantize.gptq(w, hessian.diagonal().diag(), groupsize))
    assert compensated < 0.5 * error(quantize.quantize_int4(w, groupsize))


def test_gptq_of_inputs_never_seen_is_nearest_rounding():
    w = torch.randn(8, 128)
    for new, old in zip(quantize.gptq(w, torch.zeros(128, 128), 32), quantize.quantize_int4(w, 32), strict=True):
        assert torch.equal(new, old)


def test_searched_range_has_the_smaller_weighted_error():
    torch.manual_seed(0)
    w, importance = torch.randn(200, 64), torch.rand(64)

    def error(scales, mins):
        q = quantize.round_int4(w, scales[:, None], mins[:, None])
        return (q * scales.float()[:, None] + mins.float()[:, None] - w).square() @ importance

    plain, searched = error(*quantize.group_range(w)), error(*quantize.searched_range(w, importance))
    assert (searched <= plain).all() and searched.sum() < 0.9 * plain.sum()


def test_gptq_checkpoint(tmp_path):
    directory = make_checkpoint(tmp_path / "a", tied=False)
    windows = torch.randint(0, 96, (16, 32))
    float_logits = logits(load_model(directory), windows[:1])
    distance = {}
    for calibration in (None, windows):
        file = quantize.quantize_checkpoint(directory, "int4", 64, calibration)
        model = load_model(file)
        distance[file.name] = (logits(model, windows[:1]) - float_logits).square().mean()
    assert quantize.quantization_of(file) == {"mode": "int4", "groupsize": 64}
    assert file.name == "model_int4.g64.gptq.safetensors"
    assert distance[file.name] < 0.9 * distance["model_int4.g64.safetensors"]
    # The second block was calibrated on what the first, quantized, gave (its layers not packed yet).
    hessian = torch.zeros(64, 64)
    with kernels.disabled():
        model = load_model(file)

    def observe(layer, around, named):
        x = quantize.linear_input(*around, **named)[0][0]
        hessian.addmm_(x.T, x)

    wqkv = model.layers[1].attention.wqkv
    wqkv.register_forward_pre_hook(observe, with_kwargs=True)
    for window in windows:
        logits(model, window[None])
    expected = quantize.gptq(load_model(directory).layers[1].attention.wqkv.weight.detach(), hessian, 64)
    assert torch.equal(expected[0], wqkv.weight)


def test_default_calibration_text_is_not_what_eval_measures_on():
    assert default_text().index(quantize.calibration_text()) == 100_000


# ---------------------------------------------------------------- the command


def test_command(checkpoint):
    done = command("--checkpoint_path", checkpoint, "--mode", "int4", "--groupsize", "64")
    file = checkpoint / "model_int4.g64.safetensors"
    assert done.returncode == 0 and str(file) in done.stdout and "tensors" in done.stderr
    assert quantize.quantization_of(file) == {"mode": "int4", "groupsize": 64}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--mode", "int4", "--groupsize", "128"],
            "128 do not divide the 64 inputs of layers.0.attention.wqkv; 32 and 64",
        ),
        (["--mode", "int8", "--groupsize", "32"], "--groupsize goes with --mode int4"),
        (["--mode", "int8", "--gptq"], "--gptq goes with --mode int4"),
        (["--mode", "int4", "--calibration_file", "x"], "--calibration_file goes with --gptq"),
        (["--mode", "int4", "--gptq", "--calibration_file", "missing.txt"], "missing.txt"),
        (["--mode", "int8", "--checkpoint_path", "missing"], "missing: no such file or directory"),
    ],
)
def test_command_errors_are_one_line(checkpoint, arguments, message):
    done = command("--checkpoint_path", checkpoint, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and message in done.stderr
    assert sorted(os.listdir(checkpoint)) == ["config.json", "model.safetensors"]


def test_a_quantized_file_is_not_quantized_again(checkpoint):
    file = quantize.quantize_checkpoint(checkpoint, "int8")
    with pytest.raises(ValueError, match="quantized already"):
        quantize.quantize_checkpoint(file, "int4", 32)


def test_unusable_tensors_are_named(tmp_path):
    directory = make_checkpoint(tmp_path / "a", tied=False)
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for changed, message in (
        (tensors[name].clone().fill_(float("nan")), "not finite"),
        (tensors[name] * 1e6, "float16"),
        (tensors[name].to(torch.float8_e4m3fn), "F8_E4M3; F32, BF16 or F16"),
        (tensors[name][:, :32].clone(), "should have 64 columns"),
        (tensors[name][:-1].clone(), "should have 256 rows"),
        (None, "missing"),
    ):
        save_file(
            {k: v for k, v in (tensors | {name: changed}).items() if v is not None}, directory / "model.safetensors"
        )
        for calibration in (None, torch.randint(0, 96, (1, 32))):
            with pytest.raises(ValueError, match=rf"({name}|layers\.1\.feed_forward\.w13).*{message}"):
                quantize.quantize_checkpoint(directory, "int4", 32, calibration)
        assert sorted(os.listdir(directory)) == ["config.json", "model.safetensors"]
