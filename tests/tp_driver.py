"""Run by test_tp.py, once for each rank: many generations in one process group.

    tp_driver.py CASES.json RESULT_PREFIX

A case: {"checkpoint": path, "draft": path | "ngram" | null, "guesses": [[ids], …] | null, "unsharded": bool,
"prompts": [[ids], …], "new_tokens": [n, …], "batch_size": n, "speculate_k": k, "temperature": t, "seed": s}.
Each model is loaded once.

Each rank writes RESULT_PREFIX.rank.json: {"tokens": (of rank 0) a list for each case of one for each prompt, "digests":
of each pass's token ids and logits, "memory": its peak resident bytes, "grown": those beyond what it began with}.
"""

import functools
import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from checkpoint import load_model
from cli import peak_memory
from generate import ModelDraft, NgramDraft, generate
from model import Transformer
from team import joined

digests = []
forward = Transformer.forward


def recorded(self, idx, input_pos, logits_to_keep=0):
    logits = forward(self, idx, input_pos, logits_to_keep)
    bits = idx.numpy().tobytes() + input_pos.numpy().tobytes() + logits.numpy().tobytes()
    digests.append(hashlib.sha256(bits).hexdigest()[:8])
    return logits


class Guess:
    """A draft that proposes a text it was given."""

    def __init__(self, prompt: list[int], text: list[int]):
        self.text = prompt + text

    def propose(self, text, k, **sampling):
        return torch.tensor([self.text[len(text[0]) :][:k]], dtype=torch.int64), None


def run(case: dict, load) -> list:
    model = load(case["checkpoint"])
    draft = None
    if case.get("draft") == "ngram":
        draft = NgramDraft()
    elif case.get("draft"):
        draft = ModelDraft(load(case["draft"], case.get("unsharded", False)), model.args.vocab_size)
    tokens = []
    with torch.inference_mode():
        for i, (prompt, new_tokens) in enumerate(zip(case["prompts"], case["new_tokens"], strict=True)):
            if case.get("guesses"):
                draft = Guess(prompt, case["guesses"][i])
            torch.manual_seed(case.get("seed", 0))
            made, _ = generate(
                model,
                prompt,
                new_tokens,
                batch_size=case.get("batch_size", 1),
                draft=draft,
                speculate_k=case.get("speculate_k", 3),
                temperature=case.get("temperature", 0),
            )
            tokens.append(made[:, len(prompt) :].tolist())
    return tokens


def peak() -> int:
    return peak_memory(torch.device("cpu"))  # not ru_maxrss: on Linux that begins with what pytest had


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ.get("RANK", 0))
    started = peak()

    def write(tokens: list) -> None:
        result = {"tokens": tokens, "digests": digests, "memory": peak(), "grown": peak() - started}
        Path(f"{sys.argv[2]}.{rank}.json").write_text(json.dumps(result))

    with joined() as team:
        Transformer.forward = recorded
        if rank:
            team.follow()
            write([])
        else:

            @functools.cache
            def load(path, unsharded=False):
                return (load_model if unsharded or not team else team.load_model)(path, "cpu", torch.float32)

            write([run(case, load) for case in cases])


if __name__ == "__main__":
    main()
