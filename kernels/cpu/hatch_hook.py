"""Compiles the CPU kernels while the package is built; run by hatchling, not imported by us."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsBuildHook(BuildHookInterface):
    """Puts the library beside the sources; without a compiler it is left to the first use."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, and make the wheel one of this platform."""
        folder = Path(self.root) / "kernels" / "cpu"
        spec = importlib.util.spec_from_file_location("ptq_kernels_build", folder / "build.py")
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        target = folder / "_native"
        try:
            made = build.build(target)
        except build.CompilerError as error:
            self.app.display_warning(f"CPU kernels are not compiled now: {error}")
            return
        for stale in target.glob("*.so"):
            if stale != made:
                stale.unlink()
        build_data["artifacts"].append("/kernels/cpu/_native/*.so")
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"  # plain C functions: any Python
