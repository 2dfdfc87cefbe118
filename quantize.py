"""int8 and int4 weights: the layers that compute with them, and the command that makes a quantized checkpoint.

    python quantize.py --checkpoint_path checkpoints/SmolLM2-135M-Instruct --mode int8
    python quantize.py --checkpoint_path checkpoints/SmolLM2-135M-Instruct --mode int4 --groupsize 64 --gptq

- int8: one scale per output row, w = q * scale, q in -127 … 127.
- int4: a scale and a minimum per group of 32, 64 or 128 weights of a row, w = q * scale + min, q in 0 … 15. The head is
  int8 here too: its roundings change the logits directly, and at 4 bits cost more than all others together.

A quantized checkpoint is one safetensors file beside the original. It holds everything that the model needs (embedding,
norms and biases as they were), under the original's tensor names, layers unfused, so that any rank of any world size
can slice its part. The layout is the same for every device; packing for a device's kernel happens after loading. How a
file was quantized, and of which model, stands in its metadata; its name means nothing.
"""

import hashlib
import itertools
import json
import math
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from model import ModelArgs, Transformer

GROUPSIZES = (32, 64, 128)
VERSION = "1"  # of the stored layout


# ---------------------------------------------------------------- numbers


def quantize_int8(w: Tensor) -> tuple[Tensor, Tensor]:
    """Round w [N, K] to (q int8 [N, K], scales float32 [N]), w ≈ q * scale: symmetric, one scale per row.

    Raises ValueError for weights that are not finite.
    """
    w = w.float()
    if not w.isfinite().all():
        raise ValueError("weights that are not finite cannot be quantized")
    scales = w.abs().amax(dim=1) / 127
    q = (w / scales.where(scales > 0, 1)[:, None]).round_().clamp_(-127, 127)
    return q.to(torch.int8), scales


def dequantize_int8(q: Tensor, scales: Tensor) -> Tensor:
    """float32 [N, K] from `quantize_int8`'s result."""
    return q.float() * scales[:, None]


def check_int4(w: Tensor) -> None:
    """Raises ValueError for weights that float16 scales and minimums cannot express."""
    largest = w.abs().max().item()
    if not math.isfinite(largest):
        raise ValueError("weights that are not finite cannot be quantized")
    if largest > 60000 or 0 < largest < 2**-15:
        raise ValueError(f"weights up to {largest:.1g} are beyond int4's float16 scales; int8 can hold them")


def group_range(w: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, mins), float16 [...], of groups w [..., g]: 16 levels from the smallest weight to the largest."""
    low, high = w.float().aminmax(dim=-1)
    return ((high - low) / 15).half(), low.half()


def searched_range(w: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Like `group_range`, with either end drawn in by up to 15 % where that makes Σ importance * error² smaller.

    w [N, g]; importance [g]. Levels closer together round most weights better, and cut off the outermost few.
    """
    w = w.float()
    low, high = w.aminmax(dim=-1)
    best = None
    for cut_low, cut_high in itertools.product((0, 0.05, 0.1, 0.15), repeat=2):
        mins = low + cut_low * (high - low)
        scales, mins = ((high - cut_high * (high - low) - mins) / 15).half(), mins.half()
        q = round_int4(w, scales[:, None], mins[:, None])
        error = (q * scales.float()[:, None] + mins.float()[:, None] - w).square() @ importance
        if best is None:
            best, least = (scales, mins), error
        better = error < least
        best = tuple(new.where(better, old) for new, old in zip((scales, mins), best, strict=True))
        least = error.minimum(least)
    return best


def round_int4(w: Tensor, scales: Tensor, mins: Tensor) -> Tensor:
    """The nearest level q in 0 … 15 (as float32) of each weight; scales and mins broadcast against w."""
    scales, mins = scales.float(), mins.float()
    return ((w.float() - mins) / scales.where(scales > 0, 1)).round_().clamp_(0, 15)


