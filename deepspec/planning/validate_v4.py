"""Checks of ``drafter.algorithm=dspark_v4`` and its options."""

from dataclasses import fields

from deepspec.config.schema import MISSING, Config
from deepspec.config.schema_v4 import V4Config
from deepspec.drafters.v4.options import is_v4, v4_shape
from deepspec.errors import ConfigError
from deepspec.planning.require import require

_STAND_IN = 1 << 20  # for a size that the target has not told yet


def check_v4(config: Config) -> None:
    """Values that the backbone takes, alone and with other groups. Raises ConfigError."""
    drafter, shape = config.drafter, config.target.shape
    if not is_v4(drafter.algorithm):
        changed = [field.name for field in fields(V4Config)
                   if getattr(drafter.v4, field.name) != getattr(V4Config(), field.name)]
        require(not changed, f"drafter.v4.{(changed or [''])[0]}", getattr(drafter.v4, (changed or ["hc_mult"])[0]),
                f"left out with drafter.algorithm={drafter.algorithm}, which has no such backbone (drafter=dspark_v4 "
                "has)")
        return
    sizes = {name: _STAND_IN if getattr(shape, name) == MISSING else getattr(shape, name)
             for name in ("hidden_size", "num_heads", "head_dim")}
    v4_shape(drafter, **sizes)
    require(drafter.block == "qwen3", "drafter.block", drafter.block,
            "left out with drafter.algorithm=dspark_v4, which has stages of its own")
    require(not config.trainer.compile, "trainer.compile", config.trainer.compile,
            "false with drafter.algorithm=dspark_v4: what its experts compute depends on the tokens")
    require(config.trainer.attention == "auto", "trainer.attention", config.trainer.attention,
            "auto with drafter.algorithm=dspark_v4: it has an attention of its own for its windows and sinks")
    require(list(config.export.formats) == ["deepspec"], "export.formats", list(config.export.formats),
            "[deepspec] with drafter.algorithm=dspark_v4: other layouts hold dense drafters only")
    if config.export.fold_calibration:
        raise ConfigError("export.fold_calibration=true needs a bias in the confidence head, and that of "
                          "drafter.algorithm=dspark_v4 has none. Leave it out: serving/dspark_sts.json has the "
                          "temperatures.")
