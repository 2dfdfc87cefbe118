"""The operators the model is made of: C++ on the CPU (kernels.cpp), plain PyTorch everywhere else.

Each operator comes as a pair. `linear_reference`, `attention_reference`, … say in PyTorch what is computed; they run
on CUDA and MPS, where torch.compile makes good kernels of them. `linear`, `attention`, … take the C++ operator instead
when the tensors are on the CPU and `load()` has built the library. In C++ a row's result has the same bits whatever the
number of rows in the call, which the matrix products behind F.linear do not promise.

C++ reads integer weights in panels: 8 rows interleaved, in the order in which a core wants them. Weights are stored
row by row, and so the references have them; a layer's `pack` makes panels of them, once, after loading.
"""

import contextlib
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

# --------------------------------------------------------------------------------------------------- the references


def _input(x: Tensor, norm: Tensor | None, eps: float, gated: bool) -> Tensor:
    if gated:
        return silu_mul_reference(x)
    return x if norm is None else rms_norm_reference(x, norm, eps)


def linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """A linear layer, with the small steps around it that a transformer block has.

    Args:
        x: [..., K], or [..., 2 K] = (gate, up) when `gated`.
        weight: [N, K] of any float type.
        bias: [N] or None.
        norm, eps: weight [K] of an RMS norm of x before the layer, or None.
        gated: the layer's input is silu_mul(x).
        residual: [..., N], added to the result, or None.

    Returns:
        [..., N] in x's type.
    """
    x = _input(x, norm, eps, gated)
    y = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return y if residual is None else y + residual


