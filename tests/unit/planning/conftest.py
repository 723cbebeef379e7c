"""Composing a configuration takes a tenth of a second, so each one is composed once and copied."""

import copy
import functools
from typing import Callable

import pytest

from deepspec.config.compose import compose_config
from deepspec.config.schema import Config


@functools.cache
def _composed(overrides: tuple[str, ...]) -> Config:
    return compose_config(list(overrides))


@pytest.fixture
def composed() -> Callable[..., Config]:
    """``composed("+experiment=tiny", ..)``: a configuration of one's own."""
    return lambda *overrides: copy.deepcopy(_composed(overrides))
