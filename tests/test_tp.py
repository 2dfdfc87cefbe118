"""tp.py, in real process groups over gloo: started as torchrun would, and by torchrun."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from tiny import write_checkpoint

import team
import tp
from quantize import quantize_checkpoint

DRIVER = Path(__file__).with_name("tp_driver.py")
GENERATE = ROOT / "generate.py"
LIMIT = 240  # seconds; on a busy machine a process takes 20 to start


def start(ranks, *command, cwd=None, **pipes):
    """One process a rank, as torchrun starts them but in this process's session. `cwd`: of each rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=cwd[rank] if cwd else None,
            **pipes,
        )
        for rank in range(ranks)
    ]


def finish(processes):
    """Wait for all: their exit codes, and all that they wrote to standard output and to standard error."""
    try:
        written = [process.communicate(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    out, err = (
        "".join(text.decode(errors="replace") for text in texts if text) for texts in zip(*written, strict=True)
    )
    return [process.returncode for process in processes], out, err


def lines(err):
    """What a user is told: standard error without the notes on building kernels and on what was loaded."""
    return [line for line in err.splitlines() if not line.startswith(("onepass:", "loaded ", "a conversation"))]


def drive(path, ranks, cases):
    """Run the cases in a group of `ranks` processes: each rank's results."""
    (path / "cases.json").write_text(json.dumps(cases))
    codes, _, err = finish(start(ranks, DRIVER, path / "cases.json", path / f"result{ranks}"))
    assert codes == [0] * ranks, err
    return [json.loads((path / f"result{ranks}.{rank}.json").read_text()) for rank in range(ranks)]


# ---------------------------------------------------------------- the same tokens

PROMPT = [40, 41, 42, 43, 40, 41, 42, 43, 40, 41]
KINDS = {
    "llama": {},
    "tied": {"family": "llama32"},
    "biases": {"family": "qwen2"},
    "norms of heads": {"family": "qwen3"},
    "odd vocabulary": {"vocab_size": 275},
    "int8": {"mode": "int8", "family": "llama32"},
    "int4": {"mode": "int4", "family": "mistral", "head_dim": 32},
}
USES = {
    "batch": {"batch_size": 3, "temperature": 1.0, "seed": 5},
    "ngram": {"draft": "ngram"},
    "draft": {"draft": "draft", "speculate_k": 4},
    "draft auto": {"draft": "draft", "speculate_k": "auto", "temperature": 1.0},
    "draft unsharded": {"draft": "draft", "unsharded": True},
    "draft of a batch": {"draft": "int8", "batch_size": 2},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    path = tmp_path_factory.mktemp("tp")
    made = {
        "draft": write_checkpoint(path / "draft", noise=0.1),
        # Three ranks can share it, and its answers take long.
        "wide": write_checkpoint(
            path / "wide", num_attention_heads=6, num_key_value_heads=6, hidden_size=96, intermediate_size=96,
            max_position_embeddings=8192,
        ),
    }  # fmt: skip
    for name, how in KINDS.items():
        how = dict(how)
        mode = how.pop("mode", None)
        made[name] = write_checkpoint(path / name, **how)
        if mode:
            made[name] = quantize_checkpoint(made[name], mode, 32 if mode == "int4" else None)
    return path, {name: str(made) for name, made in made.items()}


@pytest.fixture(scope="module")
def two_ranks(checkpoints):
    """Each kind of model and each use of one: (one process's tokens, both ranks' results)."""
    path, made = checkpoints
    common = {"prompts": [PROMPT], "new_tokens": [24]}
    cases = {name: common | {"checkpoint": made[name]} for name in KINDS}
    for name, use in USES.items():
        cases[name] = common | {"checkpoint": made["llama"]} | use
        if use.get("draft") in made:
            cases[name]["draft"] = made[use["draft"]]
    one = drive(path, 1, list(cases.values()))[0]["tokens"]
    ranks = drive(path, 2, list(cases.values()))
    return dict(zip(cases, one, strict=True)), dict(zip(cases, ranks[0]["tokens"], strict=True)), ranks


@pytest.mark.parametrize("case", [*KINDS, *USES])
def test_two_ranks_make_the_tokens_of_one(two_ranks, case):
    if case == "draft auto":
        assert len(two_ranks[1][case][0][0]) == 24  # its draft lengths depend on the clock, and its draws on them
    else:
        assert two_ranks[1][case] == two_ranks[0][case]


def test_ranks_compute_the_same_bits(two_ranks):
    # The draft that only rank 0 has makes passes of its own there.
    first, second = (rank["digests"] for rank in two_ranks[2])
    assert len(second) > 200
    rest = iter(first)
    assert all(digest in rest for digest in second)


@pytest.fixture(scope="module")
def smollm2(smollm2_dir, golden, tmp_path_factory):
    """SmolLM2, 9 heads and 3 key/value heads, in three processes and in one: greedy with the golden text as draft, for
    fewer passes; one prompt plainly; and one drawn at temperature 1."""
    path = tmp_path_factory.mktemp("smollm2")
    texts = [text["greedy"] for text in golden]
    short = min(range(len(texts)), key=lambda i: len(texts[i]))
    greedy = {"prompts": [text["ids"] for text in golden], "new_tokens": [len(text) for text in texts]}
    plain = {key: values[short : short + 1] for key, values in greedy.items()}
    cases = [greedy | {"guesses": texts, "speculate_k": 15}, plain, plain | {"temperature": 1.0, "seed": 3}]
    cases = [{"checkpoint": str(smollm2_dir)} | case for case in cases]
    return drive(path, 3, cases), drive(path, 1, cases[1:])[0]


def test_three_ranks_make_the_golden_tokens(smollm2, golden):
    for text, (made,) in zip(golden, smollm2[0][0]["tokens"][0], strict=True):
        assert made == text["greedy"], text["prompt"]
    assert smollm2[0][0]["tokens"][1] == smollm2[1]["tokens"][0]


def test_three_ranks_draw_the_same_tokens(smollm2):
    three, one = smollm2
    assert three[0]["digests"] == three[1]["digests"] == three[2]["digests"]
    assert three[0]["tokens"][2] == one["tokens"][1]


def test_a_rank_holds_its_share_only(smollm2):
    three, one = smollm2
    whole, part = one["grown"], max(rank["grown"] for rank in three)
    print(f"peak resident memory: one process {one['memory'] / 1e6:.0f} MB, each of three", end=" ")
    print(", ".join(f"{rank['memory'] / 1e6:.0f} MB" for rank in three))
    print(f"beyond what a process has before it loads: {whole / 1e6:.0f} MB and {part / 1e6:.0f} MB")
    assert part < 0.5 * whole


# ---------------------------------------------------------------- the command line


def generate_flags(path, *flags):
    return (GENERATE, "--device", "cpu", "--precision", "fp32", "--checkpoint_path", path, *flags)


def torchrun(ranks, *command, **pipes):
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={ranks}",
            *map(str, command),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes,
    )


@pytest.mark.parametrize(
    ("kind", "draft", "rows"), [("llama", "draft", 1), ("int8", "ngram", 1), ("int4", "its original", 2)]
)
def test_compiled_and_drafted(checkpoints, tmp_path, kind, draft, rows):
    _, made = checkpoints
    flags = "--temperature 0 --max_new_tokens 12 --ignore_eos --speculate_k 3".split()
    flags += ["--prompt", "in it in it in", "--batch_size", rows]
    if draft == "ngram":
        flags += ["--draft", draft]
    else:
        flags += ["--draft_checkpoint_path", made.get(draft) or Path(made[kind]).parent]
    for ranks, more in ((1, []), (2, ["--compile"])):
        stats = tmp_path / f"{ranks}.json"
        codes, _, err = finish(start(ranks, *generate_flags(made[kind], *flags, *more, "--stats_json", stats)))
        assert codes == [0] * ranks, err
    one, two = (json.loads((tmp_path / f"{ranks}.json").read_text()) for ranks in (1, 2))
    assert (one["processes"], two["processes"]) == (1, 2)
    one, two = one["samples"][0], two["samples"][0]
    assert two["compile_s"] > 0 and two["generated_tokens"] == one["generated_tokens"]
    assert any(two["accept_counts"][1:]) and two["fallback"] is None  # else the rounds would show nothing


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        (b"word 2\n", 2),
        (b"", 0),
        (b"\n", 0),
        (b"other 2\n", 0),
        ("\u00e9 2\n".encode(), 0),
        (b"\xff 2\n", 0),
        (b"word x\n", 0),
    ],
)
def test_a_stranger_who_connects_is_no_rank_and_ends_nothing(line, rank):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(line)
        theirs.shutdown(socket.SHUT_WR)
        assert team.caller(ours, "word") == rank


