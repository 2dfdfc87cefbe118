"""Measure every mode on one checkpoint (weights, drafts, k, prompts), each against plain decoding and the memory's
bandwidth in the same run.

    .venv/bin/python scripts/benchmark.py                                  all of it, on the quickstart's model
    .venv/bin/python scripts/benchmark.py --weights int8 --drafts ngram    a part
    .venv/bin/python scripts/benchmark.py --quality                        the table of qualities instead
    .venv/bin/python scripts/benchmark.py --markdown --json run.json --plot run.png

Progress goes to standard error, tables to standard output. Each kind of weights is measured in a process of its own, so
that its memory and its compilation are nobody else's. All decoding is greedy, so that every mode makes the same text
(the column "same" says whether it did), and goes on after an end token, so that all lengths are equal.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import cli  # noqa: E402 (the program is one directory up)
import kernels  # noqa: E402
from checkpoint import load_model, weight_files  # noqa: E402
from eval import default_text, evaluate, text_windows  # noqa: E402
from explain import read_bandwidth  # noqa: E402
from generate import (  # noqa: E402
    DraftLength,
    ModelDraft,
    NgramDraft,
    compile_model,
    generate,
    prompt_logits,
    weight_bytes,
)
from model import ModelArgs, Transformer  # noqa: E402
from quantize import quantize_checkpoint  # noqa: E402
from tokenizer import Tokenizer, get_tokenizer  # noqa: E402

QUANTIZED = {"int8": ("int8", None, "model_int8.safetensors"), "int4": ("int4", 32, "model_int4.g32.safetensors")}
WEIGHTS = ("fp32", "bf16", *QUANTIZED)
DRAFTS = ("none", "ngram", *QUANTIZED)
SKIPPABLE = ("verify", "prefill", "cache", "compile")
VERIFIED = range(2, 10)  # tokens in one pass
FUNCTION = """def merge(left, right):
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    result.extend(left[i:])
    result.extend(right[j:])
    return result
"""
PROMPTS = {  # name -> (text, whether it is put as a user's message)
    "copy": (f"Rewrite this function, adding a docstring:\n\n```python\n{FUNCTION}```", True),
    "question": ("Why is the sky blue, and why is it red in the evening?", True),
    "free": ("The old lighthouse had been dark for eleven years when", False),
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- one kind of weights, in a process of its own


def stored_file(checkpoint: Path, weights: str) -> Path:
    """The file or directory that `load_model` takes for these weights."""
    return checkpoint / QUANTIZED[weights][2] if weights in QUANTIZED else checkpoint


@torch.inference_mode(False)
def load(args: argparse.Namespace, weights: str, length: int) -> Transformer:
    """The model with these weights and a cache of `length` entries: plain tensors, as generate.py loads them."""
    device = cli.choose_device(args.device)
    float_type = weights if weights in cli.PRECISIONS else cli.choose_precision(None, device)
    model = load_model(stored_file(args.checkpoint_path, weights), device, cli.PRECISIONS[float_type])
    model.setup_caches(1, length)
    return model


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def timed(device: torch.device, call: Callable[[], object]) -> float:
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


def peak_memory(device: torch.device, reset: bool = False) -> int:
    """Bytes: the most that the process has held since the last reset; on CUDA of the device's memory. 0: unknown."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if not Path("/proc/self/clear_refs").exists():
        return 0
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def step(model: Transformer, tokens: int, position: int) -> Callable[[], object]:
    """A pass over `tokens` tokens, the first at `position`."""
    device = model.norm.weight.device
    idx = torch.arange(1, tokens + 1, device=device)[None]
    input_pos = torch.arange(position, position + tokens, device=device)
    return lambda: model(idx, input_pos)


def in_turns(device: torch.device, calls: dict, repeats: int) -> dict:
    """Median seconds of each call. They take turns, so that what else the machine does meets all of them alike."""
    for call in calls.values():  # compiled here; a CUDA graph is recorded in the second pass
        call(), call(), call()
    seconds: dict = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(timed(device, call))
    return {name: median(times) for name, times in seconds.items()}


