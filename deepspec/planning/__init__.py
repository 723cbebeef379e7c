"""Plans and checks that need no torch: what a run would take, and what is missing before it starts."""

from deepspec.planning.plan import Plan, make_plan, render
from deepspec.planning.preflight import preflight
from deepspec.planning.validate import validate

__all__ = ["Plan", "make_plan", "preflight", "render", "validate"]