def pack_int4(q: Tensor) -> Tensor:
    """q [N, K], 0 … 15, to uint8 [N, K/2]: byte j of 16 has weight j of 32 in its low nibble, j + 16 in its high."""
    low, high = q.to(torch.uint8).unflatten(1, (-1, 2, 16)).unbind(2)
    return (low | high << 4).flatten(1)


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of `pack_int4`: uint8 [N, K]."""
    packed = packed.unflatten(1, (-1, 16))
    return torch.cat((packed & 15, packed >> 4), dim=-1).flatten(1)


def quantize_int4(w: Tensor, groupsize: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round w [N, K] to (packed uint8 [N, K/2], scales and mins float16 [N, K/g]), w ≈ q * scale + min in each group.

    The levels are computed from the scale and minimum as rounded to float16, so weights that lie on such a grid, as
    those of a Q4_1 file do, come back exactly. Raises ValueError as `check_int4` does.
    """
    check_int4(w)
    groups = w.unflatten(1, (-1, groupsize))
    scales, mins = group_range(groups)
    return pack_int4(round_int4(groups, scales.unsqueeze(-1), mins.unsqueeze(-1)).flatten(1)), scales, mins


dequantize_int4 = kernels.dequantize_int4


# ---------------------------------------------------------------- layers


class Int8Linear(nn.Module):
    """A linear layer with `quantize_int8`'s weights. `pack` makes panels of them where the C++ kernel runs; before that
    `forward` is the reference, which does not promise a row the same bits beside other rows."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.int8))
        self.register_buffer("scales", torch.zeros(out_features, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(out_features), requires_grad=False) if bias else None

    def pack(self) -> None:
        """Change to the layout of the C++ kernel, once, where that runs and the columns are pairs."""
        if kernels.native(self.weight) and self.weight.dim() == 2 and self.in_features % 2 == 0:
            self.weight = kernels.int8_panels(self.weight)

    def forward(self, x: Tensor, *around, **named) -> Tensor:
        run = kernels.linear_int8_reference if self.weight.dim() == 2 else kernels.linear_int8
        return run(x, self.weight, self.scales, self.bias, *around, **named)

    def operands(self) -> tuple[Tensor | None, ...] | None:
        """Weight, scales and bias, for `kernels.blocks`; None if not packed."""
        return None if self.weight.dim() == 2 else (self.weight, self.scales, self.bias)


class Int4Linear(nn.Module):
    """A linear layer with `quantize_int4`'s weights, after `pack` in the layout of the device's kernel: with scales and
    minimums in `weight` (CPU) or in `scales_and_zeros` (CUDA)."""

    FEW_ROWS = 64  # from more rows on, a bfloat16 product with dequantized weights is faster than the int4 kernel

    def __init__(self, in_features: int, out_features: int, groupsize: int, bias: bool = False):
        super().__init__()
        self.in_features, self.out_features, self.groupsize = in_features, out_features, groupsize
        groups = (out_features, in_features // groupsize)
        self.register_buffer("weight", torch.zeros(out_features, in_features // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.zeros(groups, dtype=torch.float16))
        self.register_buffer("mins", torch.zeros(groups, dtype=torch.float16))
        self.register_buffer("scales_and_zeros", None)
        self.bias = nn.Parameter(torch.zeros(out_features), requires_grad=False) if bias else None

    def pack(self) -> None:
        """Change, once, to the layout of the C++ kernel on a CPU, and on CUDA, Ampere or later, of
        `_weight_int4pack_mm`, where that kernel can run."""
        if kernels.native(self.weight) and self.scales is not None:
            self.weight = kernels.int4_panels(self.weight, self.scales, self.mins)
            self.scales = self.mins = None
        fits = self.weight.is_cuda and self.out_features % 8 == 0 and torch.version.hip is None
        if not fits or torch.cuda.get_device_capability(self.weight.device) < (8, 0):
            return
        q = unpack_int4(self.weight)
        # 16 x `tiles` consecutive weights of a row lie together; the more, the longer the kernel's loads.
        tiles = next(tiles for tiles in (8, 4, 2) if self.in_features % (16 * tiles) == 0)
        packed = torch.ops.aten._convert_weight_to_int4pack(cuda_nibbles(q), tiles)
        if not torch.equal(cuda_unpack(packed), q):
            raise ValueError("this version of PyTorch packs int4 weights for CUDA in a layout unknown here")
        self.weight, self.scales_and_zeros = packed, cuda_scales_and_zeros(self.scales, self.mins)
        self.scales = self.mins = None

    def forward(self, x: Tensor, *around, **named) -> Tensor:
        if self.scales is not None:
            return kernels.linear_int4_reference(x, self.weight, self.scales, self.mins, self.bias, *around, **named)
        if self.scales_and_zeros is None:
            return kernels.linear_int4(x, self.weight, self.out_features, self.bias, *around, **named)
        x, residual = linear_input(x, *around, **named)
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)
        if rows.shape[0] <= self.FEW_ROWS:
            y = torch.ops.aten._weight_int4pack_mm(rows, self.weight, self.groupsize, self.scales_and_zeros)
        else:
            y = F.linear(rows, cuda_dequantize(self.weight, self.scales_and_zeros))
        y = y.to(x.dtype).unflatten(0, x.shape[:-1])
        y = y if self.bias is None else y + self.bias
        return y if residual is None else y + residual

    def operands(self) -> tuple[Tensor | None, ...] | None:
        """Weight, scales (in the panels) and bias, for `kernels.blocks`; None if not packed, or if out_features is no
        multiple of 8, since that operator takes the number of rows from the panels."""
        packed = self.scales is None and self.out_features % kernels.PANEL == 0
        return (self.weight, None, self.bias) if packed else None


def linear_input(
    x: Tensor, norm: Tensor | None = None, eps: float = 1e-6, gated: bool = False, residual: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """What a linear layer multiplies by its weights, and what it adds, when called as `kernels.linear` can be."""
    return kernels.silu_mul(x) if gated else x if norm is None else kernels.rms_norm(x, norm, eps), residual


# PyTorch's CUDA kernel (aten/src/ATen/native/cuda/int4mm.cu) computes (q - 8) * scale + zero, in bfloat16.


def cuda_nibbles(q: Tensor) -> Tensor:
    """uint8 [N, K/2] as `_convert_weight_to_int4pack` takes it on CUDA: each byte's high nibble is the even column."""
    return q[:, ::2] << 4 | q[:, 1::2]


