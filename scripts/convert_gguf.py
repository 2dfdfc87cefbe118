"""Convert a GGUF file of the llama architecture to a Hugging Face checkpoint directory.

    python scripts/convert_gguf.py model.gguf checkpoints/my-model

Quantized tensors are dequantized exactly (`--dtype float32`, the default) or rounded once to a narrower type.
Two things differ between the formats and are worth knowing:

- GGUF stores the rows of the query and key projections in the order that suits an interleaved rotary embedding
  (pairs 0,1 | 2,3 | ...); Hugging Face's llama rotates halves (pairs 0,d/2 | 1,d/2+1 | ...). `unpermute` undoes it.
- A GGUF file names its pre-tokenizer; Hugging Face spells it out. Only those in PRE_TOKENIZERS are known here.

Tensors are streamed one by one, so memory stays at about one tensor. The directory appears whole or not at all.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

DTYPES = {"float32": (torch.float32, "F32"), "bfloat16": (torch.bfloat16, "BF16"), "float16": (torch.float16, "F16")}

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PRE_TOKENIZERS = {
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]}
}

# A tensor of the file, its Hugging Face name, its shape, and the number of heads to un-permute (or 0).
Match = tuple[gguf.ReaderTensor, str, tuple[int, ...], int]

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Map a GGUF file into memory. Raises ValueError naming the file when it is missing or damaged."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        return gguf.GGUFReader(path)
    except Exception as e:  # the reader has no error type of its own: a damaged file ends in whatever numpy raises
        raise ValueError(f"{path}: not a readable GGUF file (damaged or cut short): {e}") from e


def read_fields(reader: gguf.GGUFReader, path: Path) -> dict[str, Any]:
    """All key-value pairs of the file as plain Python values; a damaged one raises ValueError naming its key."""
    fields = {}
    for key, field in reader.fields.items():
        try:
            fields[key] = field.contents()
        except Exception as e:
            raise ValueError(f"{path}: {key}: not readable: {e}") from e
    return fields


def required(fields: dict[str, Any], key: str, path: Path) -> Any:
    """The value of `key`; ValueError if the file has none."""
    if key not in fields:
        raise ValueError(f"{path}: {key} is missing")
    return fields[key]


def check_sha256(path: Path, expected: str) -> None:
    """Raise ValueError unless the file's SHA-256 is `expected`, 64 hexadecimal digits."""
    if not re.fullmatch(r"[0-9a-fA-F]{64}", expected):
        raise ValueError(f"--sha256: {expected!r} is not 64 hexadecimal digits")
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as f:
            while block := f.read(1 << 20):
                digest.update(block)
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror}") from e
    if digest.hexdigest() != expected.lower():
        raise ValueError(f"{path}: SHA-256 is {digest.hexdigest()}, expected {expected}")


# ---------------------------------------------------------------------------------------------------------------------
# Configuration


def shortest(x: float) -> float | int:
    """The shortest decimal that is the same float32, as an int if it is one: 9.9999997e-06 -> 1e-05, 1e5 -> 100000."""
    x = float(str(np.float32(x)))
    return int(x) if x.is_integer() else x


def make_config(fields: dict[str, Any], tied: bool, dtype: str, path: Path) -> dict[str, Any]:
    """config.json of a Hugging Face `LlamaForCausalLM`. Raises ValueError for what this converter cannot carry over."""
    architecture = required(fields, "general.architecture", path)
    if architecture != "llama":
        raise ValueError(f"{path}: architecture {architecture!r} is not supported, only 'llama'")
    if fields.get("llama.expert_count"):
        raise ValueError(f"{path}: llama.expert_count: mixture-of-experts models are not supported")
    if fields.get("llama.rope.scaling.type", "none") != "none":
        raise ValueError(f"{path}: llama.rope.scaling.type: scaled rotary embeddings are not supported")

    dim = required(fields, "llama.embedding_length", path)
    heads = required(fields, "llama.attention.head_count", path)
    kv_heads = fields.get("llama.attention.head_count_kv", heads)
    for key, value in (("head_count", heads), ("head_count_kv", kv_heads)):
        if not isinstance(value, int) or value <= 0 or heads % value:
            raise ValueError(f"{path}: llama.attention.{key} is {value!r}, expected a divisor of the head count")
    head_dim = fields.get("llama.attention.key_length", dim // heads)
    if fields.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"{path}: llama.rope.dimension_count: rotating only a part of each head is not supported")
    if fields.get("llama.attention.value_length", head_dim) != head_dim:
        raise ValueError(f"{path}: llama.attention.value_length differs from the key length, which is not supported")

    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "dtype": dtype,
        "eos_token_id": required(fields, "tokenizer.ggml.eos_token_id", path),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": dim,
        "intermediate_size": required(fields, "llama.feed_forward_length", path),
        "max_position_embeddings": required(fields, "llama.context_length", path),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": required(fields, "llama.block_count", path),
        "num_key_value_heads": kv_heads,
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": shortest(required(fields, "llama.attention.layer_norm_rms_epsilon", path)),
        "rope_scaling": None,
        "rope_theta": shortest(fields.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,  # the name of `dtype` before transformers 5
        "use_cache": True,
        "vocab_size": len(required(fields, "tokenizer.ggml.tokens", path)),
    }
    return config


