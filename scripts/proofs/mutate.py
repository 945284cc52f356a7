"""Mutation testing by hand-made rules: one token is changed at a time, and the tests that guard the file must fail.

Works on a copy of the repository, never on the tree itself. Prints each survivor with its line.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIRST_PATIENCE_S = 300.0
SLOWER = 6
"""How many times as long as without a mutant the tests may take; one that hangs is noticed."""

PYTHON_TESTS = {
    "kvcached/ledger/directory.py": ["tests/core/test_ledger.py", "tests/core/test_subscription.py", "tests/hazards"],
    "kvcached/ledger/publication.py": ["tests/core/test_publication.py", "tests/history", "tests/crash"],
    "kvcached/ledger/resumption.py": ["tests/core/test_resumption.py", "tests/core/test_subscription.py"],
    "kvcached/ledger/settlement.py": ["tests/core/test_subscription.py", "tests/hazards", "tests/history"],
    "kvcached/ledger/subscription.py": ["tests/core/test_subscription.py", "tests/hazards", "tests/history"],
    "kvcached/ledger/watcher.py": ["tests/core/test_subscription.py", "tests/hazards", "tests/history"],
    "kvcached/policy.py": ["tests/core/test_policy.py"],
    "kvcached/bound_policy.py": ["tests/core/test_policy.py", "tests/core/test_capacity.py"],
}
UNDEFINED = ("-fsanitize=undefined", "-fno-sanitize-recover=undefined")  # as the sanitized runs of the tests do
C_FILES = [f"native/{name}.c" for name in ("slot", "file", "bell", "audit", "isolate")]

PYTHON_RULES = [
    (r"<=", "<"),
    (r">=", ">"),
    (r" < ", " <= "),
    (r" > ", " >= "),
    (r"==", "!="),
    (r"!=", "=="),
    (r" is not None", " is None"),
    (r" and ", " or "),
    (r" or ", " and "),
    (r"\bnot ", ""),
    (r" \+ 1\b", ""),
    (r"\bTrue\b", "False"),
    (r"\bFalse\b", "True"),
    (r"\bcontinue\b", "break"),
    (r"\bmax\(", "min("),
]
C_RULES = [
    (r"<=", "<"),
    (r">=", ">"),
    (r" < ", " <= "),
    (r" > ", " >= "),
    (r"==", "!="),
    (r"!=", "=="),
    (r"&&", "||"),
    (r"\|\|", "&&"),
    (r" \+ 1\b", ""),
    (r"F_RDLCK", "F_WRLCK"),
    (r"F_WRLCK", "F_RDLCK"),
    (r"\bINT_MAX\b", "1"),
    (r"return 0;", "return 1;"),
    (r"KVL_RAISED;", "KVL_LOST;"),
    (r"O_NOFOLLOW \| ", ""),
    (r"F_UNLCK\)", "F_RDLCK)"),
    (r"break;", "continue;"),
]


@dataclass(frozen=True)
class Mutant:
    """One change of one line."""

    path: str
    line: int
    before: str
    after: str


def mutants_of(path: str) -> list[Mutant]:
    """Return every change that the rules allow in a file, but in comments, docstrings and messages."""
    text = (ROOT / path).read_text(encoding="utf-8")
    rules = C_RULES if path.endswith(".c") else PYTHON_RULES
    skipped = skipped_lines(path, text)
    found = []
    for number, line in enumerate(text.splitlines()):
        code = line.split("#")[0] if path.endswith(".py") else line.split("/*")[0]
        if (
            number in skipped
            or not code.strip()
            or code.lstrip().startswith(("*", "import", "from", "message", "_log", "TYPE_CHECKING"))
        ):
            continue
        for pattern, replacement in rules:
            for match in re.finditer(pattern, code):
                if code[: match.start()].count('"') % 2 == 0:
                    after = line[: match.start()] + replacement + line[match.end() :]
                    found.append(Mutant(path, number, line, after))
    return found


def skipped_lines(path: str, text: str) -> set[int]:
    """Return the lines of docstrings, and of C what the preprocessor or a comment owns."""
    if path.endswith(".c"):
        comment, skipped = False, set()
        for number, line in enumerate(text.splitlines()):
            comment = comment or line.lstrip().startswith("/*")
            if comment or line.startswith("#"):
                skipped.add(number)
            if "*/" in line:
                comment = False
        return skipped
    strings = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return {
        number - 1
        for node in strings
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if (node.end_lineno or 0) > node.lineno or text.splitlines()[node.lineno - 1].lstrip().startswith('"""')
    }


