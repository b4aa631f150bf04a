"""Build hook: compile the optional native library where a C++ compiler exists, else go on without it."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("src/confide/_native")


class NativeKernelHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled library to a wheel (an editable one too) and marks the wheel with its platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        builder = runpy.run_path(str(Path(self.root) / NATIVE / "build.py"))
        reason: str = builder["build"]()
        if reason:
            self.app.display_warning(f"no native library, the torch path will be used: {reason}")
            return
        build_data["artifacts"].append(f"/{NATIVE.as_posix()}/{builder['LIBRARY'].name}")
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
