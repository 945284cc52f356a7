"""The C library: its own tests under all compilers and sanitizers at hand; its exports, header and binding compared."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.needs import lack, need_program

from kvcached.ledger._declarations import ffi

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
SOURCES = [str(path) for path in sorted(NATIVE.glob("*.c"))]
TESTS = [str(path) for path in sorted((NATIVE / "tests").glob("*.c"))]
KEPT = NATIVE / "build" / "tests"
"""Where compiled tests are kept; nothing of it is part of the repository."""
LIBRARY = ROOT / "kvcached" / "ledger" / "libkvledger.so"
STRICT = ["-std=c11", "-g", "-pthread", "-Wall", "-Wextra", "-Wconversion", "-Werror"]
STRICTEST = [*STRICT, "-Wcast-qual", "-Wpedantic", "-Wshadow", "-Wstrict-prototypes", "-Wmissing-prototypes"]
PACKAGES = {"clang++": "clang", "musl-gcc": "musl-tools", "nm": "binutils"}
"""The Debian packages that are not named after the program."""

STRESS_MS = {"plain": "150", "address": "60", "thread": "150"}
"""Long enough for some thousand rounds of each stress; the proofs take five seconds for each."""
BUILDS = {
    "plain": ["-O2"],
    "address": ["-O1", "-DKVL_CRASH_POINTS", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-fsanitize=thread"],
}
COMPILERS = ("gcc", "clang")
KERNEL_HEADERS = ["/usr/include", f"/usr/include/{platform.machine()}-linux-gnu"]
MUSL = ["-static", *(flag for path in KERNEL_HEADERS for flag in ("-idirafter", path))]
"""musl-gcc leaves the kernel's own headers out."""


