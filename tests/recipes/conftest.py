import importlib.util
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES / "images"))


@pytest.fixture(scope="session")
def recipes():
    return RECIPES


@pytest.fixture(scope="session")
def build():
    """recipes/images/build.py; loaded by path, since PyPA's `build` has the same name."""
    spec = importlib.util.spec_from_file_location("gpurun_images_build", RECIPES / "images" / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
