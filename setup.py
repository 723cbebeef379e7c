"""Puts conf/ into the package of a wheel, as deepspec/conf; everything else is in setup.cfg.

In a repository, an editable installation included, the files are read from conf/ in its root.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithConf(build_py):
    """Copies what Hydra composes from beside the modules."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree(ROOT / "conf", Path(self.build_lib) / "deepspec" / "conf", dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithConf})