def linear_int8_reference(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`linear_reference` where int8 weight [N, K] stands for weight * scales[:, None]; scales float32 [N]."""
    x = _input(x, norm, eps, gated)
    y = F.linear(x, weight.to(x.dtype)) * scales.to(x.dtype)
    y = y if bias is None else y + bias.to(x.dtype)
    return y if residual is None else y + residual


def dequantize_int4(weight: Tensor, scales: Tensor, mins: Tensor) -> Tensor:
    """uint8 [N, K/2] with scales and mins float16 [N, K/g] -> float32 [N, K], q * scale + min with q in 0..15.

    Each 16 bytes of a row hold 32 weights: byte j has weight j in its low nibble and weight j + 16 in its high one.
    """
    packed = weight.unflatten(1, (-1, 16))
    q = torch.cat((packed & 15, packed >> 4), dim=-1).flatten(1).unflatten(1, (scales.shape[1], -1))
    return (q.float() * scales.float().unsqueeze(-1) + mins.float().unsqueeze(-1)).flatten(1)


def linear_int4_reference(
    x: Tensor, weight: Tensor, scales: Tensor, mins: Tensor, bias: Tensor | None = None, *around, **named
) -> Tensor:
    """`linear_reference` with the weights of `dequantize_int4`; `around` and `named`: norm, eps, gated, residual."""
    return linear_reference(x, dequantize_int4(weight, scales, mins), bias, *around, **named)


PANEL = 8  # rows of weights that lie interleaved


def _panels(rows: Tensor) -> Tensor:
    """[N, ...] -> [N / 8 rounded up, ..., 8], filled up with zeros: what 8 rows have in one place lies together."""
    missing = -rows.shape[0] % PANEL
    rows = torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows
    return rows.unflatten(0, (-1, PANEL)).movedim(1, -1).clone(memory_format=torch.contiguous_format)


def _rows(panels: Tensor, n: int) -> Tensor:
    """The inverse of `_panels`, without what it filled up."""
    return panels.movedim(-1, 1).flatten(0, 1)[:n]


def int8_panels(weight: Tensor) -> Tensor:
    """int8 [N, K], K even, -> [N/8, K/2, 8, 2]: two columns of 8 rows, the next two, … (N/8 rounded up)."""
    return _panels(weight.contiguous().view(torch.int16)).view(torch.int8).unflatten(-1, (PANEL, 2))


def int8_rows(panels: Tensor, n: int) -> Tensor:
    """int8 [n, K] from its `int8_panels`."""
    return _rows(panels.flatten(2).view(torch.int16), n).contiguous().view(torch.int8)


def int4_panels(weight: Tensor, scales: Tensor, mins: Tensor) -> Tensor:
    """uint8 [N, K/2] with scales and mins float16 [N, K/g] -> int32 [N/8, K/g, g + 8]: for each group four bytes of
    8 rows, their next four, …, then 8 scales and 8 mins."""
    words = _panels(weight.contiguous().view(torch.int32).unflatten(1, (scales.shape[1], -1))).flatten(2)
    return torch.cat((words, *(_panels(each).view(torch.int32) for each in (scales, mins))), dim=2)


def int4_rows(panels: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """weight, scales and mins of n rows from their `int4_panels`."""
    words, scales, mins = panels.split((panels.shape[2] - PANEL, PANEL // 2, PANEL // 2), dim=2)
    weight = _rows(words.unflatten(2, (-1, PANEL)), n).flatten(1).contiguous().view(torch.uint8)
    return weight, *(_rows(each.contiguous().view(torch.float16), n) for each in (scales, mins))


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, in float32 (Zhang and Sennrich 2019, section 3)."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + eps)
    return y.to(x.dtype) * weight.to(x.dtype)


def silu_mul_reference(x: Tensor) -> Tensor:
    """x [..., 2 I] = (gate, up) -> silu(gate) * up, [..., I] (Shazeer 2020, section 2)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turns each pair (i, i + D/2) of x [B, S, heads, D] by its angle; rope [B, S, D/2, 2] has cosines and sines."""
    cos, sin = rope[:, :, None, :, 0], rope[:, :, None, :, 1]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def attention_reference(
    qkv: Tensor,
    rope: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    input_pos: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Writes the new keys and values into the cache and attends to positions 0 .. input_pos of it.

    Args:
        qkv: [B, S, (H + 2 Hkv) * D], the new tokens' queries, keys and values.
        rope: float32 [T, D/2, 2], cosine and sine of each position's angles (Su et al. 2021, section 3.4).
        k_cache, v_cache: [B, Hkv, T, D], changed in place at input_pos.
        input_pos: int64 [B, S], each token's position in the cache; every one below T.
        q_norm, k_norm: [D], weights of an RMS norm of each head before the rotation (Qwen3), or None.

    Returns:
        [B, S, H * D]. Query head h reads key-value head h // (H / Hkv) (Ainslie et al. 2023, section 2).
    """
    batch, length, _ = qkv.shape
    kv_heads, positions, dim = k_cache.shape[1:]
    if qkv.device.type == "cpu" and not torch.compiler.is_compiling():
        outside = input_pos[(input_pos < 0) | (input_pos >= positions)]
        if outside.numel():
            raise IndexError(f"position {outside[0].item()} is outside the cache, which has {positions} positions")
    q, k, v = qkv.unflatten(-1, (-1, dim)).split((qkv.shape[-1] // dim - 2 * kv_heads, kv_heads, kv_heads), dim=2)
    if q_norm is not None:
        q = rms_norm_reference(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm_reference(k, k_norm, eps)
    angles = rope[input_pos]
    q, k = rotate(q, angles), rotate(k, angles)
    rows = torch.arange(batch, device=qkv.device)[:, None]
    k_cache[rows, :, input_pos] = k.to(k_cache.dtype)
    v_cache[rows, :, input_pos] = v.to(v_cache.dtype)
    # The queries that share a key-value head become more rows of one head, so that keys are never repeated in memory.
    q = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, S, D]
    seen = torch.arange(positions, device=qkv.device) <= input_pos[:, None, None, :, None]  # [B, 1, 1, S, T]
    seen = seen.expand(-1, -1, q.shape[2], -1, -1).flatten(2, 3)
    y = F.scaled_dot_product_attention(q.flatten(2, 3), k_cache[:batch], v_cache[:batch], attn_mask=seen)
    return y.unflatten(2, (-1, length)).permute(0, 3, 1, 2, 4).flatten(2)


# -------------------------------------------------------------------------------------------------- the dispatchers

_native = False  # set by load(), cleared by disabled()


def native(x: Tensor) -> bool:
    """Whether operators on x run in C++."""
    return _native and x.device.type == "cpu"


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`linear_reference`, in C++ on the CPU."""
    run = torch.ops.onepass.linear.default if native(x) else linear_reference
    return run(x, weight, bias, norm, eps, gated, residual)


def linear_int8(
    x: Tensor,
    panels: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`linear_int8_reference` on `int8_panels`; in C++ the activations become int16, each row with its own scale."""
    if native(x):
        return torch.ops.onepass.linear_int8.default(x, panels, scales, bias, norm, eps, gated, residual)
    return linear_int8_reference(x, int8_rows(panels, scales.shape[0]), scales, bias, norm, eps, gated, residual)


def linear_int4(
    x: Tensor,
    panels: Tensor,
    rows: int,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`linear_int4_reference` on the `int4_panels` of so many rows; in C++ as `linear_int8`."""
    if native(x):
        return torch.ops.onepass.linear_int4.default(x, panels, rows, bias, norm, eps, gated, residual)
    return linear_int4_reference(x, *int4_rows(panels, rows), bias, norm, eps, gated, residual)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm_reference`, in C++ on the CPU."""
    if native(x):
        return torch.ops.onepass.rms_norm.default(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def silu_mul(x: Tensor) -> Tensor:
    """`silu_mul_reference`, in C++ on the CPU."""
    if native(x):
        return torch.ops.onepass.silu_mul.default(x)
    return silu_mul_reference(x)


def attention(
    qkv: Tensor,
    rope: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    input_pos: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """`attention_reference`; in C++ it costs what the context costs, whatever the cache's length.

    The C++ takes heads in vectors of 8; a head of, say, 100 (OpenLLaMA 3B) goes through the reference.
    """
    if native(qkv) and k_cache.shape[-1] % 8 == 0:
        return torch.ops.onepass.attention.default(qkv, rope, k_cache, v_cache, input_pos, q_norm, k_norm, eps)
    return attention_reference(qkv, rope, k_cache, v_cache, input_pos, q_norm, k_norm, eps)


def has_blocks(x: Tensor, head_dim: int) -> bool:
    """Whether `blocks` can run on x."""
    return native(x) and head_dim % 8 == 0


def blocks(x: Tensor, rope: Tensor, input_pos: Tensor, parts: Sequence[Tensor | None], eps: float) -> Tensor:
    """All transformer blocks of a model in one C++ call: x [B, S, dim] -> [B, S, dim].

    It calls the operators above and gives their bits; what it saves is a quarter of a decode step's time. Its reference
    is `model.TransformerBlock.forward`, block after block.

    Args:
        x, rope, input_pos: as for `attention_reference`; x is the embedding.
        parts: for each block its k_cache, v_cache, norm before attention, norm before feed-forward, q_norm and k_norm,
            then weight, scales and bias of wqkv, wo, w13 and w2, integer weights as panels, int4's scales in them. None
            stands for what is not there.
        eps: of all norms.
    """
    return torch.ops.onepass.blocks.default(x, rope, input_pos, parts, eps)


class Held:
    """The `parts` of a model's blocks, kept in C++ under a number that stands for them in compiled code.

    To fetch hundreds of tensors from a model's modules, and to hand them over, would take a tenth of a step.
    """

    numbers = itertools.count(1)

    def __init__(self, parts: Sequence[Tensor | None]):
        self.number = next(self.numbers)
        torch.ops.onepass.hold.default(self.number, parts)
        weakref.finalize(self, torch.ops.onepass.release.default, self.number).atexit = False


def held_blocks(x: Tensor, rope: Tensor, input_pos: Tensor, number: int, eps: float) -> Tensor:
    """`blocks` with the parts of the `Held` of that number, which must be alive."""
    return torch.ops.onepass.held_blocks.default(x, rope, input_pos, number, eps)


# ------------------------------------------------------------------------------------------------------- the library

_tried = False  # one attempt per process, whether it worked or not


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Within it the references run on the CPU too."""
    global _native
    before, _native = _native, False
    try:
        yield
    finally:
        _native = before


def load() -> bool:
    """Builds kernels.cpp on first use (10 to 20 s, then kept on disk) and loads it; False if that cannot be done.

    Reports on standard error when it builds, and when it cannot. The library's name is a hash of all that goes into it.
    It is built in a directory of its own and moved into place whole: a killed build leaves nothing to trip over, and
    processes that build at the same time do not meet.
    """
    global _native, _tried
    if not _tried:
        _tried = True
        try:
            torch.ops.load_library(str(build()))
            _register_fakes()
            _native = True
        except (OSError, RuntimeError, ValueError) as error:
            print(f"onepass: running on slower PyTorch operators, for kernels.cpp {error}", file=sys.stderr)
    return _native


def build() -> Path:
    """Returns the path of the compiled kernels.cpp, compiling it if it is not there yet."""
    source = Path(__file__).with_name("kernels.cpp")
    torch_dir = Path(torch.__file__).parent
    flags = ["-O3", "-march=native", "-std=c++20", "-ffp-contract=off", "-fPIC", "-shared"]
    flags += ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-fopenmp"]
    flags += [f"-isystem{torch_dir / 'include'}", f"-L{torch_dir / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        raise ValueError("needs a C++ compiler (c++, g++ or clang++, or name one in CXX)")
    cpu = platform.processor()  # -march=native is for this one; a home directory may be shared with others
    if os.path.exists("/proc/cpuinfo"):
        cpu = next((line for line in Path("/proc/cpuinfo").open() if line.startswith(("flags", "Features"))), cpu)
    key = hashlib.sha256("\0".join([source.read_text(), compiler, *flags, torch.__version__, cpu]).encode()).hexdigest()
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    library = Path(root) / "onepass" / f"{key[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        print("onepass: building kernels.cpp, once … ", end="", file=sys.stderr, flush=True)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            made = Path(scratch) / "kernels.so"
            run = subprocess.run([compiler, str(source), "-o", str(made), *flags], capture_output=True, text=True)
            if run.returncode:
                reason = next(
                    (line for line in run.stderr.splitlines() if "error" in line), f"exit code {run.returncode}"
                )
                raise ValueError(f"did not build with {compiler}: {reason}")
            os.replace(made, library)
        print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    return library


def _register_fakes() -> None:
    """Tells torch.compile the shapes that the operators return."""
    torch.library.register_fake("onepass::linear")(lambda x, w, *rest: x.new_empty(*x.shape[:-1], w.shape[0]))
    torch.library.register_fake("onepass::linear_int8")(lambda x, w, s, *rest: x.new_empty(*x.shape[:-1], s.shape[0]))
    torch.library.register_fake("onepass::linear_int4")(lambda x, w, rows, *rest: x.new_empty(*x.shape[:-1], rows))
    torch.library.register_fake("onepass::rms_norm")(lambda x, weight, eps: x.new_empty(x.shape))
    for name in ("blocks", "held_blocks"):
        torch.library.register_fake(f"onepass::{name}")(lambda x, *rest: x.new_empty(x.shape))
    torch.library.register_fake("onepass::silu_mul")(lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))

    torch.library.register_fake("onepass::attention")(
        lambda qkv, rope, k_cache, *rest: qkv.new_empty(
            *qkv.shape[:-1], qkv.shape[-1] - 2 * k_cache.shape[1] * k_cache.shape[3]
        )
    )
