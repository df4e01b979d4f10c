"""Builds a wheel with the files of the folder DDP_MP_FILES, which wheel.py prepares, in the package."""

import os
import pathlib
import platform

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


def prepared():
    folder = os.environ.get("DDP_MP_FILES")
    if not folder:
        raise SystemExit("nothing is built yet; use `make wheel` or `make record-wheel`")
    return list(pathlib.Path(folder).iterdir())


class Metadata(MetadataHookInterface):
    def update(self, metadata):
        if any(file.name == "ddp-mp" for file in prepared()):
            ours = self.config["with-program"]
            metadata.update(ours, scripts=metadata["scripts"] | ours["scripts"])


class Files(BuildHookInterface):
    def initialize(self, version, build_data):
        for file in prepared():
            build_data["force_include"][str(file)] = f"ddp_mp/{file.name}"
        # For any Python 3. auditwheel replaces the platform.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"
