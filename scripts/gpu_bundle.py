"""Pack what a GPU machine without a network lacks, and unpack it there.

    python scripts/gpu_bundle.py pack FOLDER          # here: with vLLM installed, and a network
    python scripts/gpu_bundle.py unpack FOLDER SITE   # there: then put SITE on PYTHONPATH

The machine has Python and a CUDA build of torch with its usual companions (numpy, transformers,
pytest, hypothesis, rich, PyYAML). Of vLLM only the Python files are taken, from the environment
that runs this: no compiled kernel is needed. The small packages that they import come as wheels, in
the versions that are installed here, for the other machine's Python.

Standard library only: it runs on the bare machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ARCHIVE = "vllm.zip"
KEPT = (".py", ".json", ".jinja", ".yaml")
"""Endings of vLLM's files that are taken."""
PACKAGES = (
    "pyzmq", "cbor2", "oss-harmony", "openai", "httpx2", "httpcore2", "truststore", "pybase64",
    "cachetools", "msgspec", "xgrammar", "apache-tvm-ffi", "fastapi", "starlette",
    "partial-json-parser", "llguidance", "pydantic", "pydantic-core", "annotated-types",
    "typing-inspection", "distro", "jiter", "sniffio", "aiohttp",
)  # fmt: skip
"""What vLLM's model code imports, and is seldom beside torch."""
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (34, 32, 31, 28, 27, 24, 17, 12, 5))
"""What pip is told that the machine can run; it takes exact tags only."""


class BundleError(Exception):
    """It cannot go on; the text is one line."""


def pack(folder: Path, python: str) -> None:
    """Write the archive and the wheels.

    Args:
        folder: where to.
        python: the other machine's Python, such as "3.12".
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = _pack_vllm(folder / ARCHIVE)
    print(f"{count} files of vLLM: {(folder / ARCHIVE).stat().st_size / 2**20:.0f} MiB")
    wanted = [f"{name}=={version}" for name, version in _versions()]
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"),
        *("--python-version", python, "--implementation", "cp", "--dest", str(folder)),
        *(f"--platform={platform}" for platform in (*PLATFORMS, "manylinux2014_x86_64", "any")),
        *wanted,
    ]
    if subprocess.run(command, check=False).returncode:
        raise BundleError("pip could not download the wheels; its own words are above")
    print(f"{len(wanted)} wheels in {folder}")


def unpack(folder: Path, site: Path) -> None:
    """Unpack archive and wheels into a folder for PYTHONPATH.

    Names that leave the folder are refused by `zipfile` itself.
    """
    archives = sorted([*folder.glob("*.whl"), *folder.glob(ARCHIVE)])
    if not any(archive.name == ARCHIVE for archive in archives):
        raise BundleError(f"{folder} has no {ARCHIVE}; make it with `pack`")
    for archive in archives:
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(site)
    print(f"{len(archives)} archives unpacked: use PYTHONPATH={site}")


def _pack_vllm(archive: Path) -> int:
    spec = importlib.util.find_spec("vllm")
    places = None if spec is None else spec.submodule_search_locations
    if not places:
        raise BundleError("vLLM is not installed here; run this with the environment that has it")
    package = Path(next(iter(places)))
    files = sorted(_files(package))
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in files:
            packed.write(path, path.relative_to(package.parent).as_posix())
    return len(files)


def _files(package: Path) -> Iterator[Path]:
    """vLLM's own files, and those that say that it is installed."""
    yield from (p for p in package.rglob("*") if p.suffix in KEPT and p.is_file())
    for told in package.parent.glob("vllm-*.dist-info"):
        yield from (path for path in told.rglob("*") if path.is_file())


def _versions() -> list[tuple[str, str]]:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        print(f"left out, since vLLM runs here without them: {', '.join(missing)}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 if it cannot go on."""
    parser = argparse.ArgumentParser(description="Carry vLLM's Python code to a bare GPU machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="here: write the archive and the wheels")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--python", default="3.12", help="the machine's Python (default 3.12)")
    unpacking = commands.add_parser("unpack", help="there: unpack them")
    unpacking.add_argument("folder", type=Path)
    unpacking.add_argument("site", type=Path, help="a folder for PYTHONPATH")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "pack":
            pack(arguments.folder, arguments.python)
        else:
            unpack(arguments.folder, arguments.site)
    except BundleError as error:
        print(f"gpu_bundle: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
