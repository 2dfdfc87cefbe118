"""Tensor parallelism: each of several processes has its share of every layer (Shoeybi et al. 2019, section 3).

    torchrun --standalone --nproc_per_node=2 generate.py --prompt "Hello"

Attention is cut by heads and the feed-forward by its inner dimension: `wqkv` and `w13` by rows, `wo` and `w2` by
columns. So a rank goes on with what it has made itself, and its output is one summand of the layer's: one all-reduce
after `wo`, one after `w2`. The embedding and the head are cut by vocabulary where that divides.

How the processes find each other, do the same things and end together is in team.py.
"""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoint import load_model, weight_files
from model import ModelArgs, Transformer
from quantize import quantization_of


def local_sizes(path: Path | str, world_size: int, hint: str = "") -> ModelArgs:
    """The sizes of one rank's share of the checkpoint at `path`; only its headers are read.

    Raises ValueError where they do not divide, naming the world sizes that would do, and `hint`.
    """
    file = weight_files(path)[0]
    args = ModelArgs.from_config(file.parent)
    groupsize = (quantization_of(file) or {}).get("groupsize") or 1
    sizes = {  # what is cut, and into how small a piece it could be
        f"{args.n_head} heads": args.n_head,
        f"{args.n_local_heads} key/value heads": args.n_local_heads,
        f"{args.intermediate_size} inner columns": args.intermediate_size,
    }
    if groupsize > 1:
        sizes |= {
            f"{size} columns in int4 groups of {groupsize}": size // groupsize
            for size in (args.n_head * args.head_dim, args.intermediate_size)
        }
    odd = [name for name, size in sizes.items() if size % world_size]
    if odd:
        fitting = [n for n in range(1, args.n_local_heads + 1) if not any(size % n for size in sizes.values())]
        fitting = " or ".join(map(str, fitting))
        raise ValueError(f"{path}: {world_size} processes cannot share {odd[0]} evenly; {fitting} would do{hint}")
    vocabulary = args.vocab_size
    return replace(
        args,
        n_head=args.n_head // world_size,
        n_local_heads=args.n_local_heads // world_size,
        intermediate_size=args.intermediate_size // world_size,
        vocab_size=vocabulary if vocabulary % world_size else vocabulary // world_size,
    )


def add_up(part: Tensor) -> Tensor:
    """The sum of all ranks' `part`s, on every rank.

    On the CPU they are gathered and added in the order of the ranks, for gloo's ring adds in an order that depends on
    an element's place in the whole tensor: a row would have other bits in a longer block, and speculation would not be
    exact. A GPU's products promise no such thing, so NCCL may add as it likes.
    """
    if part.device.type != "cpu":
        return torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(part, "sum", dist.group.WORLD.group_name)
        )
    total, *others = gathered(part)
    for other in others:
        total = total + other
    return total


def gathered(part: Tensor) -> tuple[Tensor, ...]:
    """All ranks' `part`s, on every rank. (These operators, unlike dist.all_gather, can be compiled.)"""
    group = dist.group.WORLD
    parts = torch.ops._c10d_functional.all_gather_into_tensor(part.contiguous(), group.size(), group.group_name)
    return torch.ops._c10d_functional.wait_tensor(parts).chunk(group.size())


class SummedLinear(nn.Module):
    """A linear layer of which each rank has some columns. What is to be added to its output is added once."""

    def __init__(self, share: nn.Module):
        super().__init__()
        self.share = share

    def forward(self, x: Tensor, *, residual: Tensor | None = None, **around: object) -> Tensor:
        y = add_up(self.share(x, **around))
        return y if residual is None else y + residual


class VocabEmbedding(nn.Module):
    """Rows `rank` V/N … of the embedding [V, dim]. Other ids give zeros here, and what they stand for by the sum."""

    def __init__(self, weight: nn.Parameter, rank: int):
        super().__init__()
        self.weight, self.first = weight, rank * weight.shape[0]

    def forward(self, idx: Tensor) -> Tensor:
        row = idx - self.first
        mine = (row >= 0) & (row < self.weight.shape[0])
        return add_up(F.embedding(row.where(mine, 0), self.weight).where(mine.unsqueeze(-1), 0))


def load_share(
    path: Path | str, device: torch.device | str, precision: torch.dtype, rank: int, world_size: int
) -> Transformer:
    """This rank's share of a checkpoint, as a `Transformer` that exchanges sums with the others."""
    local = local_sizes(path, world_size)
    model = load_model(path, device, precision, rank, world_size, local)
    for layer in model.layers:
        layer.attention.wo = SummedLinear(layer.attention.wo)
        layer.feed_forward.w2 = SummedLinear(layer.feed_forward.w2)
    vocab_size = ModelArgs.from_config(weight_files(path)[0].parent).vocab_size
    if local.vocab_size != vocab_size:
        model.tok_embeddings = VocabEmbedding(model.tok_embeddings.weight, rank)
        model.output.register_forward_hook(lambda module, inputs, part: torch.cat(gathered(part), dim=-1))
        model.args = replace(local, vocab_size=vocab_size)
    return model
