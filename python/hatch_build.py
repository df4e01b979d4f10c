"""Adds the files of the folder DDP_MP_FILES, which wheel.py prepares, to the package."""

import os
import pathlib
import platform

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Files(BuildHookInterface):
    def initialize(self, version, build_data):
        folder = os.environ.get("DDP_MP_FILES")
        if not folder:
            raise SystemExit("the program is not built yet; use `make wheel`")
        for file in pathlib.Path(folder).iterdir():
            build_data["force_include"][str(file)] = f"ddp_mp/{file.name}"
        # For any Python 3. auditwheel replaces the platform.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"
