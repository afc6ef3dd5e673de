"""Make an environment ready for rankfold, and print the interpreter to use.

The interpreter's path is all that goes to standard output; progress and errors go to standard
error. Three cases, in this order:

1. ``RANKFOLD_PYTHON`` names an interpreter: it is used as it is; nothing is installed into it.
2. An active virtual environment (``VIRTUAL_ENV``) already has vLLM: likewise.
3. Else ``.venv`` is made from ``requirements/`` and stamped; a stamp that still fits is all that
   a repeated run reads. ``RANKFOLD_TORCH_INDEX`` gives pip another index for PyTorch's builds.

Runs before anything is installed: standard library only, and syntax that an old Python can parse,
so that it can say that it is too old.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Mapping, NamedTuple, Sequence  # noqa: UP035  (an old Python must get past this)

ROOT = Path(__file__).resolve().parent.parent
OLDEST, TOO_NEW = (3, 11), (3, 15)  # vLLM's own range
EDITABLE = ("--config-settings", "editable_mode=compat")
LINUX_WHEEL = "manylinux_2_28_x86_64"  # the platform tag of vLLM's wheel

CORE = ("torch", "vllm", "numpy", "hypothesis", "rich", "pydantic", "yaml")
NEEDS: dict[str, tuple[str, ...]] = {
    "check": CORE,
    "lint": ("ruff",),
    "types": (*CORE, "mypy"),
    "test": (*CORE, "pytest", "xdist", "ruff", "mypy"),
}
PIP_NAMES = {"yaml": "PyYAML", "xdist": "pytest-xdist"}  # where they differ from the module's


class SetupError(Exception):
    """A set-up that cannot go on; its text is the one line to show."""


class Step(NamedTuple):
    """One pip call: what to tell the user, and pip's arguments."""

    title: str
    args: tuple[str, ...]


def python_problem(version: tuple[int, int]) -> str | None:
    """Say what is wrong with a Python version, or None when it fits."""
    if OLDEST <= version < TOO_NEW:
        return None
    age = "old" if version < OLDEST else "new"
    return (
        "Python {}.{} is too {}: rankfold needs 3.11 to 3.14; "
        "name one with `make PYTHON=/path/to/python3.12 ...`".format(*version, age)
    )


def fingerprint(root: Path, version: tuple[int, int]) -> str:
    """Return the stamp that an up-to-date ``.venv`` carries: two lines.

    The first, ``MAJOR.MINOR PATH``, changes when the environment itself must be made anew; the
    second, a SHA-256 of everything that says what is installed, when pip must run again.
    """
    digest = hashlib.sha256()
    files = sorted((root / "requirements").glob("*.txt"))
    for path in (*files, root / "pyproject.toml", root / "scripts" / "setup.py"):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return "{}.{} {}\n{}\n".format(*version, root / ".venv", digest.hexdigest())


def steps(platform: str, root: Path, site_packages: Path, torch_index: str) -> list[Step]:
    """Return the pip calls that fill ``.venv`` on ``platform`` (a ``sys.platform``), in order."""

    def pins(name: str) -> tuple[str, str]:
        return "-r", str(root / "requirements" / (name + ".txt"))

    torch = ("--index-url", torch_index) if torch_index else ()
    companions = ("--extra-index-url", torch_index) if torch_index else ()
    vllm: tuple[str, ...] = ("--no-deps", *pins("vllm"))
    if platform == "darwin":  # no vLLM wheel fits: unpack the Linux one for its Python files
        vllm += ("--platform", LINUX_WHEEL, "--only-binary=:all:", "--upgrade")
        vllm += ("--target", str(site_packages))
    return [
        Step("PyTorch (the large one)", (*torch, *pins("torch"))),
        Step("what vLLM's model code imports", pins("vllm-imports")),
        Step("vLLM without its dependencies", vllm),
        Step("vLLM's compiled companions", ("--no-deps", *companions, *pins("no-deps"))),
        Step("tools", pins("dev")),
        # compat: a link to the tree itself, so that a package added later is found as well
        Step("rankfold", ("--no-deps", "--no-build-isolation", *EDITABLE, "-e", str(root))),
    ]