def measure_compile(args: argparse.Namespace, weights: str) -> dict:
    """In a process of its own: seconds until the kernels are there, and until the first compiled step has run."""
    device = cli.choose_device(args.device)
    start = time.perf_counter()
    if device.type == "cpu":
        kernels.load()
    built = time.perf_counter() - start
    model = load(args, weights, 256)
    compile_model(model, 1)
    with torch.inference_mode():
        return {"kernels_s": built, "compile_s": timed(device, step(model, 1, 8))}


def measure(args: argparse.Namespace, weights: str) -> dict:
    """All figures of one kind of weights."""
    device = cli.choose_device(args.device)
    tokenizer = get_tokenizer(args.checkpoint_path)
    prompts = {name: encode(tokenizer, *PROMPTS[name]) for name in args.prompts}
    context = max(len(ids) for ids in prompts.values()) + args.max_new_tokens
    model_args = ModelArgs.from_config(args.checkpoint_path)
    limit = min(model_args.block_size, model_args.sliding_window or model_args.block_size)
    if context > limit:
        raise ValueError(
            f"--max_new_tokens {args.max_new_tokens}: with the prompt, {context} exceed the context, {limit}"
        )
    result: dict = {}

    # Memory first, before anything else is in it.
    before = peak_memory(device, reset=True)
    model = load(args, weights, max(context, min(limit, 256)))
    prompt = (next(iter(prompts.values())) * 128)[: min(128, limit - 16)]
    generate(model, prompt, 8, temperature=0)
    result["weight_bytes"] = weight_bytes(model)
    result["model_bytes"] = sum({t.data_ptr(): t.nbytes for t in model.state_dict().values()}.values())
    result["disk_bytes"] = sum(file.stat().st_size for file in weight_files(stored_file(args.checkpoint_path, weights)))
    if before:
        result["memory_bytes"] = peak_memory(device) - before

    bandwidth = [read_bandwidth(device)]
    peak_memory(device, reset=True)
    largest = max([DraftLength.LARGEST + 1 if k == "auto" else k + 1 for k in args.k] + [VERIFIED[-1]])
    if args.compile:
        compile_model(model, largest)
    say(f"  {weights}: one step{' (compiling)' if args.compile else ''}")
    some = min(64, limit - largest)
    result["step_s"] = in_turns(device, {1: step(model, 1, some)}, 10 * args.repeat)[1]
    if before:
        result["compiled_memory_bytes"] = peak_memory(device) - before
    if "verify" not in args.skip:
        say(f"  {weights}: passes of 1 … {VERIFIED[-1]} tokens")
        passes = in_turns(device, {n: step(model, n, some) for n in (1, *VERIFIED)}, 7 * args.repeat)
        result["verify"] = {n: passes[n] / passes[1] for n in VERIFIED}
    if "prefill" not in args.skip:
        say(f"  {weights}: a prompt of {len(prompt)} tokens")
        x, input_pos = torch.tensor([prompt], device=device), torch.arange(len(prompt), device=device)
        seconds = in_turns(device, {0: lambda: prompt_logits(model, x, input_pos)}, 2 * args.repeat)[0]
        result["prompt_tokens_per_s"] = len(prompt) / seconds
    if "cache" not in args.skip and limit >= 512:
        say(f"  {weights}: caches of 256 and {min(8192, limit)} entries")
        pair = {length: load(args, weights, length) for length in (256, min(8192, limit))}
        for one in pair.values() if args.compile else ():
            compile_model(one)
        passes = in_turns(device, {n: step(one, 1, 64) for n, one in pair.items()}, 15 * args.repeat)
        result["cache_speed"] = passes[256] / passes[max(passes)]  # of the large one, relative to the small one's
        del pair

    drafts: dict = {"ngram": NgramDraft()} if "ngram" in args.drafts else {}
    for name in args.drafts:
        if name in QUANTIZED:
            drafts[name] = ModelDraft(load(args, name, context), model_args.vocab_size)
            if args.compile:
                compile_model(drafts[name].model, 2)
    result["runs"] = decode(args, weights, model, drafts, prompts, bandwidth)
    bandwidth.append(read_bandwidth(device))
    result["bandwidth"] = median(bandwidth)

    if args.quality:
        text = args.text.read_text(encoding="utf-8") if args.text else default_text()
        windows = text_windows(text, args.checkpoint_path, min(512, limit), args.quality_tokens)
        say(f"  {weights}: {windows.numel()} tokens of text in windows of {windows.shape[1]}")
        reference = None if weights == "fp32" else load(args, "fp32", windows.shape[1])
        result["quality"] = evaluate(model, windows, reference)
    return result