def cuda_scales_and_zeros(scales: Tensor, mins: Tensor) -> Tensor:
    """bfloat16 [K/g, N, 2] from float16 [N, K/g]: the zero is the value of level 8."""
    zeros = mins.float() + 8 * scales.float()
    return torch.stack((scales.float(), zeros), dim=-1).transpose(0, 1).to(torch.bfloat16).contiguous()


def cuda_unpack(packed: Tensor) -> Tensor:
    """uint8 [N, K] from int32 [N/8, K/(16 t), 32, t/2], the order in which a warp's 32 lanes feed the tensor cores.

    Lane 4 r + c holds columns 8 i + 2 c + h of row r; nibble 4 h + i of a word is (i, h), and words follow each other.
    """
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    nibbles = (packed.unsqueeze(-1) >> shifts & 15).to(torch.uint8)
    n, k, r, c, word, h, i = range(7)
    nibbles = nibbles.unflatten(4, (2, 4)).unflatten(2, (8, 4)).permute(n, r, k, word, i, c, h)
    return nibbles.flatten(2).flatten(0, 1)


def cuda_dequantize(packed: Tensor, scales_and_zeros: Tensor) -> Tensor:
    """bfloat16 [N, K], rounded as the kernel rounds."""
    scales, zeros = scales_and_zeros.transpose(0, 1).unsqueeze(2).unbind(-1)
    q = cuda_unpack(packed).unflatten(1, (scales.shape[1], -1))
    return ((q.to(torch.bfloat16) - 8) * scales + zeros).flatten(1)


