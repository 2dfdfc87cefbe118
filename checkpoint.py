"""From a Hugging Face directory to a `Transformer`: which files, which tensors, and where each of them goes.

Tensors are memory-mapped one at a time and copied straight into the fused layout, so the peak is one copy of the
weights plus one tensor. Only safetensors are read: a pickle can run code.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

import kernels
import quantize
from model import ModelArgs, RMSNorm, Transformer

# Our module -> the Hugging Face modules whose rows it stacks. "{}" is the layer.
SOURCES = {
    "tok_embeddings": ["model.embed_tokens"],
    "layers.{}.attention_norm": ["model.layers.{}.input_layernorm"],
    "layers.{}.attention.wqkv": [f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkv"],
    "layers.{}.attention.q_norm": ["model.layers.{}.self_attn.q_norm"],
    "layers.{}.attention.k_norm": ["model.layers.{}.self_attn.k_norm"],
    "layers.{}.attention.wo": ["model.layers.{}.self_attn.o_proj"],
    "layers.{}.ffn_norm": ["model.layers.{}.post_attention_layernorm"],
    "layers.{}.feed_forward.w13": [f"model.layers.{{}}.mlp.{x}_proj" for x in ("gate", "up")],
    "layers.{}.feed_forward.w2": ["model.layers.{}.mlp.down_proj"],
    "norm": ["model.norm"],
    "output": ["lm_head"],
}


def sources(name: str) -> list[str]:
    """The stored tensors that make up `name`, a parameter or buffer of a `Transformer`, in the order of their rows."""
    module, _, tensor = name.rpartition(".")
    parts = module.split(".")
    layer = parts[1] if parts[0] == "layers" else ""
    if layer:
        parts[1] = "{}"
    return [f"{source.format(layer)}.{tensor}" for source in SOURCES[".".join(parts)]]


def weight_files(path: str | Path) -> list[Path]:
    """The safetensors files of a checkpoint: `path` itself if it is one, else those that its directory lists."""
    path = Path(path)
    if path.is_file():
        if path.suffix == ".safetensors":
            return [path]
        path = path.parent
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or directory; a checkpoint is a directory with a config.json")
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            names = []
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f'{index}: a JSON object with a "weight_map" from tensors to files is expected')
        for name in names:
            if not (path / name).is_file() or (path / name).parent != path:
                raise ValueError(f"{path / name}: no such file, but {index.name} lists it")
        return [path / name for name in names]
    raise ValueError(f"{path}: neither model.safetensors nor model.safetensors.index.json is there")


@contextmanager
def opened(file: Path) -> Iterator:
    """A safetensors file, memory-mapped until the block ends; what is wrong with it in one line."""
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error})") from None


def tensor_index(files: list[Path]) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Every stored tensor: its name -> (file, shape). Only headers are read."""
    index = {}
    for file in files:
        with opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118 (a handle is no dict)
                index[name] = (file, tuple(handle.get_slice(name).get_shape()))
    if not index:
        raise ValueError(f"{files[0]}: holds no tensor")
    return index


def fill(target: Tensor, name: str, index: dict, rank: int, world_size: int) -> None:
    """Copy the stored tensors of `name` into `target`, this rank's slice of them where `target` is smaller.

    A sharded layer is built with its local size: the dimension in which the stored tensor is `world_size` times larger
    is the one that it is cut along, each source on its own (so each rank gets its share of q, k and v).
    """
    names = sources(name)
    for source in names:
        if source not in index:
            raise ValueError(f"{next(iter(index.values()))[0].parent}: tensor {source} is missing")
    shapes = [index[source][1] for source in names]
    whole = (sum(shape[0] for shape in shapes if shape), *shapes[0][1:])
    cut = [dim for dim in range(len(whole)) if len(whole) == target.dim() and whole[dim] != target.shape[dim]]
    # Keys and values, gate and up are alike; only queries have more rows.
    alike = all(shape[1:] == shapes[0][1:] for shape in shapes) and shapes[-1] == shapes[-2:][0]
    fits = alike and len(whole) == target.dim()
    if not fits or len(cut) > 1 or any(whole[dim] != target.shape[dim] * world_size for dim in cut):
        found = " + ".join(f"{source} {list(shape)}" for source, shape in zip(names, shapes, strict=True))
        raise ValueError(f"{index[names[0]][0]}: {found} cannot fill {name} {list(target.shape)}")
    row = 0
    for source, shape in zip(names, shapes, strict=True):
        file = index[source][0]
        with opened(file) as handle:  # opened for one tensor, so that its pages are given back
            slices = [slice(None)] * len(shape)
            for dim in cut:
                share = shape[dim] // world_size
                slices[dim] = slice(rank * share, (rank + 1) * share)
            part = handle.get_slice(source)[tuple(slices)]
            if part.dtype.is_floating_point != target.dtype.is_floating_point:
                raise ValueError(f"{file}: {source} is {part.dtype}, but {name} takes {target.dtype}")
            target[row : row + part.shape[0]].copy_(part)
            row += part.shape[0]