def encode(tokenizer: Tokenizer, text: str, chat: bool) -> list[int]:
    try:
        return tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
    except ValueError:  # a base model has no chat template
        return tokenizer.encode(text)


def decode(
    args: argparse.Namespace, weights: str, model: Transformer, drafts: dict, prompts: dict, bandwidth: list[float]
) -> list[dict]:
    """Every draft and k on every prompt: medians of the repeats, in each of which plain decoding comes first, and the
    others' speed-up is relative to it."""
    modes = [("none", 0)] + [(name, k) for name in drafts for k in args.k]
    device = model.norm.weight.device
    runs = []
    for name, ids in prompts.items():
        seen: dict = {mode: [] for mode in modes}
        for repeat in range(args.repeat + 1):  # the first is for warming up: compiling, caches, CUDA graphs
            if repeat:
                bandwidth.append(read_bandwidth(device, 0.1))
            for number, (draft, k) in enumerate(modes, 1):
                label = draft + (f", k = {k}" if k else "")
                say(f"  {weights}: {name} {repeat}/{args.repeat}, {number}/{len(modes)}: {label}")
                new = args.max_new_tokens if repeat else min(24, args.max_new_tokens)
                _, stats = generate(model, ids, new, draft=drafts.get(draft), speculate_k=k or 1, temperature=0)
                plain = seen[modes[0]][-1] if draft != "none" and repeat else stats
                stats["speedup"] = stats["tokens_per_s"] / plain["tokens_per_s"]
                stats["same"] = stats["generated_tokens"] == plain["generated_tokens"]
                if repeat:
                    seen[draft, k].append(stats)
        for (draft, k), several in seen.items():
            figures = ("ttft_s", "tokens_per_s", "speedup", "bytes_per_token", "bandwidth_gb_s")
            figures += ("acceptance_rate", "alpha", "tokens_per_pass", "draft_s", "verify_s", "predicted_speedup")
            run = {"prompt": name, "draft": draft, "k": k, "same": all(stats["same"] for stats in several)}
            for figure in figures:
                values = [stats[figure] for stats in several if stats.get(figure) is not None]
                run[figure] = median(values) if values else None
            run["fallback"] = next((stats["fallback"] for stats in several if stats.get("fallback")), None)
            runs.append(run)
    return runs


# ---------------------------------------------------------------- all of them, one after the other


