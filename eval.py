"""How good a checkpoint is, and how far from another: perplexity, KL divergence, agreement.

    python eval.py --checkpoint_path checkpoints/SmolLM2-135M-Instruct
    python eval.py --checkpoint_path checkpoints/SmolLM2-135M-Instruct/model_int8.safetensors \\
        --reference checkpoints/SmolLM2-135M-Instruct

The text is cut into windows that do not overlap, and each is scored on its own: its first token is context only, no
beginning-of-text token is put before it, and of what stood before the window nothing is seen. Perplexity depends on all
of that and on the text, so two figures can be compared only where window, number of tokens and text are the same.
"""

import hashlib
import json
import math
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import load_model, weight_files
from cli import Parser, choose_device, positive
from model import Transformer
from tokenizer import get_tokenizer

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@torch.inference_mode()
def evaluate(model: Transformer, windows: Tensor, reference: Transformer | None = None) -> dict:
    """Score `model` on token ids `windows`, int64 [B, S], all rows of one length S: (S - 1) predictions each.

    Returns `perplexity`, exp of the mean negative log-likelihood, and with a `reference` on the same vocabulary:
    `reference_perplexity`; `kl`, the mean over all predictions of KL(reference || model) in nats; `agreement`, the
    share of predictions with the same most likely token; `largest_difference` between two logits of one token.
    Progress goes to standard error.
    """
    totals = dict.fromkeys(("nll", "reference_nll", "kl", "agreement"), 0.0)
    largest, predictions = 0.0, 0
    for scored in (model, reference) if reference else (model,):
        scored.setup_caches(1, windows.shape[1])
    for done, window in enumerate(windows, 1):
        logits = window_logits(model, window)
        targets = window[1:, None].to(logits.device)
        log_probs = logits.log_softmax(-1)
        totals["nll"] -= log_probs.gather(1, targets).sum().item()
        predictions += len(targets)
        if reference:
            expected = window_logits(reference, window)
            if expected.shape != logits.shape:
                raise ValueError(f"the reference has {expected.shape[1]} tokens, the model {logits.shape[1]}")
            expected_log_probs = expected.log_softmax(-1)
            totals["reference_nll"] -= expected_log_probs.gather(1, targets).sum().item()
            totals["kl"] += (expected_log_probs.exp() * (expected_log_probs - log_probs)).sum().item()
            totals["agreement"] += (expected.argmax(-1) == logits.argmax(-1)).sum().item()
            largest = max(largest, (expected - logits).abs().max().item())
        perplexity = math.exp(totals["nll"] / predictions)
        print(f"  {done}/{len(windows)} windows, perplexity {perplexity:.4f}", file=sys.stderr, flush=True)
    means = {name: total / predictions for name, total in totals.items()}
    result = {"perplexity": math.exp(means["nll"]), "predictions": predictions}
    if reference:
        result["reference_perplexity"] = math.exp(means["reference_nll"])
        result |= {"kl": means["kl"], "agreement": means["agreement"], "largest_difference": largest}
    return result


def window_logits(model: Transformer, window: Tensor) -> Tensor:
    """float64 [S - 1, V]: the logits that predict all tokens of a window, int64 [S], but its first."""
    device = model.norm.weight.device
    input_pos = torch.arange(len(window) - 1, device=device)
    return model(window[None, :-1].to(device), input_pos)[0].double()


def default_text() -> str:
    """English that every Python installation has: the language reference behind `help("...")`."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def text_windows(text: str, checkpoint_path: Path, window: int, max_tokens: int) -> Tensor:
    """int64 [B, window]: the whole windows in the first `max_tokens` tokens of `text`, control tokens read as text."""
    ids = torch.tensor(get_tokenizer(checkpoint_path).encode(text, bos=False), dtype=torch.int64)[:max_tokens]
    if window < 2 or len(ids) < window:
        raise ValueError(f"--window {window}: at least 2 and at most the text's {len(ids)} tokens are expected")
    return ids[: len(ids) // window * window].view(-1, window)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description="Perplexity of a checkpoint, and its distance from a reference.", allow_abbrev=False)
    parser.add_argument(
        "--checkpoint_path", type=Path, required=True, help="a directory, or one safetensors file in it"
    )
    parser.add_argument("--reference", type=Path, help="another checkpoint, with the same tokenizer")
    parser.add_argument("--text", type=Path, help="UTF-8 file to score (default: Python's language reference)")
    parser.add_argument("--window", type=int, default=512, help="tokens of text scored on their own (default: 512)")
    parser.add_argument("--max_tokens", type=positive, default=4096, help="of the text's beginning (default: 4096)")
    parser.add_argument(
        "--device", choices=("cuda", "mps", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--precision", choices=PRECISIONS, help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args(argv)
    try:
        if args.json and (not args.json.parent.is_dir() or (args.json.exists() and not args.json.is_file())):
            raise ValueError(f"--json {args.json}: a file in a directory that exists is expected")
        for path in filter(None, (args.checkpoint_path, args.reference)):
            weight_files(path)  # says so where there is none
        text = default_text() if args.text is None else args.text.read_text(encoding="utf-8")
        windows = text_windows(text, args.checkpoint_path, args.window, args.max_tokens)
        device = choose_device(args.device)
        default = torch.float32 if device.type == "cpu" else torch.bfloat16
        model = load_model(args.checkpoint_path, device, PRECISIONS.get(args.precision, default))
        reference = None
        if args.reference:
            if not torch.equal(text_windows(text, args.reference, args.window, args.max_tokens), windows):
                raise ValueError(f"{args.reference}: its tokenizer makes other tokens of the text")
            reference = load_model(args.reference, device, default)
        result = evaluate(model, windows, reference)
        result |= {"windows": windows.shape[0], "window": args.window}
        result |= {"text_sha256": hashlib.sha256(text.encode()).hexdigest()}
        if args.json:
            scratch = args.json.with_name(f".{args.json.name}.{os.getpid()}")
            try:
                scratch.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
                os.replace(scratch, args.json)
            finally:
                scratch.unlink(missing_ok=True)
    except (ValueError, OSError) as error:
        reason = f"{args.text}: not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error
        print(f"error: {reason}", file=sys.stderr)
        sys.exit(2)
    print(f"text: sha256 {result['text_sha256'][:16]}, {windows.shape[0]} windows of {args.window} tokens")
    print(f"perplexity            {result['perplexity']:.4f}")
    if reference:
        print(f"reference perplexity  {result['reference_perplexity']:.4f}")
        print(f"KL(reference || it)   {result['kl']:.5f} nats a token")
        print(f"top-1 agreement       {100 * result['agreement']:.2f} %")
        print(f"largest difference    {result['largest_difference']:.3f} between two logits")


if __name__ == "__main__":
    main()
