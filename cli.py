"""The command line of generate.py: flags, prompts, the conversation, and the report.

Text goes to standard output and everything else to standard error. Whatever can be refused is refused before weights
are loaded, in one line, with exit code 2.
"""

import argparse
import json
import math
import os
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import torch

import kernels
from checkpoint import load_model, random_model, weight_files
from explain import explain, read_bandwidth
from generate import DraftLength, ModelDraft, NgramDraft, fix_shape, generate, weight_bytes
from model import ModelArgs, Transformer
from quantize import quantization_of
from team import Team, compile_model, joined
from tokenizer import StreamDecoder, Tokenizer, get_tokenizer
from tp import local_sizes
from tracing import Trace

DEFAULT_CHECKPOINT = Path(__file__).resolve().parent / "checkpoints" / "SmolLM2-135M-Instruct"
EXACT_TOKENS = 16  # of a pass with --exact: a draft of up to 15 fits, and products of 16 rows are no odd case
SEEDED_K = 4  # tokens drafted in a round where a seed is to give the same text again
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COLOURS = {"accepted": "\033[32m", "corrected": "\033[31m", "bonus": "\033[36m", "plain": ""}


# ---------------------------------------------------------------- flags


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Names a flag's default where it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        self.exit(2, f"error: {message} (see --help)\n")