def in_process(argv: list[str], task: str, **environment: str) -> dict:
    """Run `task` in a process of its own, with the same flags; its result, as it wrote it."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "result.json"
        command = [sys.executable, __file__, *argv, "--task", task, "--json", str(file)]
        code = subprocess.run(command, env=os.environ | environment, stdout=sys.stderr).returncode
        if code:
            raise ChildFailed(code)
        return json.loads(file.read_text(encoding="utf-8"))


class ChildFailed(Exception):
    """It has said why."""


def machine(device: torch.device) -> dict:
    name = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def run_all(args: argparse.Namespace, argv: list[str]) -> dict:
    device = cli.choose_device(args.device)
    for name in dict.fromkeys([*args.weights, *args.drafts]):
        if name in QUANTIZED and not stored_file(args.checkpoint_path, name).exists():
            mode, groupsize, file = QUANTIZED[name]
            say(f"making {file}")
            quantize_checkpoint(args.checkpoint_path, mode, groupsize)
    results: dict = {"machine": machine(device), "checkpoint": args.checkpoint_path.name, "weights": {}}
    results["settings"] = {key: getattr(args, key) for key in ("max_new_tokens", "repeat", "compile", "k")}
    for number, name in enumerate(args.weights, 1):
        say(f"{name} ({number} of {len(args.weights)})")
        compiling = {}
        if args.compile and "compile" not in args.skip:
            with tempfile.TemporaryDirectory() as cache:
                fresh = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TORCH_EXTENSIONS_DIR": f"{cache}/kernels"}
                if number > 1:
                    del fresh["TORCH_EXTENSIONS_DIR"]  # built once, for the first
                say(f"  {name}: compiling, nothing cached")
                cold = in_process(argv, f"compile:{name}", **fresh)
                say(f"  {name}: compiling, cached")
                cached = in_process(argv, f"compile:{name}", **fresh)
            compiling = {"compile_s": cold["compile_s"], "cached_compile_s": cached["compile_s"]}
            if number == 1:
                results["kernels_build_s"] = cold["kernels_s"]
        results["weights"][name] = in_process(argv, f"measure:{name}") | compiling
    results["machine"]["bandwidth"] = median(result["bandwidth"] for result in results["weights"].values())
    return results


# ---------------------------------------------------------------- what is shown


def table(title: str, heads: list[str], rows: list[list], markdown: bool) -> str:
    cells = [heads, *[["–" if cell is None else str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in cells]
        lines.insert(1, "| --- " + "| ---: " * (len(heads) - 1) + "|")
    return "\n".join([title, "", *lines, ""])


def form(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def plain_run(result: dict, prompt: str | None = None) -> dict:
    return next(run for run in result["runs"] if run["draft"] == "none" and prompt in (None, run["prompt"]))


def tables(results: dict, args: argparse.Namespace) -> str:
    here, weights = results["machine"], results["weights"]
    parts = [
        f"{results['checkpoint']} on {here['device']}: {here['cpu']}, {here['cores']} cores, {here['threads']} "
        f"threads, torch {here['torch']}, reads {here['bandwidth'] / 1e9:.1f} GB/s. {args.max_new_tokens} new tokens, "
        f"greedy, medians of {args.repeat}, {'compiled' if args.compile else 'not compiled'}."
    ]
    if "kernels_build_s" in results and here["device"] == "cpu":
        parts.append(f"First build of the kernels: {results['kernels_build_s']:.0f} s.")
    parts.append("")

    if args.quality:
        heads = [
            "weights",
            "MB on disk",
            "MB in memory",
            "perplexity",
            "KL",
            "agreement",
            "tokens/s",
            "prompt tokens/s",
        ]
        rows = []
        for name, result in weights.items():
            quality = result["quality"]
            rows.append([
                name, f"{result['disk_bytes'] / 1e6:.1f}", f"{result['model_bytes'] / 1e6:.1f}",
                f"{quality['perplexity']:.3f}", form(quality.get("kl"), ".5f"), form(quality.get("agreement"), ".2%"),
                f"{plain_run(result)['tokens_per_s']:.1f}", form(result.get("prompt_tokens_per_s"), ".0f"),
            ])  # fmt: skip
        source = args.text.name if args.text else "Python's language reference"
        title = f"Quality, on the first {args.quality_tokens} tokens of {source}, in windows of 512; KL against fp32"
        return "\n".join([*parts, table(title, heads, rows, args.markdown)])

    heads = ["weights", "MB a token", "tokens/s", "of bandwidth", "first token s", "prompt tokens/s", "5 tokens / 1",
             "large cache", "peak MB", "÷ weights", "compiled", "compile s", "cached"]  # fmt: skip
    rows = []
    for name, result in weights.items():
        plain = [run for run in result["runs"] if run["draft"] == "none"]
        speed, memory = median(run["tokens_per_s"] for run in plain), result.get("memory_bytes")
        rows.append([
            name, f"{result['weight_bytes'] / 1e6:.1f}", f"{speed:.1f}",
            f"{result['weight_bytes'] * speed / result['bandwidth']:.0%}",
            f"{median(run['ttft_s'] for run in plain):.2f}", form(result.get("prompt_tokens_per_s"), ".0f"),
            form(result.get("verify", {}).get("5"), ".2f"), form(result.get("cache_speed"), ".2f"),
            form(memory and memory / 1e6, ".0f"), form(memory and memory / result["model_bytes"], ".2f"),
            form(memory and result["compiled_memory_bytes"] / 1e6, ".0f"),
            form(result.get("compile_s"), ".1f"), form(result.get("cached_compile_s"), ".1f"),
        ])  # fmt: skip
    parts.append(table("Plain decoding (all prompts)", heads, rows, args.markdown))

    if "verify" not in args.skip:
        rows = [[name, *(f"{result['verify'][str(n)]:.2f}" for n in VERIFIED)] for name, result in weights.items()]
        title = "A pass of several tokens, relative to one (v_k is the column k + 1)"
        parts.append(table(title, ["weights", *map(str, VERIFIED)], rows, args.markdown))

    heads = ["weights", "prompt", "draft", "k", "tokens/s", "speed-up", "predicted", "accepted", "α", "tokens/pass",
             "draft ms", "verify ms", "same"]  # fmt: skip
    rows = []
    for name, result in weights.items():
        for run in result["runs"]:
            drafted = run["draft"] != "none"
            rows.append([
                name, run["prompt"], run["draft"], run["k"] if drafted else None, f"{run['tokens_per_s']:.1f}",
                f"{run['speedup']:.2f}" if drafted else None, form(run["predicted_speedup"], ".2f"),
                form(run["acceptance_rate"], ".0%"), form(run["alpha"], ".2f"), form(run["tokens_per_pass"], ".2f"),
                form(run["draft_s"] and run["draft_s"] * 1e3, ".1f"),
                form(run["verify_s"] and run["verify_s"] * 1e3, ".1f"),
                ("failed" if run["fallback"] else "yes" if run["same"] else "no") if drafted else None,
            ])  # fmt: skip
    if any(run["draft"] != "none" for result in weights.values() for run in result["runs"]):
        parts.append(table("Speculative decoding, against plain decoding beside it", heads, rows, args.markdown))
    return "\n".join(parts)


def plot(results: dict, path: Path) -> None:
    """Left: speed-up against k, measured (marks) and predicted (lines). Right: each mode under the memory's bound."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    name = list(results["weights"])[-1]
    curves: dict = {}
    for run in results["weights"][name]["runs"]:
        if isinstance(run["k"], int) and run["k"]:
            curves.setdefault((run["draft"], run["prompt"]), []).append(run)
    for (draft, prompt), runs in curves.items():
        runs.sort(key=lambda run: run["k"])
        ks = [run["k"] for run in runs]
        (marks,) = left.plot(ks, [run["speedup"] for run in runs], "o", label=f"{draft}, {prompt}")
        predicted = [(run["k"], run["predicted_speedup"]) for run in runs if run["predicted_speedup"]]
        left.plot(*zip(*predicted, strict=True) if predicted else ([], []), "-", color=marks.get_color(), alpha=0.6)
    left.axhline(1, color="grey", linewidth=0.8)
    left.set(xlabel="k, tokens drafted in a round", ylabel="speed-up over plain decoding")
    left.set_title(f"{name} weights: measured (marks), predicted (lines)")
    if curves:
        left.legend(fontsize=8, loc="upper left")
        left.set_xticks(sorted({run["k"] for runs in curves.values() for run in runs}))

    points = [(name, run) for name, result in results["weights"].items() for run in result["runs"]]
    for name, result in results["weights"].items():
        for draft, mark in zip(DRAFTS, "os^D", strict=True):
            runs = [run for run in result["runs"] if run["draft"] == draft]
            if runs:
                colour = f"C{list(results['weights']).index(name)}"
                label = f"{name}{'' if draft == 'none' else f', draft {draft}'}"
                at = [run["bytes_per_token"] / 1e6 for run in runs], [run["tokens_per_s"] for run in runs]
                right.plot(*at, mark, color=colour, label=label, markersize=5, alpha=0.8)
    low = min(run["bytes_per_token"] for _, run in points) / 1.3
    high = max(run["bytes_per_token"] for _, run in points) * 1.3
    bandwidth = results["machine"]["bandwidth"]
    right.plot([low / 1e6, high / 1e6], [bandwidth / low, bandwidth / high], "k-", linewidth=1)
    right.annotate(f"the memory's {bandwidth / 1e9:.0f} GB/s", (low / 1e6, bandwidth / low), fontsize=8)
    right.set(xscale="log", yscale="log", xlabel="MB of weights read for a token", ylabel="tokens/s", title="The bound")
    right.legend(fontsize=8, loc="lower left")
    cli.write_whole(path, lambda scratch: figure.savefig(scratch, format="png", dpi=130))