def replace_linears(model: Transformer, mode: str, groupsize: int | None = None) -> None:
    """Put quantized layers, their weights still to be filled in, in the place of every linear layer of `model`.

    Each stored tensor is called as the buffer that it fills: `weight`, `scales` and, for int4, `mins`. A head that
    shared its weight with the embedding has its own afterwards.
    Raises ValueError where `groupsize` does not divide a layer's inputs, naming the sizes that divide all of them.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name, module in layers:
        if mode == "int4" and name != "output" and module.in_features % groupsize:
            inputs = {m.in_features for n, m in layers if n != "output"}
            fitting = [str(g) for g in GROUPSIZES if all(i % g == 0 for i in inputs)]
            hint = f"{' and '.join(fitting)} would fit" if fitting else "no other would; --mode int8 would"
            raise ValueError(f"groups of {groupsize} do not divide the {module.in_features} inputs of {name}; {hint}")
    for name, module in layers:
        parent, _, key = name.rpartition(".")
        shape = (module.in_features, module.out_features)
        bias = module.bias is not None
        new = Int8Linear(*shape, bias) if mode == "int8" or name == "output" else Int4Linear(*shape, groupsize, bias)
        setattr(model.get_submodule(parent), key, new)


# ---------------------------------------------------------------- GPTQ


def gptq(w: Tensor, hessian: Tensor, groupsize: int) -> tuple[Tensor, Tensor, Tensor]:
    """Like `quantize_int4`, for a layer whose inputs x have the given Σ x xᵀ, float32 [K, K], over a calibration text.

    Columns are rounded one after the other, and what rounding one adds to the outputs is taken away again, as far as
    possible, by changing those still to come (Frantar et al. 2023, algorithm 1: `inverse` is its Cholesky factor, a
    group its block). A group's range is searched for its weights as changed by the groups before it, an input's mean
    square being the importance of its weight: without that search GPTQ gains little here.
    """
    check_int4(w)
    w, hessian = w.float().clone(), hessian.double()  # float32 would lose the small eigenvalues
    diagonal = hessian.diagonal()
    importance = diagonal.float()
    diagonal.add_(0.01 * diagonal.mean().item() or 1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    inverse = torch.linalg.cholesky(inverse, upper=True).float()
    q, scales, mins = torch.empty_like(w), [], []
    for start in range(0, w.shape[1], groupsize):
        group = slice(start, start + groupsize)
        block, factor = w[:, group], inverse[group, group]
        scale, low = searched_range(block, importance[group])
        errors = torch.empty_like(block)
        for j in range(groupsize):
            q[:, start + j] = round_int4(block[:, j], scale, low)
            rounded = q[:, start + j] * scale.float() + low.float()
            errors[:, j] = (block[:, j] - rounded) / factor[j, j]
            block[:, j + 1 :] -= errors[:, j, None] * factor[j, j + 1 :]
        w[:, start + groupsize :] -= errors @ inverse[group, start + groupsize :]
        scales.append(scale)
        mins.append(low)
    return pack_int4(q), torch.stack(scales, dim=1), torch.stack(mins, dim=1)


@torch.no_grad()
def gptq_blocks(model: Transformer, windows: Tensor, groupsize: int) -> Iterator[tuple[str, Int4Linear]]:
    """Quantize the blocks of a float `model` in place, first to last; yields each new layer and its name.

    A layer's inputs over the token ids `windows` [B, S] are seen by a hook as the texts pass through its block. They
    pass again when the block is quantized, so that the next block sees, and makes up for, the errors of those before.
    """
    model.setup_caches(1, windows.shape[1])
    input_pos = torch.arange(windows.shape[1]).expand(1, -1)
    states = [model.tok_embeddings(window[None]).float() for window in windows]
    for i, block in enumerate(model.layers):
        linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
        hessians = {linear: torch.zeros(linear.in_features, linear.in_features) for linear in linears.values()}

        def observe(linear: nn.Module, around: tuple, named: dict, hessians: dict = hessians) -> None:
            x = linear_input(*around, **named)[0].flatten(0, -2)
            hessians[linear].addmm_(x.T, x)

        hooks = [linear.register_forward_pre_hook(observe, with_kwargs=True) for linear in linears.values()]
        for x in states:
            block(x, model.rope, input_pos)
        for hook in hooks:
            hook.remove()
        for name, linear in linears.items():
            new = Int4Linear(linear.in_features, linear.out_features, groupsize, linear.bias is not None)
            try:
                new.weight, new.scales, new.mins = gptq(linear.weight, hessians[linear], groupsize)
            except (ValueError, torch.linalg.LinAlgError) as error:
                raise ValueError(f"layers.{i}.{name}: {error}") from None
            new.bias = linear.bias
            parent, _, key = name.rpartition(".")
            setattr(block.get_submodule(parent), key, new)
            yield f"layers.{i}.{name}", new
        states = [block(x, model.rope, input_pos) for x in states]


# ---------------------------------------------------------------- files


def read_header(file: Path) -> tuple[dict, int]:
    """A safetensors file's JSON header, and the offset at which its data begins."""
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(min(length, 100_000_000)))
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise ValueError(f"{file}: not a whole safetensors file")
    return header, 8 + length


