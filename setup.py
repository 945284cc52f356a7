"""Build libkvledger.so with the system's C compiler and generate its cffi declarations from the public header.

The library has a plain C ABI and the declarations are used in cffi's out-of-line ABI mode, so the wheel fits every
CPython and PyPy of its platform: its tag is ``py3-none-<platform>``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.errors import CompileError, PlatformError

if TYPE_CHECKING:
    from collections.abc import Sequence

NATIVE = Path("native")
SOURCES = [NATIVE / name for name in ("file.c", "slot.c", "isolate.c", "bell.c", "audit.c")]
HEADERS = [NATIVE / name for name in ("kvledger.h", "layout.h", "handle.h", "kvledger.map")]
LIBRARY = "kvcached/ledger/libkvledger.so"
DECLARATIONS = "kvcached/ledger/_declarations.py"
WARNINGS = ["-Wall", "-Wextra", "-Wconversion"]
STRICT_VARIABLE = "KVCACHED_WERROR"
"""Set to 1 where warnings are errors: in the project's own builds. A newer compiler's must not fail a user's."""


def find_compiler() -> str:
    """Return the C compiler: ``$CC``, else cc, gcc or clang."""
    wanted = os.environ.get("CC")
    for candidate in [wanted] if wanted else ["cc", "gcc", "clang"]:
        if candidate and shutil.which(shlex.split(candidate)[0]):
            return candidate
    message = (
        f"no C compiler found (looked for {wanted or 'cc, gcc, clang'}): kvcached builds a small C library; "
        "install gcc (Debian: apt-get install gcc libc6-dev) or set CC"
    )
    raise PlatformError(message)


def run_compiler(arguments: Sequence[str]) -> str:
    """Run the compiler and return what it printed."""
    command = [*shlex.split(find_compiler()), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if result.returncode != 0:
        message = f"{' '.join(command)}\n{result.stderr}"
        raise CompileError(message)
    return result.stdout


def flags_of(*variables: str) -> list[str]:
    """Return the flags that the environment asks for, as distributors do."""
    return [flag for variable in variables for flag in shlex.split(os.environ.get(variable, ""))]


def compile_library(target: Path) -> None:
    """Compile and link the shared library. The same sources and compiler give the same bytes, wherever they lie."""
    target.parent.mkdir(parents=True, exist_ok=True)
    strict = ["-Werror"] if os.environ.get(STRICT_VARIABLE) == "1" else []
    chosen = ["-O2", "-g", "-fno-plt", *WARNINGS, *strict, *flags_of("CPPFLAGS", "CFLAGS")]
    needed = ["-std=c11", "-fPIC", "-shared", "-pthread", f"-ffile-prefix-map={Path.cwd()}=."]
    version_script = f"-Wl,--version-script={NATIVE / 'kvledger.map'},-z,defs,-z,relro,-z,now,-z,nodelete"
    sources = map(str, SOURCES)
    run_compiler([*chosen, *needed, *sources, *flags_of("LDFLAGS"), version_script, "-o", str(target)])


def generate_declarations(target: Path) -> None:
    """Let the preprocessor reduce the header to declarations and cffi compile them into a module."""
    from cffi import FFI  # noqa: PLC0415 - a build dependency: metadata commands must work without it

    header = str(NATIVE / "kvledger.h")
    declarations = run_compiler([*flags_of("CPPFLAGS"), "-E", "-P", "-DKVL_DECLARATIONS_ONLY", header])
    builder = FFI()
    builder.cdef(declarations)
    builder.set_source("kvcached.ledger._declarations", None)
    target.parent.mkdir(parents=True, exist_ok=True)
    builder.emit_python_code(str(target))


class BuildNative(Command):
    """A step of ``build`` after setuptools' protocol for sub-commands, so that editable installs work as well."""

    description = "build libkvledger.so and its cffi declarations"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []
    editable_mode = False
    build_lib: str | None = None

    def initialize_options(self) -> None:
        """Start without a build directory."""
        self.build_lib = None

    def finalize_options(self) -> None:
        """Share the build directory of the other steps."""
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        """Build both files where the package will be read from."""
        root = Path() if self.editable_mode else Path(self.build_lib or "build/lib")
        compile_library(root / LIBRARY)
        generate_declarations(root / DECLARATIONS)

    def get_source_files(self) -> list[str]:
        """List what the source distribution has to carry."""
        return [str(path) for path in SOURCES + HEADERS]

    def get_outputs(self) -> list[str]:
        """List what this step makes."""
        root = Path() if self.editable_mode else Path(self.build_lib or "build/lib")
        return [str(root / LIBRARY), str(root / DECLARATIONS)]

    def get_output_mapping(self) -> dict[str, str]:
        """Map nothing: in editable mode the files are made in the source tree itself."""
        return {}


class Build(build):
    """The standard build with the native step."""

    sub_commands: ClassVar[Any] = [*build.sub_commands, ("build_native", None)]

    def run(self) -> None:
        """Build from nothing: what an earlier build left may be of a module that is gone, and would be shipped."""
        shutil.rmtree(Path(self.build_lib) / "kvcached", ignore_errors=True)
        super().run()


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag of a wheel that holds a plain shared library."""
        platform: str = super().get_tag()[2]
        return "py3", "none", platform


class NativeDistribution(Distribution):
    """A distribution that is not pure Python."""

    def has_ext_modules(self) -> bool:
        """Return True: the wheel holds compiled code."""
        return True


COMMANDS: dict[str, Any] = {"build": Build, "build_native": BuildNative, "bdist_wheel": PlatformWheel}

if __name__ == "__main__":
    setup(cmdclass=COMMANDS, distclass=NativeDistribution)
