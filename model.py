"""A Llama-family decoder with a static key/value cache.

Read it from the bottom up or the top down: `ModelArgs` says what shapes a checkpoint has, `Transformer` walks a token
through its layers, and each layer is `x + attention(norm(x))`, then `x + feed_forward(norm(x))`. What differs between
Llama 2/3, Mistral, SmolLM, Qwen2.5 and Qwen3 is data: it stands in `ModelArgs`, never in a branch on a model's name.

Two things are unusual. The query, key and value projections are one matrix (`wqkv`), and so are the gate and up
projections (`w13`): decoding one token is bound by reading weights, and one long read beats three short ones. And the
arithmetic is called through `kernels`, which runs a C++ operator on the CPU and plain PyTorch everywhere else.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import kernels

# What each `model_type` of a config.json adds to the common Llama layer.
FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}


@dataclass(kw_only=True)
class ModelArgs:
    """Sizes and constants of a model. Field names follow the Llama papers; `from_config` reads them from a file."""

    block_size: int = 2048  # the longest context the model was trained for, in tokens
    vocab_size: int
    n_layer: int
    n_head: int
    n_local_heads: int | None = None  # key/value heads; fewer than n_head is grouped-query attention
    dim: int
    intermediate_size: int
    head_dim: int | None = None  # dim / n_head unless the checkpoint says otherwise (Qwen3, Mistral-Nemo)
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    rope_scaling: dict | None = None  # Llama 3.1's, as in config.json
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # attention beyond it is not computed: see `setup_caches`

    def __post_init__(self):
        self.n_local_heads = self.n_local_heads or self.n_head
        self.head_dim = self.head_dim or self.dim // self.n_head
        if self.n_head % self.n_local_heads:
            raise ValueError(f"{self.n_head} heads cannot share {self.n_local_heads} key/value heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"a head of {self.head_dim} cannot be rotated: rotary embedding turns pairs")

    @classmethod
    def from_config(cls, path: str | Path) -> "ModelArgs":
        """Read a Hugging Face `config.json` (the file, or the directory that holds it).

        Raises ValueError, naming the file and the entry, for whatever it asks that this code does not compute.
        """
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{path}: no such file; a checkpoint directory holds a config.json") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not valid JSON ({error})") from None
        if not isinstance(config, dict):
            raise ValueError(f"{path}: a JSON object is expected")

        def refuse(entry: str, expected: str) -> None:
            raise ValueError(f"{path}: {entry} is {json.dumps(config.get(entry))}, but this code computes {expected}")

        def integer(entry: str, default: int | None = None) -> int:
            value = config.get(entry)
            value = default if value is None else value
            if type(value) is not int or not 1 <= value < 2**31:
                raise ValueError(f"{path}: {entry} is {json.dumps(value)}; a positive integer is expected")
            return value

        def number(entry: str, source: dict, default: float) -> float:
            value = source.get(entry, default)
            if type(value) not in (int, float) or not value > 0:
                raise ValueError(f"{path}: {entry} is {json.dumps(value)}; a positive number is expected")
            return float(value)

        family = config.get("model_type")
        if family not in list(FAMILIES):
            refuse("model_type", f"only {', '.join(FAMILIES)}")
        if config.get("hidden_act", "silu") != "silu":
            refuse("hidden_act", 'only "silu"')
        for entry in ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"):
            if config.get(entry):
                refuse(entry, "no mixture of experts")
        for entry in ("attention_bias", "mlp_bias"):
            if config.get(entry) and not (entry == "attention_bias" and family == "qwen2"):
                refuse(entry, "no such bias (q, k and v biases are Qwen2's only)")
        if config.get("quantization_config"):
            refuse("quantization_config", "only float checkpoints and those that quantize.py wrote")

        # transformers 5 writes one "rope_parameters"; earlier versions "rope_theta" and "rope_scaling".
        rope = config.get("rope_parameters") or {}
        scaling = config.get("rope_scaling") or rope
        for entry, value in (("rope_parameters", rope), ("rope_scaling", scaling)):
            if not isinstance(value, dict):
                refuse(entry, "what an object or null says")
        for source in (rope, scaling):
            kind = source.get("rope_type", source.get("type", "default"))
            if kind not in ("default", "llama3"):
                raise ValueError(
                    f'{path}: rope_scaling type {json.dumps(kind)} is not computed here, only "default" and "llama3"'
                )
            if kind == "default" and ("factor" in source or any(isinstance(value, dict) for value in source.values())):
                raise ValueError(
                    f"{path}: rope_scaling {json.dumps(source)} is of no type; one for all layers is computed here, "
                    'of type "llama3"'
                )
        if kind == "llama3":
            for entry in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
                if entry not in scaling:
                    raise ValueError(f"{path}: rope_scaling of type llama3 lacks {entry}")
                number(entry, scaling, 0)
        if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1)) not in (None, 1, 1.0):
            refuse("partial_rotary_factor", "the rotation of whole heads only")

        dim, n_head = integer("hidden_size"), integer("num_attention_heads")
        if config.get("head_dim") is None and dim % n_head:
            refuse("hidden_size", f"heads of one size, and {n_head} (num_attention_heads) do not divide it")
        # Qwen2.5 states a window and then switches it off; Mistral 7B v0.1 states one and means it.
        means_it = family == "mistral" or config.get("use_sliding_window")
        layer_types = set(config.get("layer_types") or ())
        if layer_types - {"full_attention"} and not (
            means_it and layer_types <= {"full_attention", "sliding_attention"}
        ):
            refuse("layer_types", '"full_attention" only')
        window = integer("sliding_window") if means_it and config.get("sliding_window") is not None else None
        sizes = {
            "block_size": integer("max_position_embeddings", 2048),
            "vocab_size": integer("vocab_size"),
            "n_layer": integer("num_hidden_layers"),
            "n_head": n_head,
            "n_local_heads": integer("num_key_value_heads", n_head),
            "dim": dim,
            "intermediate_size": integer("intermediate_size"),
            "head_dim": integer("head_dim", dim // n_head),
            "rope_base": number("rope_theta", rope if "rope_theta" in rope else config, 10000.0),
            "norm_eps": number("rms_norm_eps", config, 1e-6),
            "rope_scaling": scaling if kind == "llama3" else None,
            "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
            "sliding_window": window,
        }
        try:
            return cls(**sizes, **FAMILIES[family])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def rotary_table(args: ModelArgs, length: int, device: torch.device | str) -> Tensor:
    """Cosines and sines of every position: float32 [length, head_dim / 2, 2] (RoFormer, Su et al. 2021, section 3.2).

    Llama 3.1 stretches the slow rotations by `factor` to reach a longer context and leaves the fast ones as they are,
    with a linear ramp between, on the number of turns that a rotation makes in the original context.
    """
    exponents = torch.arange(0, args.head_dim, 2, dtype=torch.float32, device=device) / args.head_dim
    frequency = 1.0 / (args.rope_base**exponents)
    if args.rope_scaling:
        scaling = args.rope_scaling
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        fast = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = fast * frequency + (1 - fast) * frequency / scaling["factor"]
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequency)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


class Linear(nn.Linear):
    """A linear layer whose product is `kernels.linear`: weight [out, in] in the model's precision.

    `around` is what may be done in the same operator, since on a CPU a call costs as much as a small layer: `norm` and
    `eps`, an RMS norm of x; `gated`, silu(gate) * up of x = (gate, up); `residual`, a sum with the result.
    """

    def forward(self, x: Tensor, **around: Tensor | float | bool) -> Tensor:
        return kernels.linear(x, self.weight, self.bias, **around)

    def operands(self) -> tuple[Tensor | None, ...]:
        """Weight, scales and bias, for `kernels.blocks`."""
        return self.weight, None, self.bias


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019, equation 4)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


class KVCache(nn.Module):
    """Keys and values of one layer, [B, KV heads, length, head_dim] each, allocated once.

    Nothing is ever erased: a query at position p reads positions 0 … p, so moving the position back is a rollback.
    """

    def __init__(
        self, batch_size: int, heads: int, length: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ):
        super().__init__()
        shape = (batch_size, heads, length, head_dim)
        self.register_buffer("k", torch.zeros(shape, dtype=dtype, device=device), persistent=False)
        self.register_buffer("v", torch.zeros(shape, dtype=dtype, device=device), persistent=False)

    def rows(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """The caches of the first `batch_size` rows."""
        if batch_size == self.k.shape[0]:
            return self.k, self.v
        return self.k[:batch_size], self.v[:batch_size]


class Attention(nn.Module):
    """Causal self-attention, several query heads to one key/value head (GQA, Ainslie et al. 2023)."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        heads = args.n_head + 2 * args.n_local_heads
        self.wqkv = Linear(args.dim, heads * args.head_dim, bias=args.qkv_bias)
        self.wo = Linear(args.n_head * args.head_dim, args.dim, bias=False)
        self.q_norm = RMSNorm(args.head_dim, args.norm_eps) if args.qk_norm else None
        self.k_norm = RMSNorm(args.head_dim, args.norm_eps) if args.qk_norm else None
        self.norm_eps = args.norm_eps
        self.kv_cache: KVCache | None = None

    def forward(self, x: Tensor, norm: RMSNorm, rope: Tensor, input_pos: Tensor) -> Tensor:
        """x + wo(attention(wqkv(norm(x)))) for x [B, S, dim]."""
        k_cache, v_cache = self.kv_cache.rows(x.shape[0])
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        qkv = self.wqkv(x, norm=norm.weight, eps=norm.eps)
        y = kernels.attention(qkv, rope, k_cache, v_cache, input_pos, q_norm, k_norm, self.norm_eps)
        return self.wo(y, residual=x)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(gate(x)) * up(x)), gate and up stacked in w13 (Shazeer 2020, equation 6)."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.w13 = Linear(args.dim, 2 * args.intermediate_size, bias=False)
        self.w2 = Linear(args.intermediate_size, args.dim, bias=False)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """x + w2(silu(gate) * up), with (gate, up) = w13(norm(x)), for x [B, S, dim]."""
        return self.w2(self.w13(x, norm=norm.weight, eps=norm.eps), gated=True, residual=x)