# ---------------------------------------------------------------- the command line


def several(choices: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(choices)}")
        if not names:
            raise argparse.ArgumentTypeError(f"at least one of {', '.join(choices)} is expected")
        return list(dict.fromkeys(names))

    return parse


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = cli.Parser(prog="benchmark.py", description="Measure every mode on one checkpoint.", allow_abbrev=False)
    add = parser.add_argument
    add(
        "--checkpoint_path",
        type=Path,
        default=cli.DEFAULT_CHECKPOINT,
        metavar="DIR",
        help="default: the quickstart's model",
    )
    add("--weights", type=several(WEIGHTS), default=list(WEIGHTS), help="some of fp32,bf16,int8,int4 (default: all)")
    add("--drafts", type=several(DRAFTS), default=list(DRAFTS), help="some of none,ngram,int8,int4 (default: all)")
    add("--k", type=lambda text: [cli.k_or_auto(k) for k in text.split(",")], default=[3, 5, "auto"], metavar="K,K,…",
        help="tokens to draft in a round (default: 3,5,auto)")  # fmt: skip
    add(
        "--prompts",
        type=several(tuple(PROMPTS)),
        default=list(PROMPTS),
        help="some of copy,question,free (default: all)",
    )
    add("--max_new_tokens", type=cli.positive, default=128, metavar="N", help="of one run (default: 128)")
    add("--repeat", type=cli.positive, default=3, metavar="N", help="runs of which the median is taken (default: 3)")
    add("--skip", type=several(SKIPPABLE), default=[], help=f"what not to measure: some of {','.join(SKIPPABLE)}")
    add("--device", choices=("cuda", "mps", "cpu"), help="default: the first of these that is there")
    add("--no_compile", dest="compile", action="store_false", help="measure without torch.compile")
    add("--quality", action="store_true", help="sizes, perplexity, KL, agreement and speed, instead of drafts")
    add("--text", type=Path, metavar="FILE", help="what --quality scores (default: Python's language reference)")
    add("--quality_tokens", type=cli.positive, default=4096, metavar="N", help="of that text (default: 4096)")
    add("--markdown", action="store_true", help="tables for a README")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--plot", type=Path, metavar="FILE.png", help="draw speed-ups and the bound there (needs matplotlib)")
    add("--task", help=argparse.SUPPRESS)  # what one of this script's own processes does
    args = parser.parse_args(argv)
    if args.quality:
        args.drafts, args.prompts, args.skip = ["none"], args.prompts[:1], [*args.skip, "verify", "cache", "compile"]
    return args