def fingerprint(files: Iterable[Path]) -> str:
    """SHA-256 over the names, types and shapes of all tensors, and the first and last 4 KB of each. Reads little."""
    tensors = {}
    for file in files:
        header, begin = read_header(file)
        tensors |= {name: (entry, file, begin) for name, entry in header.items() if name != "__metadata__"}
    digest = hashlib.sha256()
    for name in sorted(tensors):
        entry, file, begin = tensors[name]
        try:
            start, end = map(int, entry["data_offsets"])
            digest.update(f"{name} {entry['dtype']} {entry['shape']}\n".encode())
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{file}: not a whole safetensors file, for {name} is described wrongly") from None
        with open(file, "rb") as stream:
            for offset in (start, max(start, end - 4096)):
                stream.seek(begin + offset)
                digest.update(stream.read(min(4096, end - offset)))
    return digest.hexdigest()


def quantization_of(file: str | Path) -> dict | None:
    """How a safetensors file is quantized: {"mode": "int8" or "int4", "groupsize": None or 32, …}; None if it is not.

    Raises ValueError for a file made from another model than the directory's: other sizes than config.json's, or, where
    the original is still there, other weights than that has.
    """
    from checkpoint import weight_files

    file = Path(file)
    metadata = read_header(file)[0].get("__metadata__", {})
    if "quantization" not in metadata:
        return None
    if metadata.get("version") != VERSION:
        raise ValueError(f"{file}: its layout has version {metadata.get('version')}; this code reads version {VERSION}")
    try:
        quantization, expected = json.loads(metadata["quantization"]), json.loads(metadata["model_args"])
        mode, groupsize = quantization["mode"], quantization["groupsize"]
        sound = type(groupsize) in (int, type(None)) and isinstance(expected, dict) and "original" in metadata
    except (KeyError, TypeError, ValueError, RecursionError):
        mode = groupsize = sound = None
    if not sound or (mode, groupsize) not in [("int8", None)] + [("int4", size) for size in GROUPSIZES]:
        raise ValueError(f"{file}: its metadata is damaged; quantize the original anew")
    found = asdict(ModelArgs.from_config(file.parent))
    for entry, value in expected.items():
        if found.get(entry) != value:
            has = f"{entry} {value}, but {file.parent / 'config.json'} says {found.get(entry)}"
            raise ValueError(f"{file}: made from another model, with {has}")
    try:
        originals = weight_files(file.parent)
    except ValueError:
        originals = [file]  # the original is gone: nothing to compare with, and nothing is needed of it
    if originals != [file] and fingerprint(originals) != metadata["original"]:
        raise ValueError(f"{file}: made from other weights than {originals[0]} has; quantize those anew")
    return {"mode": mode, "groupsize": groupsize}


SAFETENSORS_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