def test_torchrun_and_a_conversation_over_a_pipe(checkpoints):
    _, made = checkpoints
    flags = "--interactive --temperature 0 --max_new_tokens 8 --ignore_eos".split()
    talk = b"hello\n\nhello world\n"
    alone = start(1, *generate_flags(made["llama"], *flags), stdin=subprocess.PIPE)[0]
    together = torchrun(2, *generate_flags(made["llama"], *flags))
    try:
        answers, _ = alone.communicate(talk, timeout=LIMIT)
        out, err = together.communicate(talk, timeout=LIMIT)
    finally:
        alone.kill()
        together.terminate()
    assert together.returncode == 0, err
    assert out == answers and out
    assert err.count(b"prompt tokens") == 2


# ---------------------------------------------------------------- ends


def wait_for(stream, text):
    """Read `stream` up to `text`; all that was read."""
    seen = b""
    while text not in seen:
        byte = os.read(stream.fileno(), 1)
        assert byte, seen.decode()
        seen += byte
    return seen.decode()


@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_rank_ends_all(checkpoints, victim):
    """Once in the middle of an answer, once while rank 0 waits for a line: nobody computes then."""
    _, made = checkpoints
    flags = generate_flags(made["wide"], *"--interactive --ignore_eos --max_new_tokens 4000 --temperature 0".split())
    processes = start(3, *flags, stdin=subprocess.PIPE)
    wait_for(processes[0].stderr, b"> ")
    if victim == 1:
        processes[0].stdin.write(b"hello\n")
        processes[0].stdin.flush()
        os.read(processes[0].stdout.fileno(), 1)
    processes[victim].kill()
    killed = time.monotonic()
    for process in processes:
        process.wait(timeout=30)
    assert time.monotonic() - killed < 30
    codes, _, err = finish(processes)
    assert [code for rank, code in enumerate(codes) if rank != victim] == [1, 1]
    assert re.fullmatch(rf"error: rank {victim} has gone: .*", "\n".join(lines(err)).strip()), err