def tests_pass(path: str, copy: Path, patience_s: float) -> bool:
    """Run what guards a file."""
    return c_tests_pass(copy, patience_s) if path.endswith(".c") else python_tests_pass(copy, path, patience_s)


def is_noticed(mutant: Mutant, copy: Path, patience_s: float) -> bool:
    """Apply a mutant to the copy, run what guards its file, and take it back."""
    target = copy / mutant.path
    original = target.read_text(encoding="utf-8")
    lines = original.splitlines(keepends=True)
    lines[mutant.line] = mutant.after + "\n"
    target.write_text("".join(lines), encoding="utf-8")
    try:
        return not tests_pass(mutant.path, copy, patience_s)
    finally:
        target.write_text(original, encoding="utf-8")


def c_tests_pass(copy: Path, patience_s: float) -> bool:
    """Build and run the C tests, crash points included; only what changed since the last time is compiled."""
    sources = [*(copy / "native").glob("*.c"), *(copy / "native/tests").glob("*.c")]
    if not all(compiled(source) for source in sources):
        return False
    with tempfile.TemporaryDirectory() as directory:
        program = f"{directory}/tests"
        link = ["gcc", "-pthread", *UNDEFINED, "-o", program, *(str(source.with_suffix(".o")) for source in sources)]
        subprocess.run(link, check=True)
        os.mkdir(f"{directory}/files")
        return runs([program, f"{directory}/files"], copy, patience_s)


def compiled(source: Path) -> bool:
    """Compile one file if it is not; False if it does not compile."""
    compiled_from, text = source.with_suffix(".compiled"), source.read_text(encoding="utf-8")
    if compiled_from.exists() and compiled_from.read_text(encoding="utf-8") == text:
        return True
    compile_it = ["gcc", "-O1", "-w", "-std=c11", "-pthread", "-DKVL_CRASH_POINTS", *UNDEFINED, "-c", "-o"]
    compile_it += [str(source.with_suffix(".o")), str(source)]
    if subprocess.run(compile_it, check=False, capture_output=True).returncode != 0:
        return False
    compiled_from.write_text(text, encoding="utf-8")
    return True


def python_tests_pass(copy: Path, path: str, patience_s: float) -> bool:
    """Run the Python tests of a file."""
    python = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *PYTHON_TESTS[path]]
    return runs(python, copy, patience_s)


def runs(command: list[str], copy: Path, patience_s: float) -> bool:
    """Return whether a command succeeds in time; all that it started is ended. ``copy/output`` gets its output."""
    environment = {**os.environ, "KVL_STRESS_MS": "60", "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    with (copy / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        return process.wait(patience_s) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        end_session(process.pid)
        process.wait()


def end_session(leader: int) -> None:
    """Kill everything in a session: tests have process groups of their own, and mutants of them may spin for ever."""
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, OSError):
            pid = int(directory.name)
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


def main() -> int:
    """Try all mutants, or a sample."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", default=[*PYTHON_TESTS, *C_FILES])
    parser.add_argument("--sample", type=int, help="try so many of each file only")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "engines", ".hypothesis"))
        shutil.copytree(ROOT / "kvcached/engines", copy / "kvcached/engines")
        for path in options.files:
            started = time.monotonic()
            if not tests_pass(path, copy, FIRST_PATIENCE_S):
                print((copy / "output").read_text(encoding="utf-8", errors="replace")[-4000:], file=sys.stderr)
                print(f"mutate: {path}: its tests fail without a mutant; nothing can be said", file=sys.stderr)
                return 1
            patience_s = SLOWER * (time.monotonic() - started)
            mutants = mutants_of(path)
            if options.sample and len(mutants) > options.sample:
                mutants = random.Random(options.seed).sample(mutants, options.sample)  # noqa: S311
            survivors = [mutant for mutant in mutants if not is_noticed(mutant, copy, patience_s)]
            print(f"mutate: {path}: {len(mutants)} mutants, {len(survivors)} survived", flush=True)
            for mutant in survivors:
                print(f"  {path}:{mutant.line + 1}: {mutant.before.strip()}  ->  {mutant.after.strip()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