def make_generation_config(config: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json: the ids that begin, end and pad a sequence."""
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] is not None}


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer


def make_tokenizer(fields: dict[str, Any], path: Path) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE from the GGUF's tokens, token types and merges.

    Raises ValueError naming the tokenizer model, pre-tokenizer or token type that is not known here.
    """
    model = required(fields, "tokenizer.ggml.model", path)
    if model != "gpt2":
        raise ValueError(f"{path}: tokenizer model {model!r} is not supported, only 'gpt2' (byte-level BPE)")
    pre = fields.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(map(repr, PRE_TOKENIZERS))
        raise ValueError(f"{path}: pre-tokenizer {pre!r} is not supported, only {known}")

    tokens = required(fields, "tokenizer.ggml.tokens", path)
    types = required(fields, "tokenizer.ggml.token_type", path)
    if len(types) != len(tokens):
        raise ValueError(f"{path}: {len(tokens)} tokens but {len(types)} token types")
    added = []
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind not in (NORMAL, CONTROL, USER_DEFINED):
            raise ValueError(f"{path}: token {i} ({token!r}) has type {kind}, which byte-level BPE has no use for")
        if kind != NORMAL:
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            added.append({"id": i, "content": token, **flags, "special": kind == CONTROL})

    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": {**BYTE_LEVEL, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": required(fields, "tokenizer.ggml.merges", path),
        },
    }