def pip_failure(title: str, output: str, log: Path) -> str:
    """Return the error for a failed pip call: pip's own last lines, and where the rest is."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    said = " | ".join(errors[-3:]) or "nothing"
    return f"pip failed at: {title}; it said: {said} (all of it: {log})"


def borrowed(env: Mapping[str, str], root: Path) -> tuple[str, str] | None:
    """Return ``(variable, interpreter)`` of an environment that is not ours, if one is offered."""
    if env.get("RANKFOLD_PYTHON"):
        return "RANKFOLD_PYTHON", env["RANKFOLD_PYTHON"]
    active = env.get("VIRTUAL_ENV")
    if active and not is_ours(Path(active).resolve(), root):
        return "VIRTUAL_ENV", str(Path(active) / "bin" / "python")
    return None


def is_ours(venv: Path, root: Path) -> bool:
    """Say whether an environment is the one made here (its log is there from the first moment)."""
    return venv == root / ".venv" and (venv / "setup.log").exists()


def missing_line(python: str, missing: Sequence[str]) -> str:
    """Return the one line that says what a borrowed interpreter lacks, and what adds it."""
    names = " ".join(PIP_NAMES.get(module, module) for module in missing)
    return f"{python} lacks {', '.join(missing)}; add with: {python} -m pip install {names}"


def probe(python: str, modules: Sequence[str]) -> tuple[tuple[int, int], list[str]]:
    """Ask an interpreter for its version and which of ``modules`` it cannot find."""
    code = (
        "import importlib.util as u, sys; print(*sys.version_info[:2], "
        "*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
    )
    try:
        run = subprocess.run([python, "-c", code, *modules], capture_output=True)
    except OSError as error:
        raise SetupError(f"cannot run {python}: {error.strerror}") from None
    words = run.stdout.decode().split()
    if run.returncode or len(words) < 2:
        said = run.stderr.decode().strip()[-200:]
        raise SetupError(f"{python} is not a Python that runs: {said}")
    return (int(words[0]), int(words[1])), words[2:]


def use_borrowed(variable: str, python: str, command: str) -> str | None:
    """Return a borrowed interpreter if it has what ``command`` needs.

    An active environment without vLLM was not offered for this: None, and ``.venv`` is used.
    """
    found = shutil.which(python)
    if found is None:
        if variable == "VIRTUAL_ENV":
            return None
        raise SetupError(f"RANKFOLD_PYTHON={python} is not a program that can be run")
    python = os.path.abspath(found)  # not resolved: a link out of a venv would leave the venv
    version, missing = probe(python, ("vllm", *NEEDS[command]))
    if variable == "VIRTUAL_ENV" and "vllm" in missing:
        return None
    problem = python_problem(version)
    if problem:
        raise SetupError(f"{variable}: {python}: {problem}")
    missing = [module for module in NEEDS[command] if module in missing]
    if missing:
        other = "; or `deactivate` to have .venv made" if variable == "VIRTUAL_ENV" else ""
        raise SetupError(missing_line(python, missing) + other)
    return python


def newer_python() -> str | None:
    """Find a Python on PATH that fits (the ``python3`` of a Mac is an old one)."""
    for minor in range(OLDEST[1], TOO_NEW[1]):
        found = shutil.which(f"python3.{minor}")
        try:
            if found and probe(found, ())[0] == (3, minor):
                return found
        except SetupError:  # a version manager's shim for a version that is switched off
            continue
    return None


def say(text: str) -> None:
    """Tell the user, on standard error."""
    print("rankfold: " + text, file=sys.stderr, flush=True)


def make_venv(venv: Path, log: Path) -> None:
    """Make an empty ``.venv``, in the place of a stale or half-made one of ours."""
    if venv.exists() and not is_ours(venv, ROOT):
        raise SetupError(
            ".venv is there, but not made by this set-up: move it away, or if it has vLLM, "
            "use it with RANKFOLD_PYTHON=.venv/bin/python"
        )
    shutil.rmtree(venv, ignore_errors=True)
    venv.mkdir()
    log.touch()
    made = subprocess.run(
        [sys.executable, "-m", "venv", str(venv)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    log.write_bytes(made.stdout)
    if made.returncode:
        raise SetupError(
            f"{sys.executable} cannot make a virtual environment (on Debian: apt-get install "
            f"python3-venv; else name another: make PYTHON=...); see {log}"
        )


def install(venv: Path, python: Path, log: Path) -> None:
    """Run every pip step inside ``.venv``, telling each; all output goes to the log."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PIP_USER")}
    site_packages = venv / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    plan = steps(sys.platform, ROOT, site_packages, os.environ.get("RANKFOLD_TORCH_INDEX", ""))
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    # --no-compile: most of these files are never imported; compiling them all costs a minute
    pip += ["--progress-bar=off", "--no-compile"]
    for number, step in enumerate(plan, 1):
        say(f"set-up {number}/{len(plan)}: {step.title}")
        before = log.stat().st_size
        with log.open("ab") as sink:
            code = subprocess.run([*pip, *step.args], stdout=sink, stderr=sink, env=env).returncode
        if code:
            output = log.read_bytes()[before:].decode(errors="replace")
            raise SetupError(pip_failure(step.title, output, log))


def own_venv() -> str:
    """Return the interpreter of ``.venv``, brought up to date first unless its stamp fits."""
    venv = ROOT / ".venv"
    stamp, python, log = venv / "stamp", venv / "bin" / "python", venv / "setup.log"
    wanted = fingerprint(ROOT, sys.version_info[:2])

    def stamped() -> str:
        return stamp.read_text() if stamp.exists() and python.exists() else ""

    if stamped() == wanted:
        return str(python)
    lock = os.open(ROOT / "requirements", os.O_RDONLY)  # a directory serves, and leaves no file
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two `make` at once: the second waits, and finds it done
        have, start = stamped(), time.monotonic()
        if have != wanted:
            if have.splitlines()[:1] != wanted.splitlines()[:1]:
                make_venv(venv, log)
            stamp.unlink(missing_ok=True)
            install(venv, python, log)
            missing = probe(str(python), NEEDS["test"])[1]
            if missing:
                raise SetupError(f"set-up ended without {', '.join(missing)}: see {log}")
            stamp.write_text(wanted)
            say(f"set-up done in {time.monotonic() - start:.0f} s")
    finally:
        os.close(lock)
    return str(python)


def main(argv: Sequence[str]) -> int:
    """Print the interpreter for the command in ``argv``; 0, or 2 after one line of error."""
    command = argv[0] if argv else "test"
    try:
        if command not in NEEDS or len(argv) > 1:
            raise SetupError(f"usage: setup.py [{' | '.join(NEEDS)}]")
        offer = borrowed(os.environ, ROOT)
        python = use_borrowed(*offer, command) if offer else None
        if python and offer:
            say(f"using {python} as it is ({offer[0]})")
        problem = python_problem(sys.version_info[:2])
        if not python and problem:
            newer = newer_python()
            if newer is None:
                raise SetupError(problem)
            os.execv(newer, [newer, str(Path(__file__).resolve()), *argv])
        print(python or own_venv())
    except SetupError as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("interrupted; the next run starts the set-up again")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
