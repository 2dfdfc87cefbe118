"""Download a checkpoint's needed files from the Hugging Face hub into checkpoints/ORG/NAME (see prepare.sh).

Only safetensors weights are taken, never pickles: a pickle can run code. Files arrive in a hidden folder beside the
checkpoint, where an interrupted download goes on the next time; the checkpoint appears once it is whole.
"""

import argparse
import os
import re
import shutil
import sys
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

CHECKPOINTS = Path(__file__).resolve().parent.parent / "checkpoints"

# Weights are matched by Hugging Face's own names: some repositories hold the same weights a second time
# (consolidated.safetensors), or an adapter's.
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
OTHERS = {
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
}


def needed_files(names: list[str], repo: str) -> list[str]:
    """Of all files of a repository, those to download. Raises ValueError when it holds no readable checkpoint."""
    weights = [name for name in names if WEIGHTS.fullmatch(name)]
    if not weights:
        raise ValueError(f"{repo}: has no model*.safetensors; other weight formats are not read")
    if "config.json" not in names:
        raise ValueError(f"{repo}: has no config.json")
    if not {"tokenizer.json", "tokenizer.model"} & set(names):
        raise ValueError(f"{repo}: has neither tokenizer.json nor tokenizer.model")
    return sorted(weights + [name for name in names if name in OTHERS])


def download(repo: str, revision: str | None = None) -> Path:
    """Download `repo` (ORG/NAME) at `revision` (a branch, tag or commit; the main branch if None); returns its folder.

    Raises ValueError with one line on what went wrong. A checkpoint that is already there is left as it is, and with
    a revision asked for that is an error, as nothing tells which revision it has.
    """
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo):
        raise ValueError(f"{repo!r} is not ORG/NAME")
    out = CHECKPOINTS / repo
    if out.exists():
        if revision is not None:
            raise ValueError(f"{out}: already exists, at a revision unknown; remove it to download {revision}")
        print(f"{out} is already there", file=sys.stderr)
        return out
    partial = out.parent / f".{out.name}.partial-{(revision or 'main').replace('/', '-')}"
    try:
        info = huggingface_hub.HfApi().model_info(repo, revision=revision)
        files = needed_files([file.rfilename for file in info.siblings or []], repo)
        print(f"downloading {len(files)} files to {out}", file=sys.stderr, flush=True)
        # The commit, not the branch: a push in the middle must not mix two versions.
        huggingface_hub.snapshot_download(repo, revision=info.sha, local_dir=partial, allow_patterns=files)
    except GatedRepoError as e:
        raise ValueError(f"{repo}: gated: accept its terms on its hub page, then set HF_TOKEN to your token") from e
    except RepositoryNotFoundError as e:
        raise ValueError(f"{repo}: no such model on the hub (for a private one, set HF_TOKEN to your token)") from e
    except RevisionNotFoundError as e:
        raise ValueError(f"{repo}: has no revision {revision!r}") from e
    except HfHubHTTPError as e:
        raise ValueError(f"{repo}: the hub answered: {first_line(e)}") from e
    except ValueError:
        raise
    except Exception as e:  # the HTTP client's own errors: no name resolution, no route, time-outs
        raise ValueError(f"{repo}: cannot reach the hub, or lost it; run again to go on: {first_line(e)}") from e
    missing = [name for name in files if not (partial / name).is_file()]
    if missing:
        raise ValueError(f"{repo}: not downloaded: {', '.join(missing)}; run again to go on")
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the hub library's notes for resuming
    os.rename(partial, out)
    return out


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type's name when it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, or 2 after one line on standard error."""
    parser = argparse.ArgumentParser(prog="scripts/prepare.sh", description=__doc__.splitlines()[0])
    parser.add_argument("repo", metavar="ORG/NAME", help="the model on the hub")
    parser.add_argument("--revision", help="a branch, tag or commit (default: the main branch)")
    args = parser.parse_args(argv)
    try:
        print(download(args.repo, args.revision))
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