def make_tokenizer_config(fields: dict[str, Any], config: dict[str, Any], path: Path) -> dict[str, Any]:
    """tokenizer_config.json: special tokens by role, and the chat template if the GGUF has one."""
    result = {
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": bool(fields.get("tokenizer.ggml.add_space_prefix", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            if not 0 <= token_id < config["vocab_size"]:
                raise ValueError(f"{path}: tokenizer.ggml.{key}_token_id is {token_id}, outside the vocabulary")
            result[f"{name}_token"] = fields["tokenizer.ggml.tokens"][token_id]
    if "tokenizer.chat_template" in fields:
        result["chat_template"] = fields["tokenizer.chat_template"]
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def unpermute(weight: np.ndarray, n_head: int) -> np.ndarray:
    """Rows of a query or key projection [n_head * head_dim, dim]: from interleaved rotary pairs to half-split ones.

    Within a head, row 2i + s goes to row s * head_dim / 2 + i.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(n_head, rows // n_head // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def expected_tensors(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """GGUF name -> (Hugging Face name, shape, number of heads to un-permute or 0), in the order they are stored."""
    dim, hidden, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    block = {
        "attn_norm": ("input_layernorm", (dim,), 0),
        "attn_q": ("self_attn.q_proj", (heads * head_dim, dim), heads),
        "attn_k": ("self_attn.k_proj", (kv_heads * head_dim, dim), kv_heads),
        "attn_v": ("self_attn.v_proj", (kv_heads * head_dim, dim), 0),
        "attn_output": ("self_attn.o_proj", (dim, heads * head_dim), 0),
        "ffn_norm": ("post_attention_layernorm", (dim,), 0),
        "ffn_gate": ("mlp.gate_proj", (hidden, dim), 0),
        "ffn_up": ("mlp.up_proj", (hidden, dim), 0),
        "ffn_down": ("mlp.down_proj", (dim, hidden), 0),
    }
    table = {"token_embd.weight": ("model.embed_tokens.weight", (config["vocab_size"], dim), 0)}
    for layer in range(config["num_hidden_layers"]):
        for name, (hf_name, shape, n_head) in block.items():
            table[f"blk.{layer}.{name}.weight"] = (f"model.layers.{layer}.{hf_name}.weight", shape, n_head)
    table["output_norm.weight"] = ("model.norm.weight", (dim,), 0)
    if not config["tie_word_embeddings"]:
        table["output.weight"] = ("lm_head.weight", (config["vocab_size"], dim), 0)
    return table


def match_tensors(present: dict[str, gguf.ReaderTensor], config: dict[str, Any], path: Path) -> list[Match]:
    """Pair each expected tensor with the file's. One too many, too few or of another shape raises ValueError."""
    expected = expected_tensors(config)
    matches = []
    for name in present:
        if name not in expected:
            raise ValueError(f"{path}: tensor {name} is not part of a plain llama model and cannot be converted")
    for name, (hf_name, shape, n_head) in expected.items():
        if name not in present:
            raise ValueError(f"{path}: tensor {name} is missing")
        found = tuple(int(n) for n in reversed(present[name].shape))  # GGUF lists the fastest dimension first
        if found != shape:
            raise ValueError(f"{path}: tensor {name} has shape {found}, expected {shape}")
        matches.append((present[name], hf_name, shape, n_head))
    return matches


def write_weights(matches: list[Match], dtype: str, path: Path, out: Path) -> None:
    """Write `out` (safetensors), one dequantized tensor in memory at a time. `path` is for error messages.

    The format is 8 bytes for the header's length, a JSON header of names, types, shapes and byte ranges, and the data.
    """
    torch_dtype, code = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for _, hf_name, shape, _ in matches:
        start, end = end, end + int(np.prod(shape)) * torch_dtype.itemsize
        header[hf_name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    with open(out, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for i, (tensor, _, shape, n_head) in enumerate(matches, 1):
            try:
                weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False).reshape(shape)
            except (NotImplementedError, ValueError) as e:
                kind = tensor.tensor_type.name
                raise ValueError(f"{path}: tensor {tensor.name}: cannot dequantize type {kind}: {e}") from e
            if n_head:
                weight = unpermute(weight, n_head)
            stored = torch.from_numpy(np.array(weight)).to(torch_dtype)
            if not torch.isfinite(stored).all():
                raise ValueError(f"{path}: tensor {tensor.name} has values that are not finite in {dtype}")
            stored.view(torch.uint8).numpy().tofile(f)
            if i % 30 == 0 or i == len(matches):
                print(f"  {i}/{len(matches)} tensors, {f.tell() / 1e6:.0f} MB", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# The directory


def convert(path: Path, out: Path, dtype: str = "float32") -> None:
    """Convert the GGUF file `path` into the new directory `out`; weights in `dtype`, a key of DTYPES.

    Raises ValueError naming what is wrong, before anything is written where it can be told by then. `out` appears
    whole: it is written beside under another name, then renamed.
    """
    if out.exists():
        raise ValueError(f"{out}: already exists; remove it first or name another directory")
    reader = open_gguf(path)
    fields = read_fields(reader, path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = make_config(fields, "output.weight" not in tensors, dtype, path)
    matches = match_tensors(tensors, config, path)
    files = {
        "config.json": config,
        "generation_config.json": make_generation_config(config),
        "tokenizer.json": make_tokenizer(fields, path),
        "tokenizer_config.json": make_tokenizer_config(fields, config, path),
    }

    print(f"converting {path.name} to {out} ({dtype})", file=sys.stderr, flush=True)
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    partial.mkdir(parents=True)
    try:
        for name, content in files.items():
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (partial / name).write_text(text, encoding="utf-8")
        write_weights(matches, dtype, path, partial / "model.safetensors")
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, or 2 after one line on standard error."""
    parser = argparse.ArgumentParser(description="Convert a GGUF file (llama) to a Hugging Face directory.")
    parser.add_argument("gguf", type=Path, help="the .gguf file")
    parser.add_argument("output", type=Path, help="the directory to make; must not exist")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="type of the stored weights (float32)")
    parser.add_argument("--sha256", metavar="HEX", help="refuse the file unless its SHA-256 is this")
    args = parser.parse_args(argv)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that the partial directory is removed
    try:
        if args.sha256 is not None:
            check_sha256(args.gguf, args.sha256)
        convert(args.gguf, args.output, args.dtype)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
