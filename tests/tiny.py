"""Tiny random models for the tests: Hugging Face checkpoint directories, and `Transformer`s without a file.

    path = write_checkpoint(tmp_path / "m", family="qwen3", tie_word_embeddings=True)  # overrides are config.json's
    model = tiny_transformer(seed=1, n_layer=3)  # overrides are ModelArgs'
    draft = tiny_transformer(seed=1, n_layer=3, noise=0.2)  # the same weights and some noise: often agrees with it

The default sizes suit every feature: 32 and 64 divide all widths, 2 the heads. The tokenizer is byte-level with an
`im_start` and an `im_end`; its vocabulary has exactly the size of the model.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import kernels
from model import ModelArgs, RMSNorm, Transformer

# The tokenizer's ids: three control tokens, the 256 bytes, and as many merges.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS, IM_START, IM_END = 0, 1, 2
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "i n", "i t", "Ġ t", "Ġ a"]
VOCAB_SIZE = len(SPECIAL) + 256 + len(MERGES)  # 272
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMA31_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BASE = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
}
# What each kind of model changes in that config.json, in the words of its published files.
FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False, "rope_scaling": None},
    "llama3": {"rope_theta": 500000.0, "rope_scaling": LLAMA31_SCALING},
    "llama32": {
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA31_SCALING | {"factor": 32.0},
        "tie_word_embeddings": True,
    },
    "mistral": {"model_type": "mistral", "rope_theta": 1e6, "sliding_window": None, "head_dim": 24},
    "qwen2": {
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": 32,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "model_type": "qwen3",
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "head_dim": 32,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
    },
    "odd": {"hidden_size": 90, "intermediate_size": 77, "num_attention_heads": 9, "num_key_value_heads": 3},  # D = 10
}


def make_config(family: str = "llama", **overrides) -> dict:
    """The config.json of a family; an override of ... (Ellipsis) leaves the entry out."""
    config = BASE | FAMILIES[family] | overrides
    return {key: value for key, value in config.items() if value is not ...}


def make_tensors(config: dict, seed: int = 0, noise: float = 0.0) -> dict[str, Tensor]:
    """Random float32 weights under Hugging Face's names. Logits have a standard deviation of about 2."""
    dim, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or dim // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], dim), "model.norm.weight": (dim,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], dim)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {layer + "input_layernorm.weight": (dim,), layer + "post_attention_layernorm.weight": (dim,)}
        for name, out in (("q", q), ("k", kv), ("v", kv)):
            shapes[layer + f"self_attn.{name}_proj.weight"] = (out, dim)
            if config["model_type"] == "qwen2":
                shapes[layer + f"self_attn.{name}_proj.bias"] = (out,)
        if config["model_type"] == "qwen3":
            shapes |= {layer + f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
        shapes[layer + "self_attn.o_proj.weight"] = (dim, q)
        shapes |= {layer + f"mlp.{name}_proj.weight": (inner, dim) for name in ("gate", "up")}
        shapes[layer + "mlp.down_proj.weight"] = (dim, inner)

    generator = torch.Generator().manual_seed(seed)
    other = torch.Generator().manual_seed(seed + 10_000)
    tensors = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=generator) + noise * torch.randn(shape, generator=other)
        tensors[name] = (
            1 + 0.1 * x if name.endswith("norm.weight") else 0.1 * x if len(shape) == 1 else x * 2 / dim**0.5
        )
    return tensors


def write_tensors(path: Path, tensors: dict[str, Tensor], shards: int = 1) -> None:
    """Write `model.safetensors`, or that many shards and their index."""
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, path / file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_tokenizer(path: Path, eos: int | list[int] = IM_END) -> None:
    """Write the byte-level tokenizer.json, its tokenizer_config.json (chat template) and generation_config.json."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    tokens = SPECIAL + letters + [merge.replace(" ", "") for merge in MERGES]
    spec = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": text, "special": True, "normalized": False, "single_word": False,
             "lstrip": False, "rstrip": False}
            for i, text in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": MERGES},
    }  # fmt: skip
    config = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")


def write_checkpoint(
    path: str | Path,
    family: str = "llama",
    *,
    seed: int = 0,
    noise: float = 0.0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    eos: int | list[int] = IM_END,
    **overrides,
) -> Path:
    """Write a checkpoint directory of one of FAMILIES: weights, config, tokenizer. Returns its path.

    overrides are entries of config.json (`...` leaves one out). eos goes into generation_config.json.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = make_config(family, **overrides)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {name: tensor.to(dtype) for name, tensor in make_tensors(config, seed, noise).items()}
    write_tensors(path, tensors, shards)
    write_tokenizer(path, eos)
    return path


def tiny_transformer(seed: int = 0, *, noise: float = 0.0, **overrides) -> Transformer:
    """A random float32 model on the CPU, with the sizes of the "llama" family; overrides are `ModelArgs` fields.

    The C++ operators are loaded where they can be built, as `load_model` does it.
    """
    kernels.load()
    sizes = {
        "block_size": 256,
        "vocab_size": VOCAB_SIZE,
        "n_layer": 2,
        "n_head": 4,
        "n_local_heads": 2,
        "dim": 64,
        "intermediate_size": 128,
    }
    model = Transformer(ModelArgs(**sizes | overrides)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    other = torch.Generator().manual_seed(seed + 10_000)
    norms = {id(module.weight) for module in model.modules() if isinstance(module, RMSNorm)}
    for parameter in model.parameters():
        x = torch.randn(parameter.shape, generator=generator) + noise * torch.randn(parameter.shape, generator=other)
        scale = 0.1 if parameter.dim() == 1 else 2 / model.args.dim**0.5
        parameter.copy_(x * scale + (1 if id(parameter) in norms else 0))
    return model