def number(kind: type, low: float, high: float = math.inf, expected: str = "") -> Callable[[str], float]:
    """An argparse type: a finite number of `kind` in [low, high]."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high):
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
        return value

    return parse


positive = number(int, 1, 2**31, "a positive integer")


def k_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    return number(int, 1, 64, 'an integer from 1 to 64, or "auto"')(text)


def config_and_mode(text: str) -> tuple[Path, str | None]:
    """An argparse type: CONFIG, CONFIG:int8 or CONFIG:int4."""
    path, _, mode = text.rpartition(":")
    return (Path(path), mode) if path and mode in ("int8", "int4") else (Path(text), None)


def parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="generate.py",
        description="Generate text with a Llama-family model, plainly or speculatively.",
        allow_abbrev=False,
        formatter_class=Defaults,
    )
    add = parser.add_argument_group("the prompt").add_argument
    add("--prompt", help="a text; - reads standard input; an INTEGER makes a synthetic prompt of that many tokens")
    add("--prompt_file", type=Path, metavar="FILE", help="a file that holds the prompt")
    add("--chat", action="store_true", help="put the prompt to the model as a user's message")
    add(
        "--interactive",
        action="store_true",
        help="a conversation; ctrl-C stops an answer, ctrl-D ends (implies --chat)",
    )
    add = parser.add_argument_group("what is generated").add_argument
    add("--num_samples", type=positive, default=1, metavar="N", help="how many texts, one after the other")
    add("--batch_size", type=positive, default=1, metavar="N", help="how many texts side by side")
    add("--max_new_tokens", type=positive, default=200, metavar="N", help="the most tokens of one text or answer")
    add("--temperature", type=number(float, 0, 100, "a number from 0 to 100"), default=0.8, metavar="T",
        help="0 always takes the likeliest token")  # fmt: skip
    add("--top_k", type=positive, metavar="K", help="sample from the K likeliest tokens only")
    add("--top_p", type=number(float, 1e-9, 1, "a number above 0 and at most 1"), metavar="P",
        help="sample from the fewest tokens whose probabilities reach P")  # fmt: skip
    add("--seed", type=number(int, 0, 2**62, "an integer from 0"), metavar="S",
        help="of the first sample, the next one has S + 1: the same seed gives the same text (default: 0)")  # fmt: skip
    add("--ignore_eos", action="store_true", help="go on after an end token")
    add = parser.add_argument_group("the model").add_argument
    add("--checkpoint_path", type=Path, default=DEFAULT_CHECKPOINT, metavar="PATH",
        help="a Hugging Face directory, or one safetensors file in it (a quantized one)")  # fmt: skip
    add("--random_weights", type=config_and_mode, metavar="CONFIG[:int8|:int4]",
        help="instead of a checkpoint, a config.json or a directory with one: to try that size's speed")  # fmt: skip
    add("--device", choices=("cuda", "mps", "cpu"), help="default: the first of these that is there")
    add("--precision", choices=PRECISIONS, help="of float weights; default: bf16 where the device computes it, or fp32")
    add("--compile", action="store_true", help="compile the decode step with torch.compile")
    add("--compile_prefill", action="store_true", help="compile the processing of prompts too")
    add("--max_seq_length", type=positive, metavar="N",
        help="the tokens that a conversation may have; default: the model's context, at most 8192")  # fmt: skip
    add = parser.add_argument_group("speculative decoding").add_argument
    add("--draft_checkpoint_path", type=Path, metavar="PATH", help="a smaller or quantized model that drafts")
    add("--draft", choices=("ngram",), help="draft by looking up what followed the last tokens earlier in the text")
    add("--ngram_max", type=positive, default=3, metavar="N", help="the longest run of tokens to look up")
    add("--ngram_min", type=positive, default=1, metavar="N", help="the shortest")
    add("--speculate_k", type=k_or_auto, metavar="K",
        help='tokens to draft in a round, or "auto": as many as pay, none if none do (default: auto; with a --seed and '
             "a temperature above 0, 4: auto follows the clock, and a sampled text what is drafted)")  # fmt: skip
    add("--draft_unsharded", action="store_true",
        help="under torchrun: the first process alone runs the draft model, which may be faster")  # fmt: skip
    add("--exact", action="store_true",
        help=f"let each pass compute {EXACT_TOKENS} tokens: a GPU then rounds verified ones as plain ones")  # fmt: skip
    add("--compare", action="store_true", help="decode plainly too, with the same seed, to measure the speed-up")
    add("--show_draft", action="store_true", help="colour drafted (green), corrected (red) and bonus (cyan) tokens")
    add = parser.add_argument_group("what is written").add_argument
    add("--stats_json", type=Path, metavar="FILE", help="all figures of the report, and the token ids")
    add("--trace", type=Path, metavar="FILE",
        help="a page (HTML) that shows the first sample's speculation, token by token and round by round")  # fmt: skip
    add("--explain", action="store_true", help="say what bound the run's speed, and what held speculation back")
    add("--profile", type=Path, metavar="FILE", help="a trace of the first sample, for chrome://tracing or Perfetto")
    return parser


def check_flags(args: argparse.Namespace) -> None:
    """Refuse what cannot work together, before anything is read; settle what depends on several flags."""
    repeatable = args.seed is not None and args.temperature > 0
    args.speculate_k = args.speculate_k or (SEEDED_K if repeatable else "auto")
    if repeatable and args.speculate_k == "auto" and (args.draft or args.draft_checkpoint_path):
        say("note: --speculate_k auto follows the clock, so --seed will not give the same text again; a number would")
    args.seed = args.seed or 0
    prompts = [flag for flag in ("prompt", "prompt_file", "interactive") if getattr(args, flag) not in (None, False)]
    if len(prompts) > 1:
        raise ValueError(f"--{prompts[0]} and --{prompts[1]} exclude each other: give one")
    if args.interactive and args.batch_size > 1:
        raise ValueError("--interactive goes with --batch_size 1: a conversation has one answer")
    if args.interactive and args.num_samples > 1:
        raise ValueError("--interactive goes with --num_samples 1: a conversation has one answer")
    if args.random_weights:
        if args.checkpoint_path is not DEFAULT_CHECKPOINT:
            raise ValueError("--random_weights and --checkpoint_path exclude each other: give one")
        for flag in ("chat", "interactive", "prompt_file", "draft_checkpoint_path", "trace"):
            if getattr(args, flag):
                raise ValueError(f"--{flag} needs a tokenizer, and --random_weights comes without one")
        if args.prompt is not None and not is_integer(args.prompt):
            raise ValueError("--random_weights comes without a tokenizer: --prompt has to be an INTEGER, its tokens")
    if args.draft and args.draft_checkpoint_path:
        raise ValueError("--draft and --draft_checkpoint_path exclude each other: give one")
    if not (args.draft or args.draft_checkpoint_path):
        for flag in ("compare", "show_draft", "trace"):
            if getattr(args, flag):
                raise ValueError(f"--{flag} needs a draft: --draft ngram or --draft_checkpoint_path PATH")
    for flag in ("compare", "trace", "explain", "profile"):
        if getattr(args, flag) and args.interactive:
            raise ValueError(f"--{flag} needs one prompt: it does not go with --interactive")
    if args.max_seq_length and not args.interactive:
        raise ValueError("--max_seq_length is a conversation's: it goes with --interactive")
    if args.draft_unsharded and not args.draft_checkpoint_path:
        raise ValueError("--draft_unsharded needs --draft_checkpoint_path PATH")
    if args.exact and args.speculate_k != "auto" and args.speculate_k >= EXACT_TOKENS:
        raise ValueError(
            f"--speculate_k {args.speculate_k} does not go with --exact, whose passes of {EXACT_TOKENS} tokens verify "
            f"{EXACT_TOKENS - 1} at most"
        )
    if args.ngram_min > args.ngram_max:
        raise ValueError(f"--ngram_min {args.ngram_min} is more than --ngram_max {args.ngram_max}")
    for flag in ("stats_json", "profile", "trace"):
        path = getattr(args, flag)
        if path is not None:
            check_output(f"--{flag}", path)
    if sys.stdin is None and (args.interactive or args.prompt == "-"):
        raise ValueError(f"{'--interactive' if args.interactive else '--prompt -'}: standard input is closed")


def check_output(flag: str, path: Path) -> None:
    """Refuse what `write_whole` cannot put in place, or should not: a device, say, that a file would replace."""
    folder = path.resolve().parent
    stream = str(path).startswith(("/dev/std", "/dev/fd/", "/proc/"))  # the text's place, or not to be replaced
    if stream or (path.exists() and not path.is_file()) or not folder.is_dir():
        raise ValueError(f"{flag} {path}: a file in a directory that exists is expected")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{flag} {path}: its directory cannot be written to")


def choose_device(name: str | None) -> torch.device:
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name and not there[name]:
        raise ValueError(f"--device {name}: not there; this machine has {', '.join(d for d in there if there[d])}")
    return torch.device(name or next(device for device in there if there[device]))


def choose_precision(name: str | None, device: torch.device) -> str:
    if name:
        return name
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "mps":
        native = torch.backends.mps.is_macos_or_newer(14, 0)
    else:  # where a CPU does not multiply bf16 itself, it is a storage format only
        native = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return "bf16" if native else "fp32"


def check_compiler() -> None:
    """torch.compile writes C++ for a CPU."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    if not any(map(shutil.which, names)):
        raise ValueError(
            f"--compile needs a C++ compiler on a CPU, and {' or '.join(names)} is not there: install g++ or "
            "clang++, or name another in the environment variable CXX"
        )