def materialize(
    model: Transformer, tied: bool, device: torch.device, precision: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Give all that a model built on "meta" stores its memory on `device`; yields each tensor's name and the tensor, to
    be filled before the next one is allocated. A `tied` head stays as it is."""
    activations = torch.float32 if device.type == "cpu" else precision
    for path, module in model.named_modules():
        if tied and path == "output":
            continue
        small = isinstance(module, RMSNorm)
        for kind in (module._parameters, module._buffers):
            for key, meta in list(kind.items()):
                if meta is None or key in module._non_persistent_buffers_set:
                    continue
                dtype = meta.dtype
                if kind is module._parameters:
                    dtype = activations if small or key == "bias" else precision
                target = torch.empty(meta.shape, dtype=dtype, device=device)
                yield f"{path}.{key}", target
                kind[key] = nn.Parameter(target, requires_grad=False) if kind is module._parameters else target


def packed(model: Transformer) -> Transformer:
    """A model ready to run: its integer weights in the layout that the device's kernel wants."""
    for module in model.modules():
        if isinstance(module, quantize.Int8Linear | quantize.Int4Linear):
            module.pack()
    return model.eval()


def load_model(
    checkpoint_path: str | Path,
    device: str | torch.device = "cpu",
    precision: torch.dtype = torch.float32,
    rank: int = 0,
    world_size: int = 1,
    local_args: ModelArgs | None = None,
) -> Transformer:
    """Load a checkpoint: a Hugging Face directory, or one safetensors file in it (a quantized one, for instance).

    `precision` is that of the float weights. Activations, norms and biases have it too, except on the CPU, where they
    are float32. With `local_args` (the sizes of one rank's share) only this rank's slices are read.
    Raises ValueError, naming the file, for a checkpoint that is incomplete, misshapen or not of this family.
    """
    device = torch.device(device)
    files = weight_files(checkpoint_path)
    args = ModelArgs.from_config(files[0].parent)
    quantization = quantize.quantization_of(files[0])
    if device.type == "cpu":
        kernels.load()
    with torch.device("meta"):
        model = Transformer(local_args or args)
        if quantization:
            quantize.replace_linears(model, **quantization)
    index = tensor_index(files)

    tied = args.tie_embeddings and not quantization
    used = set()
    for name, target in materialize(model, tied, device, precision):
        fill(target, name, index, rank, world_size)
        used.update(sources(name))
    if tied:
        model.output.weight = model.tok_embeddings.weight
        used.add("lm_head.weight")
    surplus = sorted(name for name in set(index) - used if not name.endswith("rotary_emb.inv_freq"))
    if surplus:
        raise ValueError(f"{index[surplus[0]][0]}: tensor {surplus[0]} belongs to no part of this model")
    return packed(model)


def random_model(
    config: str | Path,
    device: str | torch.device = "cpu",
    precision: torch.dtype = torch.float32,
    mode: str | None = None,
    groupsize: int | None = None,
) -> Transformer:
    """A model of the sizes in `config`, a config.json or the directory with it, and random weights, always the same.

    It is as fast as a real one of these sizes, which need not be downloaded to know that. mode: "int8" or "int4" (with
    a `groupsize`) makes quantized layers; precision is as in `load_model`. Every product keeps the scale of its input,
    so that logits are finite and have a standard deviation of about 1.
    """
    device = torch.device(device)
    args = ModelArgs.from_config(config)
    if device.type == "cpu":
        kernels.load()
    with torch.device("meta"):
        model = Transformer(args)
        if mode:
            quantize.replace_linears(model, mode, groupsize)
    tied = args.tie_embeddings and not mode
    generator = torch.Generator(device).manual_seed(0)
    for name, target in materialize(model, tied, device, precision):
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        size = getattr(module, "in_features", args.dim) ** -0.5  # of a weight, so that a product keeps the scale
        if isinstance(module, quantize.Int8Linear):
            level = size / 73.6  # the standard deviation of -127 … 127
        else:
            level = size / 4.61  # … and of 0 … 15
        if key == "bias":
            target.zero_()
        elif key == "scales":
            target.fill_(level)
        elif key == "mins":
            target.fill_(-7.5 * level)
        elif target.dtype == torch.int8:
            target.random_(-127, 128, generator=generator)
        elif target.dtype == torch.uint8:
            target.random_(0, 256, generator=generator)
        elif target.dim() == 1:
            target.fill_(1)  # a norm
        else:
            target.normal_(0, size, generator=generator)
    if tied:
        model.output.weight = model.tok_embeddings.weight
    return packed(model)