def run(command: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command and return what it said; the caller looks at its status."""
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=600)


def need(program: str) -> str:
    """Go on only where there is such a program; return it."""
    need_program(program, PACKAGES.get(program, program))
    return program


def any_compiler() -> str:
    """Return the first C compiler that is at hand."""
    return next(filter(shutil.which, COMPILERS), None) or need(COMPILERS[0])


def build(compiler: str, flags: list[str]) -> Path:
    """Compile the tests together with the library, where the compiler is at hand with that sanitizer's library.

    A program is kept under a hash of its sources, compiler and flags, and compiled again when one of them changes.
    """
    need(compiler)
    command = [compiler, *STRICT, *flags]
    digest = hashlib.sha256(repr([command, run([compiler, "--version"]).stdout]).encode())
    for path in sorted([*NATIVE.glob("*.[ch]"), *(NATIVE / "tests").glob("*.[ch]")]):
        digest.update(path.name.encode() + path.read_bytes())
    target = KEPT / digest.hexdigest()[:20]
    if not target.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(f".{os.getpid()}")
        result = run([*command, "-o", str(fresh), *SOURCES, *TESTS])
        if result.returncode != 0 and re.search(r"cannot find .*(asan|tsan|ubsan|clang_rt)", result.stderr):
            lack(f"{compiler}'s library for {flags} (Debian: apt-get install libclang-rt-dev)")
        assert result.returncode == 0, result.stderr
        fresh.rename(target)
    return target


def run_tests(program: Path, directory: Path, stress_ms: str) -> None:
    """Run the C tests; each of them must pass."""
    directory.mkdir()
    environment = {
        **os.environ,
        "KVL_STRESS_MS": os.environ.get("KVL_STRESS_MS", stress_ms),
        "ASAN_OPTIONS": "handle_sigbus=0:allocator_may_return_null=1",
        "TSAN_OPTIONS": "handle_sigbus=0:halt_on_error=1:exitcode=66",
    }
    result = run([str(program), str(directory)], environment)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "not ok" not in result.stdout


@pytest.mark.parametrize(
    ("compiler", "kind"),
    [(compiler, kind) for compiler in COMPILERS for kind in BUILDS],
)
def test_c_tests_hold(compiler: str, kind: str, tmp_path: Path) -> None:
    """Every C test passes, plain and under the sanitizers; with crash points alone, make check runs them."""
    flags = list(BUILDS[kind])
    if compiler == "gcc" and kind == "thread":
        flags.append("-Wno-tsan")  # it does not model fences; what they order is read by the kernel
    run_tests(build(compiler, flags), tmp_path / "files", STRESS_MS[kind])


def test_c_tests_hold_with_musl(tmp_path: Path) -> None:
    """Every C test passes with the second libc, linked statically."""
    run_tests(build("musl-gcc", ["-O2", "-DKVL_CRASH_POINTS", *MUSL]), tmp_path / "files", "50")


@pytest.mark.parametrize("compiler", COMPILERS)
def test_library_has_no_warnings(compiler: str, tmp_path: Path) -> None:
    """The library compiles without a word under more warnings than it is built with."""
    need(compiler)
    for source in SOURCES:
        result = run([compiler, *STRICTEST, "-O2", "-fPIC", "-c", source, "-o", str(tmp_path / "object.o")])
        assert (result.returncode, result.stderr) == (0, ""), source


def test_make_builds_checks_and_installs(tmp_path: Path) -> None:
    """The Makefile builds, passes its check, which has crash points, with the caller's flags, and installs."""
    compiler = any_compiler()
    need("make")
    copy = shutil.copytree(NATIVE, tmp_path / "native", ignore=shutil.ignore_patterns("corpus", "build"))
    make = ["make", "-C", str(copy), f"CC={compiler}", "CFLAGS=-O2", "CPPFLAGS=-DUNUSED_HERE=1", "WERROR=1"]
    environment = {"KVL_STRESS_MS": "50", **os.environ}
    for target in (["check"], ["install", "PREFIX=/usr", f"DESTDIR={tmp_path / 'root'}"]):
        result = run([*make, *target], environment)
        assert result.returncode == 0, result.stdout + result.stderr
    assert "-DUNUSED_HERE=1" in result.stdout
    installed = tmp_path / "root/usr"
    source = tmp_path / "user.c"
    source.write_text("#include <kvledger.h>\nint main(void) { kvl_close(0); return 0; }\n")
    program = str(tmp_path / "user")
    flags = [f"-I{installed}/include", f"-L{installed}/lib", f"-Wl,-rpath,{installed}/lib"]
    result = run([compiler, *flags, "-o", program, str(source), "-lkvledger"])
    assert result.returncode == 0, result.stderr
    assert run([program]).returncode == 0


def exported_names() -> set[str]:
    """Return what the version script exports."""
    text = (NATIVE / "kvledger.map").read_text()
    return set(re.findall(r"^\s*(kvl_\w+);", text, re.MULTILINE))


def declared_names() -> set[str]:
    """Return the functions of the header, as the preprocessor leaves it."""
    compiler = any_compiler()
    command = [compiler, "-E", "-P", "-DKVL_DECLARATIONS_ONLY", str(NATIVE / "kvledger.h")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\b(kvl_\w+)\s*\(", text))


def dynamic_symbols(option: str) -> list[str]:
    """Return a symbol table of the library as installed."""
    need("nm")
    command = ["nm", "-D", option, str(LIBRARY)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_header_exports_and_binding_name_the_same_functions() -> None:
    """What the header declares is what the version script lists, the library exports and the binding knows."""
    library = ffi.dlopen(str(LIBRARY))
    bound = {name for name in dir(library) if name.startswith("kvl_")}
    defined = {line.split()[-1].split("@")[0] for line in dynamic_symbols("--defined-only")}
    assert declared_names() == exported_names() == bound == defined


def test_library_needs_nothing_but_libc() -> None:
    """Every symbol that the library leaves open is one of glibc, or weak."""
    lines = dynamic_symbols("--undefined-only")
    strong = [line.split() for line in lines if line.split()[-2] == "U"]
    assert [words[-1] for words in strong if "@GLIBC_" not in words[-1]] == []


def test_only_the_isolated_stores_touch_signals(tmp_path: Path) -> None:
    """No object but the one of isolate.c refers to a function that sets a signal's handler or mask."""
    compiler = any_compiler()
    need("nm")
    users = {}
    for source in SOURCES:
        target = str(tmp_path / f"{Path(source).stem}.o")
        assert run([compiler, *STRICT, "-O2", "-fPIC", "-c", source, "-o", target]).returncode == 0
        names = run(["nm", "--undefined-only", target]).stdout
        users[Path(source).name] = bool(re.search(r"\b(sig\w+|signal|bsd_signal|sysv_signal|signalfd)\b", names))
    assert users.pop("isolate.c") is True
    assert not any(users.values()), users


def test_binding_and_header_agree_to_the_last_offset(tmp_path: Path) -> None:
    """A C file that states every size, offset, constant and prototype of the binding compiles with the header."""
    compiler = any_compiler()
    library = ffi.dlopen(str(LIBRARY))
    lines = ["#include <assert.h>", "#include <stddef.h>", '#include "kvledger.h"']
    structures = {name for kind in ffi.list_types() for name in kind if name.startswith("kvl_")} - {"kvl_ledger"}
    assert len(structures) == 6
    for name in sorted(structures):
        ctype = ffi.typeof(f"struct {name}")
        lines.append(f"static_assert(sizeof(struct {name}) == {ffi.sizeof(ctype)}, {str(name)!r});".replace("'", '"'))
        for field, info in ctype.fields:
            what = f'"{name}.{field}"'
            lines.append(f"static_assert(offsetof(struct {name}, {field}) == {info.offset}, {what});")
            lines.append(f"static_assert(sizeof(((struct {name} *)0)->{field}) == {ffi.sizeof(info.type)}, {what});")
            declaration = ffi.getctype(info.type, f"(*{name}_{field})")
            lines.append(f"void check_{name}_{field}(struct {name} *whole);")
            lines.append(f"void check_{name}_{field}(struct {name} *whole)")
            lines.append(f"{{ {declaration} = &whole->{field}; (void){name}_{field}; }}")
    for name in dir(library):
        value = getattr(library, name)
        if isinstance(value, int):
            lines.append(f'static_assert({name} == {value}, "{name}");')
        else:
            lines.append(f"extern {ffi.getctype(ffi.typeof(value), f'check_{name}')};")
            lines.append(f"{ffi.getctype(ffi.typeof(value), f'check_{name}')} = {name};")
    source = tmp_path / "agree.c"
    source.write_text("\n".join(lines) + "\n")
    # cffi knows no const, so it is left out on both sides.
    flags = [*STRICT, "-Dconst=", "-Wno-discarded-qualifiers" if compiler == "gcc" else "-Wno-unknown-warning-option"]
    command = [compiler, *flags, f"-I{NATIVE}", "-c", str(source), "-o", str(tmp_path / "agree.o")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert len(lines) > 100


@pytest.mark.parametrize(
    ("compiler", "standard"), [("gcc", "c11"), ("clang", "c11"), ("g++", "c++17"), ("clang++", "c++17")]
)
def test_header_stands_alone_in_c_and_in_cplusplus(compiler: str, standard: str, tmp_path: Path) -> None:
    """The public header, twice included, compiles and links by itself, as C11 and as C++."""
    need(compiler)
    functions = sorted(declared_names())
    addresses = ",\n    ".join(f"(void (*)(void))&{name}" for name in functions)
    source = tmp_path / "alone.c"
    source.write_text(
        '#include "kvledger.h"\n#include "kvledger.h"\n'
        f"void (*const all[])(void) = {{\n    {addresses}}};\n"
        "int main(int count, char **names)\n{\n    (void)names;\n    return all[count] == 0;\n}\n"
    )
    flags = [f"-std={standard}", "-Wall", "-Wextra", "-Wno-cast-function-type", "-Werror", f"-I{NATIVE}"]
    target = str(tmp_path / "alone")
    link = ["-x", "none", str(LIBRARY), f"-Wl,-rpath,{LIBRARY.parent}"]
    language = "c++" if "++" in standard else "c"
    result = run([compiler, *flags, "-x", language, str(source), *link, "-o", target])
    assert result.returncode == 0, result.stderr
    assert run([target]).returncode == 0