def write_safetensors(
    path: Path,
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    metadata: dict[str, str],
    pieces: Iterable[tuple[str, int, Tensor]],
) -> None:
    """Write a safetensors file from `pieces` (tensor name, first row, rows) as they come, in any order.

    safetensors' own `save_file` wants all tensors in memory at once. The file appears whole or not at all.
    """
    header, end = {"__metadata__": metadata}, 0
    names = {dtype: name for name, dtype in SAFETENSORS_TYPES.items()}
    for name in sorted(shapes, key=lambda name: (-shapes[name][0].itemsize, name)):  # keeps each aligned to its type
        dtype, shape = shapes[name]
        start, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    seen = set()
    try:
        with open(scratch, "xb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name, row, tensor in pieces:
                row_bytes = tensor.dtype.itemsize * math.prod(tensor.shape[1:])
                stream.seek(8 + len(text) + header[name]["data_offsets"][0] + row * row_bytes)
                stream.write(tensor.contiguous().flatten().view(torch.uint8).numpy())
                if name not in seen:
                    seen.add(name)
                    if len(seen) % 60 == 0 or len(seen) == len(shapes):
                        print(f"  {len(seen)}/{len(shapes)} tensors", file=sys.stderr, flush=True)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


CHUNK = 2**21  # weights rounded at a time, so that float32 copies of a large layer are never whole


def quantize_checkpoint(
    checkpoint_path: str | Path, mode: str, groupsize: int | None = None, calibration: Tensor | None = None
) -> Path:
    """Write the quantized file of a float checkpoint beside it, and return its path. Progress goes to standard error.

    `calibration`, int64 [B, S], holds the token ids for GPTQ; without it weights are rounded to the nearest level, a
    piece of one tensor in memory at a time (GPTQ: the float model). Raises ValueError, before anything is written, for
    a checkpoint that is incomplete, quantized already, or does not divide into groups of `groupsize`.
    """
    from checkpoint import load_model, opened, sources, tensor_index, weight_files

    files = weight_files(checkpoint_path)
    if "quantization" in read_header(files[0])[0].get("__metadata__", {}):
        raise ValueError(f"{files[0]}: quantized already; what is to be quantized is the original")
    args = ModelArgs.from_config(files[0].parent)
    index = tensor_index(files)
    with torch.device("meta"):
        model = Transformer(args)
        replace_linears(model, mode, groupsize)

    def stored(name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape of a tensor of the original."""
        if name not in index:
            raise ValueError(f"{files[0].parent}: tensor {name} is missing")
        with opened(index[name][0]) as handle:
            dtype = handle.get_slice(name).get_dtype()
        if dtype not in ("F32", "BF16", "F16"):
            raise ValueError(f"{index[name][0]}: {name} is {dtype}; F32, BF16 or F16 is expected")
        return SAFETENSORS_TYPES[dtype], index[name][1]

    # What is to be written: each linear layer's sources in their quantized form, and all else as it is.
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    layers: dict[str, list[tuple[str, str, int]]] = {}  # our layer -> (prefix to write, tensor to read, its rows)
    for path, module in model.named_modules():
        if isinstance(module, Int8Linear | Int4Linear):
            layers[path] = []
            for source in sources(f"{path}.weight"):
                original = "model.embed_tokens.weight" if path == "output" and args.tie_embeddings else source
                rows, prefix = stored(original)[1][0], source.removesuffix("weight")
                if index[original][1] != (rows, module.in_features):
                    raise ValueError(f"{index[original][0]}: {original} should have {module.in_features} columns")
                layers[path].append((prefix, original, rows))
                shapes |= {prefix + key: (b.dtype, (rows, *b.shape[1:])) for key, b in module.named_buffers()}
            if sum(rows for _, _, rows in layers[path]) != module.out_features:
                raise ValueError(f"{index[original][0]}: {original}: {path} should have {module.out_features} rows")
    copied = {source for name in model.state_dict() for source in sources(name)} - shapes.keys()
    shapes |= {name: stored(name) for name in copied}

    def nearest(path: str) -> Iterator[tuple[str, int, Tensor]]:
        module = model.get_submodule(path)
        for prefix, original, rows in layers[path]:
            with opened(index[original][0]) as handle:
                weight = handle.get_slice(original)
                step = max(1, CHUNK // module.in_features)
                for row in range(0, rows, step):
                    w = weight[row : row + step]
                    try:
                        new = quantize_int4(w, groupsize) if isinstance(module, Int4Linear) else quantize_int8(w)
                    except ValueError as error:
                        raise ValueError(f"{index[original][0]}: {original}: {error}") from None
                    for key, tensor in zip(("weight", "scales", "mins"), new, strict=False):
                        yield prefix + key, row, tensor

    def pieces() -> Iterator[tuple[str, int, Tensor]]:
        for name in sorted(copied):
            with opened(index[name][0]) as handle:
                yield name, 0, handle.get_tensor(name)
        by_rounding = list(layers)
        if calibration is not None:
            by_rounding = ["output"]
            float_model = load_model(checkpoint_path, "cpu", stored(layers["output"][0][1])[0])
            for path, new in gptq_blocks(float_model, calibration, groupsize):
                for key, buffer in new.named_buffers():
                    parts = buffer.split([rows for _, _, rows in layers[path]])
                    for (prefix, _, _), part in zip(layers[path], parts, strict=True):
                        yield prefix + key, 0, part
        for path in by_rounding:
            yield from nearest(path)

    name = f"model_{mode}" + (f".g{groupsize}" if groupsize else "") + ("" if calibration is None else ".gptq")
    metadata = {
        "format": "pt",
        "version": VERSION,
        "quantization": json.dumps({"mode": mode, "groupsize": groupsize}),
        "rounding": "nearest" if calibration is None else "gptq",
        "model_args": json.dumps(asdict(args)),
        "original": fingerprint(files),
    }
    path = files[0].with_name(f"{name}.safetensors")
    write_safetensors(path, shapes, metadata, pieces())
    return path


# ---------------------------------------------------------------- the command line


def calibration_text() -> str:
    """The default: eval.py's default text, but for its beginning, on which eval.py measures."""
    from eval import default_text

    return default_text()[100_000:]


def calibration_windows(checkpoint_path: str | Path, text: str, windows: int = 16, length: int = 512) -> Tensor:
    """int64 [windows, length]: token ids of pieces of `text`, evenly spread over it (fewer if it is short)."""
    from tokenizer import get_tokenizer

    ids = get_tokenizer(checkpoint_path).encode(text, bos=False)
    pieces = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    if not len(pieces):
        raise ValueError(f"the calibration text has {len(ids)} tokens; at least {length} are needed")
    return pieces[:: max(1, len(pieces) // windows)][:windows]


def main(argv: list[str] | None = None) -> None:
    from cli import Parser

    parser = Parser(description="Write int8 or int4 weights beside a float checkpoint.", allow_abbrev=False)
    parser.add_argument("--checkpoint_path", type=Path, required=True, help="a directory with a config.json")
    parser.add_argument("--mode", choices=("int8", "int4"), required=True)
    parser.add_argument("--groupsize", type=int, choices=GROUPSIZES, help="int4 weights per scale (default: 32)")
    parser.add_argument("--gptq", action="store_true", help="int4: choose roundings by their effect on a text; slower")
    parser.add_argument("--calibration_file", type=Path, help="that text (default: Python's language reference)")
    args = parser.parse_args(argv)
    try:
        if args.mode == "int8" and (args.groupsize or args.gptq):
            raise ValueError(f"{'--groupsize' if args.groupsize else '--gptq'} goes with --mode int4, not int8")
        if args.calibration_file and not args.gptq:
            raise ValueError("--calibration_file goes with --gptq")
        calibration = None
        if args.gptq:
            try:
                text = (
                    args.calibration_file.read_text(encoding="utf-8") if args.calibration_file else calibration_text()
                )
            except UnicodeDecodeError:
                raise ValueError(f"{args.calibration_file}: not UTF-8 text") from None
            from checkpoint import weight_files

            context = ModelArgs.from_config(weight_files(args.checkpoint_path)[0].parent).block_size
            calibration = calibration_windows(args.checkpoint_path, text, length=min(512, context))
        groupsize = (args.groupsize or 32) if args.mode == "int4" else None
        path = quantize_checkpoint(args.checkpoint_path, args.mode, groupsize, calibration)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that the unfinished file is removed
    main()