# ---------------------------------------------------------------- prompts


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt's text. Bytes that are no UTF-8 become surrogates, which the tokenizer takes."""
    if args.prompt_file:
        return args.prompt_file.read_bytes().decode("utf-8", "surrogateescape")
    if args.prompt == "-":
        return sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
    return args.prompt if args.prompt is not None else "Hello, my name is"


def is_integer(prompt: str) -> bool:
    """Whether a prompt asks for a synthetic one of that many tokens. Digits of other scripts are text."""
    return prompt.isascii() and prompt.strip().isdecimal()


def encode_prompt(args: argparse.Namespace, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    if tokenizer is None or (args.prompt is not None and is_integer(args.prompt) and not args.chat):
        digits = (args.prompt or "16").strip()
        count = int(digits) if len(digits) < 1000 else 0  # Python refuses to convert thousands of them
        if not 1 <= count <= 10**7:
            raise ValueError(f"--prompt {digits[:40]}: a synthetic prompt has 1 token at least and 10 million at most")
        generator = torch.Generator().manual_seed(0)
        ids = min(vocab_size, tokenizer.vocab_size) if tokenizer else vocab_size
        return torch.randint(ids, (count,), generator=generator).tolist()
    text = read_prompt(args)
    ids = tokenizer.encode_chat([{"role": "user", "content": text}]) if args.chat else tokenizer.encode(text)
    if not ids:
        raise ValueError("the prompt is empty: at least one token is needed to go on from")
    return ids


def check_fits(prompt_tokens: int, new_tokens: int, args: ModelArgs, checkpoint: Path) -> None:
    limit = min(args.block_size, args.sliding_window or args.block_size)
    if prompt_tokens + new_tokens > limit:
        raise ValueError(
            f"the prompt's {prompt_tokens} tokens and {new_tokens} new ones (--max_new_tokens) are "
            f"{prompt_tokens + new_tokens}, but the context of {checkpoint} has {limit}"
        )


def check_memory(rows: int, tokens: int, args: ModelArgs, device: torch.device, precision: torch.dtype) -> None:
    """Refuse a cache larger than all memory, which would not fail but get the program killed, or others."""
    size = 4 if device.type == "cpu" else precision.itemsize
    cache = 2 * args.n_layer * args.n_local_heads * args.head_dim * size * rows * tokens
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if cache > memory:
        raise ValueError(
            f"--batch_size {rows}: the cache of {rows} texts of {tokens} tokens would take {cache / 1e9:.0f} GB, but "
            f"this machine's {device.type} has {memory / 1e9:.0f} GB of memory"
        )


# ---------------------------------------------------------------- output


class TokenIds:
    """A `StreamDecoder` for a model without a tokenizer: the ids themselves."""

    def put(self, token_id: int) -> str:
        return f"{token_id} "

    def flush(self) -> str:
        return ""


class Printer:
    """Writes one row's text to `stream` (standard output) as its tokens come; the other rows' when asked."""

    def __init__(self, tokenizer: Tokenizer | None, rows: int, colours: bool, stream: TextIO | None = None):
        self.decoders = [StreamDecoder(tokenizer) if tokenizer else TokenIds() for _ in range(rows)]
        self.texts = [""] * rows
        self.colours = colours
        self.stream = stream

    def __call__(self, row: int, token: int, kind: str) -> None:
        self.write(row, self.decoders[row].put(token), kind)

    def write(self, row: int, text: str, kind: str = "plain") -> None:
        self.texts[row] += text
        if row == 0 and text:
            colour = COLOURS[kind] if self.colours else ""
            print(f"{colour}{text}\033[0m" if colour else text, end="", flush=True, file=self.stream)

    def finish(self) -> list[str]:
        """Print what is still held back, and the rows that were not streamed. Returns each row's text."""
        for row, decoder in enumerate(self.decoders):
            self.write(row, decoder.flush())
        for row, text in enumerate(self.texts):
            print("" if row == 0 else text, flush=True)
        return self.texts


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that this process has held, or on CUDA the most of the device's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # On Linux ru_maxrss begins with what the parent process had; this does not.
    (peak,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(stats: dict, label: str) -> None:
    ids = stats["generated_tokens"]
    count = sum(len(row) for row in ids) if ids and isinstance(ids[0], list) else len(ids)
    say(f"[{label}] {stats['prompt_tokens']} prompt tokens, {count} new, first after {stats['ttft_s']:.2f} s")
    memory = f"peak memory {stats['peak_memory_bytes'] / 1e9:.2f} GB"
    if stats["tokens_per_s"]:
        say(
            f"  decode   {stats['tokens_per_s']:.1f} tokens/s: {stats['bytes_per_token'] / 1e6:.1f} MB of weights read "
            f"for each, {stats['bandwidth_gb_s']:.1f} GB/s; {memory}"
        )
    else:
        say(f"  decode   nothing: the first token came with the prompt; {memory}")
    if stats.get("rounds"):
        say(
            f"  draft    {stats['acceptance_rate']:.0%} accepted (α {stats['alpha']:.2f}), "
            f"{stats['tokens_per_pass']:.2f} tokens per pass; accepted per round {stats['accept_counts']}; "
            f"draft {stats['draft_s'] * 1e3:.1f} ms, verify {stats['verify_s'] * 1e3:.1f} ms a round"
        )
    if stats.get("predicted_speedup"):
        measured = f", measured {stats['measured_speedup']:.2f}" if stats["measured_speedup"] else ""
        say(f"  speed-up predicted {stats['predicted_speedup']:.2f}{measured}")
    if "rounds" in stats and (stats["measured_speedup"] or stats["predicted_speedup"] or 1) <= 1:
        say("  speculation did not pay on this text")


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a file beside `path`, then put it in its place: it appears whole or not at all."""
    path = path.resolve()  # a link stays one
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(scratch)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


# ---------------------------------------------------------------- main


def check_draft(args: argparse.Namespace, tokenizer: Tokenizer, needed: int) -> None:
    """A draft speaks of token ids: they must mean the same to both, and its context must reach as far."""
    path = args.draft_checkpoint_path
    directory = weight_files(path)[0].parent  # first of all: it says so where there is no such file
    if get_tokenizer(path).vocabulary() != tokenizer.vocabulary():
        raise ValueError(
            f"--draft_checkpoint_path {path}: its tokenizer is not that of {args.checkpoint_path}; the target scores "
            "the draft's token ids, so both must stand for the same text"
        )
    draft = ModelArgs.from_config(directory)
    limit = min(draft.block_size, draft.sliding_window or draft.block_size)
    if needed > limit:
        raise ValueError(
            f"--draft_checkpoint_path {path}: its context has {limit} tokens, but the draft reads all of the text, "
            f"which may have {needed}"
        )


def run(args: argparse.Namespace, team: Team | None = None) -> None:
    check_flags(args)
    device = choose_device(args.device)
    precision = choose_precision(args.precision, device)
    if (args.compile or args.compile_prefill) and device.type == "cpu":
        check_compiler()
    if args.random_weights:
        source, mode = args.random_weights
        model_args, tokenizer = ModelArgs.from_config(source), None
        quantization = mode and {"mode": mode, "groupsize": 32 if mode == "int4" else None}
    else:
        files = weight_files(args.checkpoint_path)
        source = files[0].parent
        model_args = ModelArgs.from_config(source)
        quantization = quantization_of(files[0])
        tokenizer = get_tokenizer(source)
    ends = () if args.ignore_eos or not tokenizer else tuple(tokenizer.eos_ids)
    limit = min(model_args.block_size, model_args.sliding_window or model_args.block_size)
    if args.interactive:
        prompt, needed = [], args.max_seq_length or min(limit, 8192)
        if needed > limit:
            raise ValueError(f"--max_seq_length {needed}: the context of {source} has {limit} tokens")
    else:
        prompt = encode_prompt(args, tokenizer, model_args.vocab_size)
        needed = len(prompt) + args.max_new_tokens
        check_fits(len(prompt), args.max_new_tokens, model_args, source)
    if not team:
        check_memory(args.batch_size, needed, model_args, device, PRECISIONS[precision])
    if args.draft_checkpoint_path:
        check_draft(args, tokenizer, needed)
    load = load_draft = load_model
    if team and args.random_weights:
        raise ValueError("--random_weights goes with one process, not with torchrun")
    if team:
        local_sizes(args.checkpoint_path, team.size)
        if args.draft_checkpoint_path and not args.draft_unsharded:
            local_sizes(args.draft_checkpoint_path, team.size, hint=", and so would --draft_unsharded")
        load, load_draft = team.load_model, load_model if args.draft_unsharded else team.load_model
        team.goes_on = args.interactive

    start = time.perf_counter()
    if args.random_weights:
        model = random_model(source, device, PRECISIONS[precision], **quantization or {})
    else:
        model = load(args.checkpoint_path, device, PRECISIONS[precision])
    model.setup_caches(args.batch_size, needed)
    model.hold()
    draft = None
    if args.draft == "ngram":
        draft = NgramDraft(args.ngram_max, args.ngram_min)
    elif args.draft_checkpoint_path:
        draft = ModelDraft(load_draft(args.draft_checkpoint_path, device, PRECISIONS[precision]), model_args.vocab_size)
        draft.model.setup_caches(args.batch_size, needed)
        draft.model.hold()
    say(f"loaded {source.name} ({weight_bytes(model) / 1e6:.0f} MB) in {time.perf_counter() - start:.1f} s")
    draft_cost = weight_bytes(draft.model) / weight_bytes(model) if isinstance(draft, ModelDraft) else 0.0
    length = DraftLength(args.speculate_k, draft_cost)
    # The C++ operators need no fixed shape: a row's bits do not depend on how many there are.
    shape = EXACT_TOKENS if args.exact and not (device.type == "cpu" and kernels.load()) else 0
    compile_s = warm_up(args, model, draft, length, shape) if args.compile or args.compile_prefill else 0.0
    if shape and not compile_s:
        fix_shape(model, shape)

    sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    common = {"batch_size": args.batch_size, "stop_ids": ends, **sampling}
    samples = []
    summary = {
        "device": device.type,
        "precision": precision,
        "quantization": quantization,
        "processes": team.size if team else 1,
        "samples": samples,
    }

    def sample(prompt: list[int], seed: int, printer: Printer, **more) -> dict:
        nonlocal length
        if length.fixed is not None:  # a sample begins as if it were the first: one seed, one text
            length = DraftLength(args.speculate_k, draft_cost)
        torch.manual_seed(seed)
        more = {"callback": printer, **common, **more}
        _, stats = generate(model, prompt, draft=draft, speculate_k=length, **more)
        texts = printer.finish()
        stats |= {
            "text": texts[0] if args.batch_size == 1 else texts,
            "seed": seed,
            "peak_memory_bytes": peak_memory(device),
            "compile_s": compile_s,
        }
        samples.append(stats)
        return stats

    show = args.show_draft and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    with torch.inference_mode():
        if args.interactive:
            converse(args, tokenizer, model, sample, show)
        for i in range(0 if args.interactive else args.num_samples):
            label = f"sample {i + 1}/{args.num_samples}"
            seed = args.seed + i
            plain = None
            if args.compare:
                torch.manual_seed(seed)
                with open(os.devnull, "w", encoding="utf-8", errors="replace") as nowhere:  # as much work as below
                    printer = Printer(tokenizer, args.batch_size, False, nowhere)
                    _, plain = generate(model, prompt, args.max_new_tokens, callback=printer, **common)
            printer = Printer(tokenizer, args.batch_size, show)
            trace = Trace(tokenizer, prompt, args.batch_size) if args.trace and i == 0 else None
            hooks = {"callback": both(printer, trace.put), "observe": trace.observe} if trace else {}
            with profiling(args.profile if i == 0 else None, device):
                stats = sample(prompt, seed, printer, max_new_tokens=args.max_new_tokens, **hooks)
            if plain and plain["tokens_per_s"] and stats["tokens_per_s"]:
                stats["plain_tokens_per_s"] = plain["tokens_per_s"]
                stats["measured_speedup"] = stats["tokens_per_s"] / plain["tokens_per_s"]
            report(stats, label)
            if args.explain:
                say(explain(stats, length, read_bandwidth(device), weight_bytes(model)))
            if trace:
                page = trace.page(stats, length, trace_title(args, seed))
                write_whole(args.trace, lambda path, page=page: path.write_text(page, encoding="utf-8"))
    if args.stats_json:
        text = json.dumps(summary, indent=1, ensure_ascii=True)
        write_whole(args.stats_json, lambda path: path.write_text(text + "\n", encoding="utf-8"))


def both(one: Callable[..., None], other: Callable[..., None]) -> Callable[..., None]:
    def call(*arguments: object) -> None:
        one(*arguments)
        other(*arguments)

    return call


def trace_title(args: argparse.Namespace, seed: int) -> dict[str, str]:
    """What a trace's page says of the run."""
    given = {"top_k": args.top_k, "top_p": args.top_p}

    def name(path: Path) -> str:
        return path.resolve().name if path.is_dir() else f"{path.resolve().parent.name}/{path.name}"

    return {
        "target": name(args.checkpoint_path),
        "draft": args.draft or name(args.draft_checkpoint_path),
        "temperature": f"{args.temperature:g}",
        **{key: f"{value:g}" for key, value in given.items() if value},
        "seed": str(seed),
    }


def warm_up(args: argparse.Namespace, model: Transformer, draft: object, length: DraftLength, shape: int) -> float:
    """Compile now what would otherwise be compiled inside the first sample. Returns the seconds it took."""
    start = time.perf_counter()
    largest = (length.fixed or length.LARGEST) + 1 if draft else 1
    models = [(model, max(largest, shape))]
    if isinstance(draft, ModelDraft):
        models.append((draft.model, 2))  # it reads one token at a time, or two after a fully accepted round
    device = model.norm.weight.device
    for compiled, most in models:
        compile_model(compiled, most, args.compile, args.compile_prefill)
        if shape and compiled is model:
            fix_shape(model, shape)  # around the compiled passes: one of them then serves all
        # On CUDA each number of tokens has a graph of its own, which is recorded when it is met for the second time.
        sizes = range(1, (most if device.type == "cuda" else min(most, 2)) + 1) if args.compile else ()
        with torch.inference_mode():
            if args.compile_prefill:
                idx = torch.zeros(1, 3, dtype=torch.int64, device=device)
                compiled(idx, torch.arange(3, device=device), logits_to_keep=1)
            for tokens in sizes:
                idx = torch.zeros(args.batch_size, tokens, dtype=torch.int64, device=device)
                for _ in range(3 if device.type == "cuda" else 1):
                    compiled(idx, torch.arange(tokens, device=device))
    seconds = time.perf_counter() - start
    say(f"compiled in {seconds:.1f} s")
    return seconds


class profiling:  # noqa: N801 (used as a function)
    """A context that writes a profiler trace of what happens in it to `path`; does nothing for None."""

    def __init__(self, path: Path | None, device: torch.device):
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.path, self.profiler = path, torch.profiler.profile(activities=activities) if path else None

    def __enter__(self) -> None:
        if self.profiler:
            self.profiler.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.profiler:
            self.profiler.__exit__(*error)
            write_whole(self.path, lambda path: self.profiler.export_chrome_trace(str(path)))


def converse(
    args: argparse.Namespace, tokenizer: Tokenizer, model: Transformer, sample: Callable[..., dict], show: bool
) -> None:
    """Turn after turn: the cache is kept, and of each new prompt only what it does not hold yet is processed."""
    messages: list[dict] = []
    held: list[int] = []  # the ids whose keys and values are in the target's cache
    say("a conversation: ctrl-C stops an answer, ctrl-D ends")
    while True:
        try:
            print("> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.buffer.readline()
        except KeyboardInterrupt:
            say("\n(ctrl-D ends)")
            continue
        if not line:
            say("")
            return
        text = line.decode("utf-8", "surrogateescape").rstrip("\r\n")
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        prompt = tokenizer.encode_chat(messages)
        room = model.max_seq_length - len(prompt)
        if room < 1:
            messages.pop()
            say(
                f"the conversation would have {len(prompt)} tokens, but there is room for {model.max_seq_length} "
                "(--max_seq_length); say something shorter, or end it with ctrl-D"
            )
            continue
        cached = 0
        while cached < min(len(held), len(prompt) - 1) and held[cached] == prompt[cached]:
            cached += 1
        held = prompt[:cached]  # what follows is about to be overwritten
        answer: list[int] = []
        printer = Printer(tokenizer, 1, show)

        def keep(row: int, token: int, kind: str, answer: list = answer, printer: Printer = printer) -> None:
            answer.append(token)
            printer(row, token, kind)

        seed = args.seed + len(messages) // 2
        label = f"turn {len(messages) // 2 + 1}"
        try:
            stats = sample(
                prompt, seed, printer, callback=keep, cached=cached, max_new_tokens=min(args.max_new_tokens, room)
            )
            stats["cached_tokens"] = cached
            report(stats, label)
        except KeyboardInterrupt:
            printer.finish()
            say(f"[{label}] stopped after {len(answer)} tokens")
        if answer:
            held = prompt + answer[:-1]  # the last token was made, but not yet read
            messages.append({"role": "assistant", "content": printer.texts[0]})
        else:
            messages.pop()


def out_of_memory(error: Exception) -> bool:
    """Whether it was memory that lacked: on a CPU PyTorch raises a plain RuntimeError then."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def main(argv: list[str] | None = None) -> int:
    """The program. Returns its exit code: 0, 2 for input that cannot be used, 130 when interrupted."""
    warnings.showwarning = lambda message, *where, **more: say(f"warning: {message}")
    if hasattr(sys.stdout, "reconfigure"):  # a character that it has no code for is to end no run
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with joined() as team:
            if team and team.rank > 0:
                return team.follow()
            run(parser().parse_args(argv), team)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        place = f"{error.filename}: " if getattr(error, "filename", None) else ""
        say(f"error: {place}{getattr(error, 'strerror', None) or error}")
        return 2
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        say("error: out of memory; --batch_size, --max_new_tokens and --max_seq_length make the cache smaller, "
            "--precision and quantize.py the weights")  # fmt: skip
        return 2
    except KeyboardInterrupt:
        say("")
        return 130
    return 0
