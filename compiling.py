"""What stands in the place of a model's forward pass: compiled code, or passes of one shape.

Nothing here changes what is computed, or is needed to follow it.
"""

import re
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType

import torch
from torch import Tensor

from model import Transformer


def compile_model(
    model: Transformer, largest_pass: int = 1, decode: bool = True, compile_prefill: bool = False
) -> None:
    """Put compiled code in the place of the model's forward pass for one token, and for 2 … `largest_pass` tokens.

    Two graphs, each compiled on first use and never again: positions are data, and the number of tokens is a variable
    of the second; only the number of rows is not. Prompts run uncompiled, unless `compile_prefill` sends them through a
    graph of their own.
    """
    model.hold()
    eager = model.forward
    # What Inductor asserts about each of a step's hundreds of tensors takes longer than a small layer does.
    options = {"size_asserts": False, "alignment_asserts": False, "guard_filter_fn": but_of_later_layers}
    if model.norm.weight.device.type == "cuda":
        # A CUDA graph launches a step's kernels at once (it is what mode="reduce-overhead" sets). The tuning makes one
        # token's products kernels that read each weight as it is stored; without it int8 weights would be written out
        # as bfloat16 first.
        options |= {"triton.cudagraphs": True, "coordinate_descent_tuning": True}
    one, few, many = (
        torch.compile(own_code(eager), fullgraph=True, dynamic=False, options=options)
        for options in (options, options, None)
    )

    def forward(idx: Tensor, input_pos: Tensor, logits_to_keep: int = 0) -> Tensor:
        tokens = idx.shape[1]
        prompt = logits_to_keep > 0 or tokens > largest_pass
        if not (compile_prefill if prompt else decode):
            return eager(idx, input_pos, logits_to_keep)
        input_pos = model.check_positions(idx, input_pos).contiguous()  # other strides would be compiled anew
        if tokens == 1 and not prompt:
            return one(idx, input_pos)
        for argument in (idx, input_pos):
            torch._dynamo.mark_dynamic(argument, 1)
        return many(idx, input_pos, logits_to_keep) if prompt else few(idx, input_pos)

    model.forward = forward


def own_code(method: Callable) -> Callable:
    """The same method with a code object of its own. By those torch.compile keeps what it has compiled: it searches all
    that it has for one, and refuses to add a ninth."""
    if not isinstance(method, MethodType):
        return method
    f = method.__func__
    copied = FunctionType(f.__code__.replace(), f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    return MethodType(copied, method.__self__)


def but_of_later_layers(guards: Sequence) -> list[bool]:
    """Which of torch.compile's conditions are checked before each call: of the layers' only the first one's.

    They are alike, and what changes (a larger cache) changes in all. Some 2,000 checks take a tenth of a step.
    """
    return [not re.search(r"\['layers'\]\._modules\['[1-9]", guard.name) for guard in guards]


def fix_shape(model: Transformer, tokens: int) -> None:
    """Let every pass of up to `tokens` tokens compute exactly so many, so that decoding and verifying are one shape.

    Matrix products may round differently for other numbers of rows, and then a near tie between two tokens can fall
    one way in a plain step and the other way in a verifying pass. (The C++ operators do not: they have no need of
    this.) The last token fills the pass up, at its own position, where it writes what stands there already.
    """
    forward = model.forward

    def padded(idx: Tensor, input_pos: Tensor, logits_to_keep: int = 0) -> Tensor:
        given = idx.shape[1]
        if logits_to_keep or given >= tokens:
            return forward(idx, input_pos, logits_to_keep)
        places = torch.arange(tokens, device=idx.device).clamp(max=given - 1)
        return forward(idx[:, places], input_pos[..., places])[:, :given]

    model.forward = padded