def main(argv: list[str]) -> int:
    try:
        args = parse_arguments(argv)
        if args.task:
            task, weights = args.task.split(":")
            with torch.inference_mode():
                result = {"compile": measure_compile, "measure": measure}[task](args, weights)
            args.json.write_text(json.dumps(result), encoding="utf-8")
            return 0
        for path in filter(None, (args.json, args.plot)):
            if path.is_dir() or not path.parent.is_dir():
                raise ValueError(f"{path}: a file in a directory that exists is expected")
        if args.text:
            args.text.read_text(encoding="utf-8")
        if args.plot:
            try:
                import matplotlib  # noqa: F401 (better to know now than at the end)
            except ImportError:
                raise ValueError("--plot needs matplotlib: pip install -r scripts/requirements.txt") from None
        cli.choose_device(args.device)
        if not args.checkpoint_path.is_dir():
            raise ValueError(f"--checkpoint_path {args.checkpoint_path}: a directory with a config.json is expected")
        weight_files(args.checkpoint_path)
        get_tokenizer(args.checkpoint_path)
        start = time.perf_counter()
        results = run_all(args, argv)
        say(f"all of it took {(time.perf_counter() - start) / 60:.1f} minutes")
        print(tables(results, args))
        if args.json:
            cli.write_whole(
                args.json, lambda file: file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            )
        if args.plot:
            plot(results, args.plot)
    except ChildFailed as error:
        return 2 if error.args[0] == 2 else 1
    except UnicodeDecodeError:
        say(f"error: --text {args.text}: not UTF-8 text")
        return 2
    except (ValueError, OSError) as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