class TransformerBlock(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.attention = Attention(args)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)
        self.feed_forward = FeedForward(args)

    # The layers are alike, so torch.compile may compile one and call it n_layer times: 3 to 4 times sooner ready.
    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, rope: Tensor, input_pos: Tensor) -> Tensor:
        x = self.attention(x, self.attention_norm, rope, input_pos)
        return self.feed_forward(x, self.ffn_norm)

    def parts(self) -> list[Tensor | None] | None:
        """What `kernels.blocks` takes to do what `forward` does; None where a linear layer is more than its product (a
        sum over processes, in tp.py), has hooks, or is not packed for it."""
        at, ff = self.attention, self.feed_forward
        norms = (self.attention_norm, self.ffn_norm, at.q_norm, at.k_norm)
        parts = [at.kv_cache.k, at.kv_cache.v, *(None if norm is None else norm.weight for norm in norms)]
        for layer in (at.wqkv, at.wo, ff.w13, ff.w2):
            operands = layer.operands() if hasattr(layer, "operands") else None
            if operands is None or layer._forward_pre_hooks or layer._forward_hooks:
                return None
            parts += operands
        return parts


class Transformer(nn.Module):
    """The model. Call `setup_caches` once, then `model(idx, input_pos)` for prompts and single tokens alike."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        # Normal numbers, its own initialization, would on "meta" import the compiler: 70 MB and a second.
        table = torch.empty(args.vocab_size, args.dim).uniform_(-1, 1)
        self.tok_embeddings = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.n_layer))
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = Linear(args.dim, args.vocab_size, bias=False)
        if args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.max_batch_size = self.max_seq_length = 0
        self.holding = False
        self.held: kernels.Held | None = None
        self.held_number = 0
        self.register_buffer("rope", None, persistent=False)

    def setup_caches(self, max_batch_size: int, max_seq_length: int) -> None:
        """Allocate keys, values and the rotary table for that many rows and positions. What is large enough is kept.

        Raises ValueError where `max_seq_length` is more than the model's context.
        """
        limit, what = self.args.block_size, "the model's context"
        if self.args.sliding_window and self.args.sliding_window < limit:
            limit, what = self.args.sliding_window, "its sliding attention window, which is not computed here,"
        if max_seq_length > limit:
            raise ValueError(f"{max_seq_length} positions are asked for, but {what} has {limit}")
        if max_batch_size <= self.max_batch_size and max_seq_length <= self.max_seq_length:
            return
        self.max_batch_size = max(max_batch_size, self.max_batch_size)
        self.max_seq_length = max(max_seq_length, self.max_seq_length)
        device, dtype = self.norm.weight.device, self.norm.weight.dtype
        self.rope = rotary_table(self.args, self.max_seq_length, device)
        for layer in self.layers:
            layer.attention.kv_cache = None  # freed before its successor is allocated
            layer.attention.kv_cache = KVCache(
                self.max_batch_size, self.args.n_local_heads, self.max_seq_length, self.args.head_dim, dtype, device
            )
        if self.holding:
            self.hold()

    def hold(self) -> None:
        """Fetch the tensors of the blocks now, not before each pass, for the operator that does all blocks in one.

        For compiled code: from now on weights may change in place, but another tensor in their place goes unseen.
        """
        self.holding = True
        ready = self.max_seq_length > 0 and kernels.has_blocks(self.norm.weight, self.args.head_dim)
        parts = self.parts() if ready else None
        self.held = kernels.Held(parts) if parts else None
        self.held_number = self.held.number if self.held else 0

    def parts(self) -> list[Tensor | None] | None:
        """All blocks' `TransformerBlock.parts`, one after the other; None if a block has none."""
        parts = [layer.parts() for layer in self.layers]
        return None if None in parts else sum(parts, [])

    def share_prompt(self, rows: int, length: int) -> None:
        """Copy the keys and values of the first row's first `length` positions to the other `rows` - 1."""
        for layer in self.layers:
            for cache in layer.attention.kv_cache.buffers():
                cache[1:rows, :, :length] = cache[:1, :, :length]

    def check_positions(self, idx: Tensor, input_pos: Tensor) -> Tensor:
        """`input_pos` as [B, S]. Raises IndexError for one outside the cache (a GPU, not to be waited for, asserts)."""
        if not torch.compiler.is_compiling() and input_pos.device.type == "cpu":
            for position in (input_pos,) if input_pos.numel() == 1 else input_pos.aminmax():
                if not 0 <= int(position) < self.max_seq_length:
                    raise IndexError(f"position {int(position)} is outside the cache, which has {self.max_seq_length}")
        return input_pos.expand(idx.shape)

    def all_layers(self, x: Tensor, input_pos: Tensor) -> Tensor:
        """The blocks, one after the other, x [B, S, dim] to the same.

        On a CPU one operator does all of it. It knows the blocks as they are here: who changes them leaves it out.
        """
        if kernels.has_blocks(x, self.args.head_dim):
            if self.held_number:
                return kernels.held_blocks(x, self.rope, input_pos, self.held_number, self.args.norm_eps)
            parts = self.parts()
            if parts:
                return kernels.blocks(x, self.rope, input_pos, parts, self.args.norm_eps)
        for layer in self.layers:
            x = layer(x, self.rope, input_pos)
        return x

    def forward(self, idx: Tensor, input_pos: Tensor, logits_to_keep: int = 0) -> Tensor:
        """Logits [B, S, vocab] of the tokens `idx` int64 [B, S] at positions `input_pos` int64 [S] or [B, S].

        Each row's positions are consecutive; what its cache holds before them is its context. `logits_to_keep` n > 0
        returns the last n positions only (a prompt needs one, and all of them would be large).
        Raises IndexError for a position outside the cache, before anything is written.
        """
        input_pos = self.check_positions(idx, input_pos)
        x = self.tok_embeddings(idx).to(self.norm.weight.dtype)
        x = self.all_layers(x, input_pos)
        if logits_to_keep:
            x = x[:, -logits_to_keep:]
        return self.output(x, norm=self.norm.weight, eps=self.norm.eps)
