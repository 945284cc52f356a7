"""The C library: its own tests under all compilers and sanitizers at hand; its exports, header and binding compared."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvcached._declarations import ffi

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
SOURCES = [str(path) for path in sorted(NATIVE.glob("*.c"))]
TESTS = [str(path) for path in sorted((NATIVE / "tests").glob("*.c"))]
LIBRARY = ROOT / "kvcached" / "libkvledger.so"
STRICT = ["-std=c11", "-g", "-pthread", "-Wall", "-Wextra", "-Wconversion", "-Werror"]

STRESS_MS = {"plain": "400", "crash": "50", "address": "150", "thread": "300"}
BUILDS = {
    "plain": ["-O2"],
    "crash": ["-O2", "-DKVL_CRASH_POINTS"],
    "address": ["-O1", "-DKVL_CRASH_POINTS", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-fsanitize=thread"],
}
COMPILERS = [compiler for compiler in ("gcc", "clang") if shutil.which(compiler)]


def build(compiler: str, kind: str, target: Path) -> Path:
    """Compile the tests together with the library; skip where a compiler came without that sanitizer's library."""
    flags = [*STRICT, *BUILDS[kind]]
    if compiler == "gcc" and kind == "thread":
        flags.append("-Wno-tsan")  # it does not model fences; all that is fenced here is atomic as well
    command = [compiler, *flags, "-o", str(target), *SOURCES, *TESTS]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0 and re.search(r"cannot find .*(asan|tsan|ubsan|clang_rt)", result.stderr):
        pytest.skip(f"{compiler} has no library for {kind}")
    assert result.returncode == 0, result.stderr
    return target


@pytest.mark.parametrize(
    ("compiler", "kind"),
    [(compiler, kind) for compiler in COMPILERS for kind in BUILDS if (compiler, kind) != ("clang", "crash")],
)
def test_c_tests_hold(compiler: str, kind: str, tmp_path: Path) -> None:
    """Every C test passes, plain, with crash points, and under the sanitizers."""
    program = build(compiler, kind, tmp_path / "tests")
    directory = tmp_path / "files"
    directory.mkdir()
    environment = {
        **os.environ,
        "KVL_STRESS_MS": os.environ.get("KVL_STRESS_MS", STRESS_MS[kind]),
        "ASAN_OPTIONS": "handle_sigbus=0:allocator_may_return_null=1",
        "TSAN_OPTIONS": "handle_sigbus=0:halt_on_error=1:exitcode=66",
    }
    command = [str(program), str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "not ok" not in result.stdout


def exported_names() -> set[str]:
    """Return what the version script exports."""
    text = (NATIVE / "kvledger.map").read_text()
    return set(re.findall(r"^\s*(kvl_\w+);", text, re.MULTILINE))


def declared_names() -> set[str]:
    """Return the functions of the header, as the preprocessor leaves it."""
    compiler = COMPILERS[0] if COMPILERS else pytest.skip("no C compiler")
    command = [compiler, "-E", "-P", "-DKVL_DECLARATIONS_ONLY", str(NATIVE / "kvledger.h")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\b(kvl_\w+)\s*\(", text))


def dynamic_symbols(option: str) -> list[str]:
    """Return a symbol table of the library as installed."""
    if shutil.which("nm") is None:
        pytest.skip("no nm")
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


def test_binding_and_header_agree_to_the_last_offset(tmp_path: Path) -> None:
    """A C file that states every size, offset, constant and prototype of the binding compiles with the header."""
    compiler = COMPILERS[0] if COMPILERS else pytest.skip("no C compiler")
    library = ffi.dlopen(str(LIBRARY))
    lines = ["#include <assert.h>", "#include <stddef.h>", '#include "kvledger.h"']
    structures = {name for kind in ffi.list_types() for name in kind if name.startswith("kvl_")} - {"kvl_ledger"}
    assert len(structures) == 5
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


@pytest.mark.parametrize("compiler", COMPILERS)
def test_header_stands_alone_in_c_and_in_cplusplus(compiler: str, tmp_path: Path) -> None:
    """The public header compiles by itself, twice included, as C11 and where there is a compiler as C++."""
    languages = {"c": "c11"}
    if shutil.which({"gcc": "g++", "clang": "clang++"}[compiler]):
        languages["c++"] = "c++17"
    source = tmp_path / "alone.c"
    source.write_text('#include "kvledger.h"\n#include "kvledger.h"\nint unused_here;\n')
    for language, standard in languages.items():
        command = [compiler, "-x", language, f"-std={standard}", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}"]
        result = subprocess.run(
            [*command, "-c", str(source), "-o", str(tmp_path / "alone.o")], capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