def test_ctrl_c_stops_an_answer_on_all_ranks(checkpoints):
    _, made = checkpoints
    flags = generate_flags(made["wide"], *"--interactive --ignore_eos --max_new_tokens 4000 --temperature 0".split())
    processes = start(2, *flags, stdin=subprocess.PIPE)
    wait_for(processes[0].stderr, b"> ")
    for _ in range(2):  # what is said after a stopped answer is answered
        processes[0].stdin.write(b"hello\n")
        processes[0].stdin.flush()
        os.read(processes[0].stdout.fileno(), 1)
        for process in processes:
            process.send_signal(signal.SIGINT)
        assert "stopped after" in wait_for(processes[0].stderr, b"> ")
        os.set_blocking(processes[0].stdout.fileno(), False)
        while os.read(processes[0].stdout.fileno(), 1 << 16) == 1 << 16:
            pass
        os.set_blocking(processes[0].stdout.fileno(), True)
    codes, _, err = finish(processes)
    assert codes == [0, 0], err


def test_ctrl_c_ends_a_run_once(checkpoints):
    _, made = checkpoints
    flags = "--prompt hello --ignore_eos --max_new_tokens 4000 --temperature 0".split()
    processes = start(2, *generate_flags(made["wide"], *flags))
    os.read(processes[0].stdout.fileno(), 1)
    for process in processes:
        process.send_signal(signal.SIGINT)
    codes, _, err = finish(processes)
    assert codes == [130, 130]
    assert lines(err) == [""]


def test_ctrl_c_under_torchrun_ends_a_conversation(checkpoints):
    _, made = checkpoints
    flags = generate_flags(made["wide"], *"--interactive --ignore_eos --max_new_tokens 4000 --temperature 0".split())
    process = torchrun(2, *flags)
    try:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=25)  # torchrun kills what is still there after 30 s
    finally:
        process.terminate()
    assert process.returncode != 0


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ((6, 3, 128), 2, "3 key/value heads evenly; 1 would do"),
        ((6, 6, 128), 4, "6 heads evenly; 1 or 2 would do"),
        ((4, 4, 130), 4, "130 inner columns evenly; 1 or 2 would do"),
    ],
)
def test_sizes_that_do_not_divide(tmp_path, sizes, ranks, expected):
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    path = write_checkpoint(tmp_path, hidden_size=96, **dict(zip(names, sizes, strict=True)))
    with pytest.raises(ValueError) as error:
        tp.local_sizes(path, ranks)
    assert str(error.value) == f"{path}: {ranks} processes cannot share {expected}"


def test_groups_that_do_not_divide(tmp_path):
    path = write_checkpoint(tmp_path, num_key_value_heads=4, hidden_size=128)
    file = quantize_checkpoint(path, "int4", 64)
    assert tp.local_sizes(file, 2).intermediate_size == 64
    with pytest.raises(ValueError) as error:
        tp.local_sizes(file, 4)
    assert "128 columns in int4 groups of 64 evenly; 1 or 2 would do" in str(error.value)


def test_one_process_takes_no_distributed_path(monkeypatch):
    monkeypatch.setattr(team, "join", lambda: pytest.fail("a process group"))
    for size in (None, "1"):
        monkeypatch.setenv("WORLD_SIZE", size) if size else monkeypatch.delenv("WORLD_SIZE", raising=False)
        with team.joined() as one:
            assert one is None


def test_refused_by_all_in_one_line(checkpoints):
    _, made = checkpoints
    flags = generate_flags(made["wide"], "--draft_checkpoint_path", made["llama"], "--prompt", "hello")
    codes, out, err = finish(start(3, *flags))
    assert (codes, out) == ([2, 2, 2], "")
    assert err == (
        f"error: {made['llama']}: 3 processes cannot share 4 heads evenly; 1 or 2 would do, and so would "
        "--draft_unsharded\n"
    )


def test_an_error_of_one_rank_ends_all(checkpoints, tmp_path):
    path, made = checkpoints
    codes, out, err = finish(start(2, *generate_flags("llama", "--prompt", "hello"), cwd=[path, tmp_path]))
    assert (codes, out) == ([2, 2], "")
    assert lines(err) == [
        "error: rank 1 says: llama: no such file or directory; a checkpoint is a directory with a config.json"
    ]
